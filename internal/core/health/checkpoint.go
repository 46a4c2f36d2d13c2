package health

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Checkpoint is the part of a Ledger that is kept over a restart of the agent.
type Checkpoint struct {
	Driver     string // version of the driver when it was last ready
	Conditions []Condition
	GPUs       map[gpu.DeviceID]GPUHistory
}

// Checkpoint returns the part of l to keep. Simulated faults, and what is valid only within this process, are left
// out.
func (l Ledger) Checkpoint() Checkpoint {
	c := Checkpoint{Driver: l.driver, GPUs: map[gpu.DeviceID]GPUHistory{}}
	for _, each := range l.conditions {
		if each.At.GPU != "" && !each.Simulated && each.Reason != ReasonUnchecked {
			c.Conditions = append(c.Conditions, each)
		}
	}
	for id, history := range l.histories {
		c.GPUs[id] = *history.withoutOldOccurrences()
	}
	return c
}

// withoutOldOccurrences returns the history without the old occurrences but the latest of each fault, whose line the
// next agent may read. So its size on disk is bounded by the faults of the latest minutes.
func (h *GPUHistory) withoutOldOccurrences() *GPUHistory {
	h = h.clone()
	for i := range h.FaultCounts {
		t := &h.FaultCounts[i]
		for len(t.Recent) > 1 && h.checked.Sub(t.Recent[0].Latest) > occurrenceSpan {
			t.Recent = t.Recent[1:]
		}
	}
	return h
}

// Restore returns the ledger that follows from a checkpoint. A reboot removes the conditions that it clears;
// those that only an operator can clear remain.
func Restore(p Policy, c Checkpoint, rebooted bool) Ledger {
	l := Ledger{histories: make(map[gpu.DeviceID]*GPUHistory, len(c.GPUs))}
	if !rebooted { // a reboot loads the driver again
		l.driver = c.Driver
	}
	for id, kept := range c.GPUs {
		history := kept.clone()
		for i := range history.FaultCounts {
			if t := &history.FaultCounts[i]; rebooted {
				t.Recent = nil // this boot's kernel log has none of them
			} else {
				t.restored = t.Last
			}
		}
		if rebooted {
			history.Sample, history.MaxNVLinks, history.JoinedFabric = Sample{}, 0, false
			history.LoggedAction = RecoveryUnknown
		}
		l.histories[id] = history
	}
	for _, each := range c.Conditions {
		if rebooted && each.clearedBy(p)&xid.Reboot != 0 {
			continue
		}
		history := l.histories[each.At.GPU]
		lost := each.At.GI == gpu.Whole && each.Reason == ReasonLost && each.State == GPULost
		if history != nil && lost && !history.LastReset.After(each.Last) {
			history.lostSince = each.Last
		}
		each.ClearingSince, each.CleanChecks = time.Time{}, 0
		l.conditions = append(l.conditions, each)
	}
	l.conditions = merged(l.conditions)
	return l
}

// Latest returns the latest time of an occurrence in the checkpoint; zero if there is none.
func (c Checkpoint) Latest() time.Time {
	times := []time.Time{{}}
	for _, each := range c.Conditions {
		times = append(times, each.Since, each.Last)
	}
	for _, h := range c.GPUs {
		times = append(times, h.LastReset, h.UnhealthySince, h.UnlistedSince)
		times = slices.Concat(times, h.UnhealthyEpisodes, h.Recoveries)
		for _, cleared := range h.ClearedByReset {
			times = append(times, cleared.At)
		}
		for _, count := range h.FaultCounts {
			times = append(times, count.Last)
		}
		for _, count := range h.Operational {
			times = append(times, count.Last)
		}
	}
	return slices.MaxFunc(times, time.Time.Compare)
}

// Shift returns c with every time moved by d.
func (c Checkpoint) Shift(d time.Duration) Checkpoint {
	c.Conditions = shiftConditions(c.Conditions, d)
	histories := make(map[gpu.DeviceID]GPUHistory, len(c.GPUs))
	for id, h := range c.GPUs {
		histories[id] = *h.shift(d)
	}
	c.GPUs = histories
	return c
}
