package report

import (
	"context"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Read enumerates the driver once, through the monitor that an agent would run, and returns the first state: at the
// latest after cfg's call deadline if a driver call hangs, or when ctx ends. A host without a driver is a state, not an
// error. The conditions of history still apply; nil = no history. Its Save should do nothing.
func Read(ctx context.Context, open func() (monitor.Session, error), cfg core.Config, history monitor.Store) core.State {
	state, _ := read(ctx, open, cfg, history, 0)
	return state
}

// usageAtMost is how long ReadUse waits for the usage after the first state.
const usageAtMost = 3 * time.Second

// ReadUse is Read, and reads the usage of the devices: nil if the driver does not answer within 3 s.
func ReadUse(ctx context.Context, open func() (monitor.Session, error), cfg core.Config, history monitor.Store) (core.State, []gpu.Usage) {
	return read(ctx, open, cfg, history, usageAtMost)
}

// read waits for the usage so long after the first state; 0 = it is not read.
func read(ctx context.Context, open func() (monitor.Session, error), cfg core.Config, history monitor.Store, forUsage time.Duration) (s core.State, usage []gpu.Usage) {
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
	if forUsage > 0 {
		limit, end := context.WithTimeout(ctx, forUsage)
		defer end()
		usage, _ = m.Usage(limit) // without a driver there is none
	}
	return m.State(), usage
}
