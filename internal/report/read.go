package report

import (
	"context"
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Read enumerates the driver once, through the monitor that an agent would run, and returns the first state: at the
// latest after cfg's call deadline if a driver call hangs, or when ctx ends. A host without a driver is a state, not an
// error. The conditions of history still apply; nil = no history. Its Save should do nothing.
func Read(ctx context.Context, open func() (monitor.Session, error), cfg core.Config, history monitor.Store) core.State {
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
	return m.State()
}
