package monitor

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Rebind binds the positions of the policy (indices, numbers of devices, the common MIG profile) to the devices that they
// mean by the driver's present order: see core.State.Rebind for its error. It returns what was bound before and is bound
// now. It takes effect on every agent of this host that shares the state directory, as for the numbers of devices.
func (m *Monitor) Rebind(ctx context.Context) (was, is []core.PositionBinding, err error) {
	err = m.order(ctx, func(s core.State, now time.Time) (core.State, error) {
		next, err := s.Rebind(m.cfg, now)
		was, is = s.Inventory.PositionBindings(), next.Inventory.PositionBindings()
		return next, err
	})
	return was, is, err
}

// ApplyPolicy has the monitor go on with what another configuration says about the offer: policy, MIG strategy, what is
// excluded and how shares are packed. The session, what is known of health and the rest of the configuration stay.
// It takes effect whether or not a session is open; an error is that of ctx, and nothing changed.
func (m *Monitor) ApplyPolicy(ctx context.Context, offer core.Config) error {
	return m.order(ctx, func(s core.State, now time.Time) (core.State, error) {
		m.cfg.Policy, m.cfg.MIG, m.cfg.Exclude, m.cfg.Packed = offer.Policy, offer.MIG, offer.Exclude, offer.Packed
		return s.Observe(m.cfg, now), nil
	})
}
