package health

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// ClockTolerance is the difference between the steady clock and the wall clock up to which no time is moved. NTP
// slews the wall clock by less within hours.
const ClockTolerance = time.Second

// Shift returns l with every time moved by d.
func (l Ledger) Shift(d time.Duration) Ledger {
	l.conditions = shiftConditions(l.conditions, d)
	histories := make(map[gpu.DeviceID]*GPUHistory, len(l.histories))
	for id, c := range l.histories {
		histories[id] = c.shift(d)
	}
	l.histories = histories
	return l
}

func shiftConditions(conditions []Condition, d time.Duration) []Condition {
	conditions = slices.Clone(conditions)
	for i := range conditions {
		c := &conditions[i]
		c.Since, c.Last, c.ClearingSince = ShiftTime(c.Since, d), ShiftTime(c.Last, d), ShiftTime(c.ClearingSince, d)
		if !c.IgnoredUntil.Equal(IgnoredForever) {
			c.IgnoredUntil = ShiftTime(c.IgnoredUntil, d)
		}
	}
	return conditions
}

func (h *GPUHistory) shift(d time.Duration) *GPUHistory {
	h = h.clone()
	h.LastReset, h.UnhealthySince, h.checked = ShiftTime(h.LastReset, d), ShiftTime(h.UnhealthySince, d), ShiftTime(h.checked, d)
	h.UnlistedSince = ShiftTime(h.UnlistedSince, d)
	h.takenSince = ShiftTime(h.takenSince, d)
	h.takenUntil = ShiftTime(h.takenUntil, d)
	h.lostSince = ShiftTime(h.lostSince, d)
	h.UnhealthyEpisodes, h.Recoveries = shiftTimes(h.UnhealthyEpisodes, d), shiftTimes(h.Recoveries, d)
	h.ClearedByReset, h.appFaults = slices.Clone(h.ClearedByReset), slices.Clone(h.appFaults)
	for i := range h.ClearedByReset {
		h.ClearedByReset[i].At = ShiftTime(h.ClearedByReset[i].At, d)
	}
	for i := range h.FaultCounts {
		t := &h.FaultCounts[i]
		t.Last, t.restored = ShiftTime(t.Last, d), ShiftTime(t.restored, d)
		t.Recent = slices.Clone(t.Recent)
		for j := range t.Recent {
			t.Recent[j].Earliest = ShiftTime(t.Recent[j].Earliest, d)
			t.Recent[j].Latest = ShiftTime(t.Recent[j].Latest, d)
		}
	}
	for i := range h.Operational {
		h.Operational[i].Last = ShiftTime(h.Operational[i].Last, d)
	}
	for i := range h.weakResetSigns {
		h.weakResetSigns[i] = ShiftTime(h.weakResetSigns[i], d)
	}
	h.allocated = slices.Clone(h.allocated)
	for i := range h.allocated {
		h.allocated[i].since = ShiftTime(h.allocated[i].since, d)
	}
	for i := range h.appFaults {
		h.appFaults[i].at = ShiftTime(h.appFaults[i].at, d)
	}
	h.window.since = ShiftTime(h.window.since, d)
	return h
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
