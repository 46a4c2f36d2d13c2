package core

import (
	"slices"
	"time"
)

// All times in a State lie on one steady clock, whose differences are time that has passed. It reads as the wall
// clock does. When the wall clock jumps, by an operator or by NTP, every time is moved by the same amount (Shift), so
// that order and spans stay as they were. Within a process the caller has a monotonic clock for that; over a restart of
// the agent the boot moment shows the jump, because the uptime does not jump.
//
//	wall clock   10:00 XID 119   10:01 reset   08:01 (2 h back)        08:02
//	State        10:00 XID 119   10:01 reset   08:00, 08:01 (Shift)    08:02: the reset still follows the XID

// ClockTolerance is how far the steady clock may be from the wall clock. NTP slews the wall clock by less over hours.
const ClockTolerance = time.Second

// Boot is one boot of the machine.
type Boot struct {
	ID string    // random(4): /proc/sys/kernel/random/boot_id; "" = unknown
	At time.Time // its moment by the wall clock as it is now: now less proc(5) uptime; zero = unknown
}

// Shift returns s with every time moved by d, because the wall clock has jumped by d. What is offered is rebuilt at the
// next change, with the moved times.
func (s State) Shift(d time.Duration) State {
	s.Ledger = s.Ledger.shift(d)
	s.Maintenance = s.Maintenance.shift(d)
	s.booted = shifted(s.booted, d)
	if s.Inventory.Retiring() {
		inv := *s.Inventory
		inv.retired = make(map[UnitID]time.Time, len(s.Inventory.retired))
		for id, since := range s.Inventory.retired {
			inv.retired[id] = since.Add(d)
		}
		s.Inventory = &inv
	}
	return s
}

// Rebase returns r with its times on the wall clock as it is now. The clock may have jumped since r was kept, in either
// direction. Within one boot the boot moment shows by how much. Otherwise only a time in the future shows it; the
// latest one is then taken to be now, or the boot if there was one since, and the others keep their distance from it.
func (r Checkpoint) Rebase(boot Boot, now time.Time) Checkpoint {
	latest, limit := r.latest(), now
	unknown := r.Boot == "" || boot.ID == ""
	switch {
	case boot.At.IsZero():
	case unknown, r.Booted.IsZero() && r.Boot == boot.ID:
		r.Booted = boot.At
	case r.Boot != boot.ID:
		limit, r.Booted = boot.At, boot.At
	default:
		if d := boot.At.Sub(r.Booted); d.Abs() > ClockTolerance {
			r, latest = r.shift(d), shifted(latest, d)
		}
	}
	if latest.After(limit) {
		r = r.shift(limit.Sub(latest))
		if !boot.At.IsZero() {
			r.Booted = boot.At
		}
	}
	return r
}

// latest is the latest time at which something of the record happened.
func (r Checkpoint) latest() (t time.Time) {
	later := func(times ...time.Time) {
		for _, o := range times {
			if o.After(t) {
				t = o
			}
		}
	}
	later(r.Maintenance.Since)
	for _, c := range r.Conditions {
		later(c.Since, c.Last)
	}
	for _, c := range r.GPUs {
		later(c.Reset, c.Bad)
		later(c.Spells...)
		later(c.Recoveries...)
		for _, m := range c.ClearedByReset {
			later(m.At)
		}
		for _, tally := range c.Tallies {
			later(tally.Last)
		}
	}
	return t
}

func (r Checkpoint) shift(d time.Duration) Checkpoint {
	r.Booted, r.Maintenance = shifted(r.Booted, d), r.Maintenance.shift(d)
	r.Conditions = slices.Clone(r.Conditions)
	for i, c := range r.Conditions {
		r.Conditions[i] = c.shift(d)
	}
	charts := make(map[DeviceID]GPUHistory, len(r.GPUs))
	for gpu, c := range r.GPUs {
		charts[gpu] = *c.shift(d)
	}
	r.GPUs = charts
	return r
}

func (l Ledger) shift(d time.Duration) Ledger {
	l.conditions = slices.Clone(l.conditions)
	for i, c := range l.conditions {
		l.conditions[i] = c.shift(d)
	}
	charts := make(map[DeviceID]*GPUHistory, len(l.charts))
	for gpu, c := range l.charts {
		charts[gpu] = c.shift(d)
	}
	l.charts = charts
	return l
}

func (c Condition) shift(d time.Duration) Condition {
	c.Since, c.Last, c.Clearing = shifted(c.Since, d), shifted(c.Last, d), shifted(c.Clearing, d)
	if !c.Ignored.Equal(Endless) {
		c.Ignored = shifted(c.Ignored, d)
	}
	return c
}

func (c *GPUHistory) shift(d time.Duration) *GPUHistory {
	c = c.clone()
	c.Reset, c.Bad, c.checked = shifted(c.Reset, d), shifted(c.Bad, d), shifted(c.checked, d)
	c.Spells, c.Recoveries = shiftedAll(c.Spells, d), shiftedAll(c.Recoveries, d)
	c.ClearedByReset, c.apps = slices.Clone(c.ClearedByReset), slices.Clone(c.apps)
	for i := range c.ClearedByReset {
		c.ClearedByReset[i].At = shifted(c.ClearedByReset[i].At, d)
	}
	for i := range c.Tallies {
		c.Tallies[i].Last = shifted(c.Tallies[i].Last, d)
	}
	for i := range c.weaker {
		c.weaker[i] = shifted(c.weaker[i], d)
	}
	for i := range c.apps {
		c.apps[i].at = shifted(c.apps[i].at, d)
	}
	c.window.since = shifted(c.window.since, d)
	return c
}

func (m Maintenance) shift(d time.Duration) Maintenance {
	m.Since, m.Until = shifted(m.Since, d), shifted(m.Until, d)
	return m
}

// shifted is t moved by d; no time stays no time.
func shifted(t time.Time, d time.Duration) time.Time {
	if t.IsZero() {
		return t
	}
	return t.Add(d)
}

func shiftedAll(times []time.Time, d time.Duration) []time.Time {
	times = slices.Clone(times)
	for i := range times {
		times[i] = shifted(times[i], d)
	}
	return times
}
