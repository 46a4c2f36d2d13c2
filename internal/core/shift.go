package core

import (
	"slices"
	"time"
)

// ClockTolerance is the difference between the steady clock and the wall clock up to which no time is moved. NTP
// slews the wall clock by less within hours.
const ClockTolerance = time.Second

// Shift returns l with every time moved by d.
func (l Ledger) Shift(d time.Duration) Ledger {
	l.conditions = slices.Clone(l.conditions)
	for i, c := range l.conditions {
		l.conditions[i] = c.shift(d)
	}
	histories := make(map[DeviceID]*GPUHistory, len(l.histories))
	for id, c := range l.histories {
		histories[id] = c.shift(d)
	}
	l.histories = histories
	return l
}

func (c Condition) shift(d time.Duration) Condition {
	c.Since, c.Last, c.ClearingSince = ShiftTime(c.Since, d), ShiftTime(c.Last, d), ShiftTime(c.ClearingSince, d)
	if !c.IgnoredUntil.Equal(IgnoredForever) {
		c.IgnoredUntil = ShiftTime(c.IgnoredUntil, d)
	}
	return c
}

func (c *GPUHistory) shift(d time.Duration) *GPUHistory {
	c = c.clone()
	c.LastReset, c.UnhealthySince, c.checked = ShiftTime(c.LastReset, d), ShiftTime(c.UnhealthySince, d), ShiftTime(c.checked, d)
	c.UnhealthyEpisodes, c.Recoveries = shiftTimes(c.UnhealthyEpisodes, d), shiftTimes(c.Recoveries, d)
	c.ClearedByReset, c.appFaults = slices.Clone(c.ClearedByReset), slices.Clone(c.appFaults)
	for i := range c.ClearedByReset {
		c.ClearedByReset[i].At = ShiftTime(c.ClearedByReset[i].At, d)
	}
	for i := range c.FaultCounts {
		c.FaultCounts[i].Last = ShiftTime(c.FaultCounts[i].Last, d)
	}
	for i := range c.weakResetSigns {
		c.weakResetSigns[i] = ShiftTime(c.weakResetSigns[i], d)
	}
	for i := range c.appFaults {
		c.appFaults[i].at = ShiftTime(c.appFaults[i].at, d)
	}
	c.window.since = ShiftTime(c.window.since, d)
	return c
}

// Shift returns m with its times moved by d.
func (m Maintenance) Shift(d time.Duration) Maintenance {
	m.Since, m.Until = ShiftTime(m.Since, d), ShiftTime(m.Until, d)
	return m
}

// ShiftTime returns t moved by d; the zero time stays zero.
func ShiftTime(t time.Time, d time.Duration) time.Time {
	if t.IsZero() {
		return t
	}
	return t.Add(d)
}

func shiftTimes(times []time.Time, d time.Duration) []time.Time {
	times = slices.Clone(times)
	for i := range times {
		times[i] = ShiftTime(times[i], d)
	}
	return times
}
