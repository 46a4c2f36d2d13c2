// Package report shows an operator what an agent offers: the same words for both agents, as a table and
// as JSON.
package report

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Read asks the driver once and returns the first inventory that follows: see ReadState.
func Read(ctx context.Context, open func() (monitor.Session, error), cfg core.Config) *core.Inventory {
	return ReadState(ctx, open, cfg).Inventory
}

// ReadState asks the driver once, through the monitor that an agent would run, and returns the first state
// that follows: at the latest after the configuration's call deadline, if the driver hangs, or when ctx
// ends. A machine without a driver is an answer and not an error.
func ReadState(ctx context.Context, open func() (monitor.Session, error), cfg core.Config) core.State {
	return ReadAfter(ctx, open, cfg, nil)
}

// ReadAfter is ReadState for an agent with a history: what stood still stands. The store is not meant to save
// anything; nil is no history.
func ReadAfter(ctx context.Context, open func() (monitor.Session, error), cfg core.Config, history monitor.Store) core.State {
	ctx, cancel := context.WithCancel(ctx)
	m := monitor.New(open, cfg, slog.New(slog.DiscardHandler), history)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = m.Run(ctx) // why it ended early is in the inventory too
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for inv := range m.Watch(ctx) {
		if inv.Driver().State != core.DriverPending {
			break
		}
	}
	return m.State()
}

// WriteJSON writes the report for programs.
func (r Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
