package monitor

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// clock is the steady clock on which the times of a core.State lie: it runs with the monotonic clock and reads as the wall
// clock does, to within core.ClockTolerance. It is used by one goroutine.
type clock struct {
	wall    func() time.Time
	started time.Time // with its monotonic reading
	read    time.Time // what the clock read then
}

func newClock(wall func() time.Time) *clock {
	return &clock{wall: wall, started: time.Now(), read: wall().Round(0)}
}

func (c *clock) now() time.Time { return c.read.Add(time.Since(c.started)) }

// adjust follows the wall clock if that has jumped, and returns by how much.
func (c *clock) adjust() time.Duration {
	d := c.wall().Round(0).Sub(c.now())
	if d.Abs() < core.ClockTolerance {
		return 0
	}
	c.read = c.read.Add(d)
	return d
}

// SetWallClock replaces time.Now as the wall clock, which may jump. Call it before Run.
func (m *Monitor) SetWallClock(now func() time.Time) { m.clock = newClock(now) }

// now is the time for the next change of the state, whose times follow a jump of the wall clock first. Only Run's
// goroutine calls it, and takes the state afterwards.
func (m *Monitor) now() time.Time {
	if d := m.clock.adjust(); d != 0 {
		m.log.Warn("wall clock jumped, recorded times are moved along", "by", d.Round(time.Millisecond))
		m.cell.Replace(m.State().Shift(d))
	}
	return m.clock.now()
}

// update publishes what change makes of the present state. Only Run's goroutine calls it.
func (m *Monitor) update(change func(core.State, time.Time) core.State) (changed bool) {
	now := m.now()
	return m.publish(change(m.State(), now))
}
