package monitor

import (
	"context"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// change returns the state that follows from the present one at a time.
type change func(core.State, time.Time) (core.State, error)

// command is a change that Run's goroutine makes for a caller.
type command struct {
	change change
	reply  chan<- error // capacity 1
}

// do has Run's goroutine make a change and waits for it.
func (m *Monitor) do(ctx context.Context, c change) error {
	reply := make(chan error, 1)
	select {
	case m.commands <- command{c, reply}:
	case <-ctx.Done():
		return ctx.Err()
	}
	return <-reply // Run's goroutine replies immediately: it does nothing that blocks
}

// apply makes the change of a command. Only Run's goroutine calls it.
func (m *Monitor) apply(c command) {
	now := m.now()
	next, err := c.change(m.State(), now)
	if err == nil {
		m.publish(next)
	}
	c.reply <- err
}

// Clear removes conditions by an operator's command and returns them: see health.Ledger.Clear for its errors. It takes effect
// whether or not a session is open.
func (m *Monitor) Clear(ctx context.Context, c health.Command) (cleared []health.Condition, err error) {
	err = m.do(ctx, func(s core.State, now time.Time) (next core.State, err error) {
		next, cleared, err = s.Clear(m.cfg, now, c)
		return next, err
	})
	return cleared, err
}

// Ignore disregards conditions until a time and returns them: see health.Ledger.Ignore for its errors.
func (m *Monitor) Ignore(ctx context.Context, c health.Command, until time.Time) (ignored []health.Condition, err error) {
	err = m.do(ctx, func(s core.State, now time.Time) (next core.State, err error) {
		next, ignored, err = s.Ignore(m.cfg, now, c, until)
		return next, err
	})
	return ignored, err
}

// ProofFailed records that a GPU failed its proof: see health.Ledger.ProofFailed. When it returns, the inventory without the GPU is published.
func (m *Monitor) ProofFailed(ctx context.Context, id gpu.DeviceID, f health.ProofFailure) error {
	return m.do(ctx, func(s core.State, now time.Time) (core.State, error) { return s.ProofFailed(m.cfg, now, id, f), nil })
}

// ProofPassed records that a GPU passed its proof: see health.Ledger.ProofPassed.
func (m *Monitor) ProofPassed(ctx context.Context, id gpu.DeviceID) error {
	return m.do(ctx, func(s core.State, now time.Time) (core.State, error) { return s.ProofPassed(m.cfg, now, id), nil })
}

// Rebind binds the positions of the policy (indices, numbers of devices, the common MIG profile) to the devices that they
// select by the driver's present order: see core.State.Rebind for its error. It returns what was bound before and what is
// bound now. It takes effect on every agent of this node that shares the state directory, as for the numbers of devices.
func (m *Monitor) Rebind(ctx context.Context) (was, is []inventory.PositionBinding, err error) {
	err = m.do(ctx, func(s core.State, now time.Time) (core.State, error) {
		next, err := s.Rebind(m.cfg, now)
		was, is = s.Inventory.PositionBindings(), next.Inventory.PositionBindings()
		return next, err
	})
	return was, is, err
}

// ApplyPolicy replaces the part of the configuration that decides what is offered: policy, MIG strategy, excluded devices and
// how shares are packed. The session, the health history and the rest of the configuration stay. It takes effect whether or
// not a session is open; an error is that of ctx, and nothing has changed then.
func (m *Monitor) ApplyPolicy(ctx context.Context, offer core.Config) error {
	return m.do(ctx, func(s core.State, now time.Time) (core.State, error) {
		m.cfg.Policy, m.cfg.MIG, m.cfg.Exclude, m.cfg.Packed = offer.Policy, offer.MIG, offer.Exclude, offer.Packed
		return s.Observe(m.cfg, now), nil
	})
}

// Report adds observations that did not come from the driver's session: from the kernel log or a simulated fault.
// It never blocks. It reports false if its queue is full, and drops what found no room.
func (m *Monitor) Report(obs ...health.Observation) bool {
	for _, o := range obs {
		select {
		case m.reported <- o:
		default:
			return false
		}
	}
	return true
}

// Reserved reports that devices were reserved for new work. It wakes no goroutine and never blocks.
func (m *Monitor) Reserved(devices []gpu.Device) { m.reservations.add(devices) }

// UpdateHost changes what is known of the node apart from the driver. Each part of the agent that finds out something of it changes the fields
// that are its own. It never blocks; values that are replaced before Run's goroutine has read them are skipped. A change before Run counts from
// the first reading on.
func (m *Monitor) UpdateHost(change func(*inventory.Host)) {
	m.hostUpdate.Lock()
	defer m.hostUpdate.Unlock()
	h := m.host.Load()
	change(&h)
	m.host.Store(h)
}

// SetCDI sets what the CDI specifications of this agent define: see UpdateHost.
func (m *Monitor) SetCDI(c *inventory.CDI) {
	m.UpdateHost(func(h *inventory.Host) { h.CDI = c })
}

// SetOccupied sets the devices that take no new work because processes use them, if they differ from those set before: see UpdateHost.
func (m *Monitor) SetOccupied(devices []inventory.Occupied) {
	if slices.Equal(m.host.Load().Occupied, devices) {
		return
	}
	m.UpdateHost(func(h *inventory.Host) { h.Occupied = devices })
}

// SetProofs sets what is known of the proofs of GPUs, if that differs from what was set before: see UpdateHost.
func (m *Monitor) SetProofs(p *inventory.Proofs) {
	if m.host.Load().Proofs.Equal(p) {
		return
	}
	m.UpdateHost(func(h *inventory.Host) { h.Proofs = p })
}

// SetLimits sets what is known of the support for limits of memory, if that differs from what was set before: see UpdateHost.
func (m *Monitor) SetLimits(l *inventory.Limits) {
	if m.host.Load().Limits.Equal(l) {
		return
	}
	m.UpdateHost(func(h *inventory.Host) { h.Limits = l })
}

// applyHost applies the latest host. Only Run's goroutine calls it.
func (m *Monitor) applyHost() {
	var h inventory.Host
	h, m.hostChanged = m.host.LoadNext()
	m.update(func(s core.State, now time.Time) core.State { return s.WithHost(m.cfg, now, h) })
}
