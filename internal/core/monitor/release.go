package monitor

import (
	"context"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// AwaitReleased returns when the driver is released for a reset (inventory.Ownership.DriverReleased) and nothing of it is held by this process any more,
// and fails with *HeldError if a call hangs: no other one is made then, either. Without a release it waits for one until ctx ends.
func (m *Monitor) AwaitReleased(ctx context.Context) error {
	if err := m.await(ctx, core.State.DriverReleased); err != nil {
		return fmt.Errorf("the driver is not released so far: %w", err)
	}
	return m.awaitClosed(ctx)
}

// AwaitReading returns when the driver is not released, or no longer, and all GPUs were read and checked since.
func (m *Monitor) AwaitReading(ctx context.Context) error {
	err := m.await(ctx, func(s core.State) bool { return s.Release.GPU == "" && s.Snapshot.Driver.State == gpu.DriverReady })
	if err != nil {
		d := m.Current().Driver()
		return fmt.Errorf("the GPUs are not read so far (driver %s: %s): %w", d.State, d.Reason, err)
	}
	return nil
}

// await waits for a state until ctx ends.
func (m *Monitor) await(ctx context.Context, reached func(core.State) bool) error {
	for s := range m.state.Watch(ctx) {
		if reached(s) {
			return nil
		}
	}
	return ctx.Err()
}

// passTime applies the passage of time, as far as it can change the state.
func (m *Monitor) passTime() {
	m.listPrior()
	if m.State().Release.GPU != "" {
		m.update(func(s core.State, now time.Time) core.State { return s.WithoutOldVerdicts(m.cfg, now) })
	}
	if m.State().NeedsTick() {
		m.observe()
	}
}
