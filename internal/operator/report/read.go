package report

import (
	"context"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// usageAtMost is how long Read waits for the usage after the first state.
const usageAtMost = 3 * time.Second

// Read enumerates the driver once, through the monitor that an agent would run, and returns the first state: at the
// latest after cfg's call deadline if a driver call hangs, or when ctx ends. A node without a driver is a state, not an
// error. The conditions of history still apply; nil = no history. Its Save should do nothing. withUsage: it then reads the usage of the devices;
// nil if the driver does not answer within 3 s.
func Read(ctx context.Context, open func() (monitor.Session, error), cfg core.Config, history monitor.Store, withUsage bool) (s core.State, usage []gpu.Usage) {
	ctx, cancel := context.WithCancel(ctx)
	m := monitor.New(open, cfg, slog.New(slog.DiscardHandler), history)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = m.Run(ctx) // its error is in the driver state too
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for inv := range m.Watch(ctx) {
		if inv.Driver().State != gpu.DriverPending {
			break
		}
	}
	if withUsage {
		limit, end := context.WithTimeout(ctx, usageAtMost)
		defer end()
		usage, _ = m.Usage(limit) // without a driver there is none
	}
	return m.State(), usage
}
