package monitor

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// order is a change that somebody asked for, made by Run's goroutine.
type order struct {
	change func(core.State, time.Time) (core.State, error)
	reply  chan<- error // capacity 1
}

// Report tells of something that did not come from the driver's session: the kernel log, a rehearsal, a
// reservation. It never blocks; what the monitor can't take any more is dropped, and false.
func (m *Monitor) Report(obs ...core.Observation) bool {
	for _, o := range obs {
		select {
		case m.told <- o:
		default:
			return false
		}
	}
	return true
}

// SetHost tells what the host has beside the driver now; it replaces all that was told before. It never blocks, and
// what comes faster than it is taken in is skipped. What is told before Run counts from the first reading on.
func (m *Monitor) SetHost(h core.Host) {
	m.host.Store(h)
	select {
	case m.moved <- struct{}{}:
	default: // Run's goroutine has not looked at the one before yet, and will find this one
	}
}

// arrive takes in what was told of the host, if anything was.
func (m *Monitor) arrive() {
	select {
	case <-m.moved:
		m.settle()
	default:
	}
}

// settle takes in the latest that was told of the host.
func (m *Monitor) settle() {
	m.update(func(s core.State, now time.Time) core.State { return s.WithHost(m.cfg, now, m.host.Load()) })
}

// Reserved tells that units were handed out to new work. It never blocks.
func (m *Monitor) Reserved(devices []core.Device) {
	for _, d := range devices {
		m.Report(core.Observation{At: d.At, Kind: core.Reserved})
	}
}

// Clear drops conditions by an operator's order and returns them: see core.Ledger.Clear for its errors. It
// takes effect whether or not a session is open.
func (m *Monitor) Clear(ctx context.Context, o core.Command) ([]core.Condition, error) {
	var cleared []core.Condition
	err := m.order(ctx, func(s core.State, now time.Time) (next core.State, err error) {
		next, cleared, err = s.Clear(m.cfg, now, o)
		return next, err
	})
	return cleared, err
}

// Ignore disregards conditions until a time and returns them: see core.Ledger.Ignore for its errors.
func (m *Monitor) Ignore(ctx context.Context, o core.Command, until time.Time) ([]core.Condition, error) {
	var ignored []core.Condition
	err := m.order(ctx, func(s core.State, now time.Time) (next core.State, err error) {
		next, ignored, err = s.Ignore(m.cfg, now, o, until)
		return next, err
	})
	return ignored, err
}

// order has Run's goroutine make a change, and waits for it.
func (m *Monitor) order(ctx context.Context, change func(core.State, time.Time) (core.State, error)) error {
	reply := make(chan error, 1)
	select {
	case m.orders <- order{change, reply}:
	case <-ctx.Done():
		return ctx.Err()
	}
	return <-reply // Run answers at once: it does nothing that blocks
}

func (m *Monitor) obey(o order) {
	now := m.now()
	next, err := o.change(m.State(), now)
	if err == nil {
		m.publish(next)
	}
	o.reply <- err
}
