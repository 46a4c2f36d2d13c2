package monitor

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// clock is the steady clock of the times in a core.State: it runs with the monotonic clock and agrees with the wall clock to
// within health.ClockTolerance. It is used by one goroutine.
type clock struct {
	wall    func() time.Time
	started time.Time // with its monotonic reading
	read    time.Time // what this clock showed then
}

func newClock(wall func() time.Time) *clock {
	return &clock{wall: wall, started: time.Now(), read: wall().Round(0)}
}

func (c *clock) now() time.Time { return c.read.Add(time.Since(c.started)) }

// adjust follows the wall clock if that has jumped, and returns by how much.
func (c *clock) adjust() time.Duration {
	d := c.wall().Round(0).Sub(c.now())
	if d.Abs() < health.ClockTolerance {
		return 0
	}
	c.read = c.read.Add(d)
	return d
}

// SetWallClock replaces time.Now as the wall clock, which may jump. Call it before Run.
func (m *Monitor) SetWallClock(now func() time.Time) { m.clock = newClock(now) }

// now is the time for the next change of the state. If the wall clock has jumped, it first shifts the times of the state.
// Only Run's goroutine calls it, and loads the state afterwards.
func (m *Monitor) now() time.Time {
	if d := m.clock.adjust(); d != 0 {
		m.log.Warn("wall clock jumped, recorded times shifted", "by", d.Round(time.Millisecond))
		m.state.Replace(m.State().Shift(d))
	}
	return m.clock.now()
}

// update publishes the state that follows from the present one. Only Run's goroutine calls it.
func (m *Monitor) update(next func(core.State, time.Time) core.State) (changed bool) {
	now := m.now()
	state := m.State()
	if reserved := m.reservations.take(state.Inventory); reserved != nil {
		state = state.Observe(m.cfg, now, reserved...) // before what happened since
	}
	return m.publish(next(state, now))
}
