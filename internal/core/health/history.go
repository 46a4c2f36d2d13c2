package health

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// GPUHistory is what the ledger knows of one GPU beside its conditions. Exported fields are kept over a restart of
// the agent.
type GPUHistory struct {
	Sample            Sample
	LastReset         time.Time    // when a reset of the GPU was last detected
	UnlistedSince     time.Time    `json:",omitzero"` // since when the driver has not listed it; zero = it does
	MaxNVLinks        uint64       // most NVLinks ever active at a time
	JoinedFabric      bool         // it has been part of a fabric that completed
	UnhealthyEpisodes []time.Time  // beginnings of the latest episodes
	Recoveries        []time.Time  // when it latest recovered from a severe cause without an operator
	ClearedByReset    []ClearedXID // XIDs that a reset cleared
	UnhealthySince    time.Time    // beginning of the present unhealthy episode; zero = none
	SevereCause       bool         // the present episode has a severe cause
	FaultCounts       []FaultCount // XIDs and events, by code

	// LoggedAction is the recovery action that the latest XID 154 in the kernel log named. It counts where the driver
	// does not report the action; RecoveryUnknown = none was named, or a reset ended it.
	LoggedAction RecoveryAction `json:",omitzero"`

	Operational   []OperationalCount `json:",omitempty"` // operational events
	EventsDropped uint64             `json:",omitzero"`  // operational events before which others were lost

	checked        time.Time // latest complete check since the agent started
	onlyGPU        bool      // no other GPU is known on this node
	lastCheck      LastCheck
	responding     bool      // the latest observation shows that it responds
	completeChecks int       // consecutive complete checks: a lost GPU needs several before it counts as responding
	lostSince      time.Time // it has not responded since it was lost; zero = it was not lost
	reloading      bool      // the driver is being, or was, loaded again, and has not reported a recovery action since
	driverAbsent   bool      // the driver was absent since the latest check, so it may have been loaded again
	weakResetSigns [3]time.Time
	window         window
	exceeded       windowResult // of the latest complete window
	allocations    int          // how often the GPU or an instance of it was allocated
	allocated      []allocation // latest allocation of each placement
	appFaults      []appFault
	takenSince     time.Time // when the agent last took the GPU for itself; zero = it never did
	takenUntil     time.Time // when it gave it back; zero = it has it
}

// FaultCount counts the occurrences of one XID or NVML event on one GPU.
type FaultCount struct {
	Reason Reason // ReasonXID or ReasonEvent
	Code   uint64
	Count  uint64
	Last   time.Time // when the latest one happened, at the latest

	Recent []Occurrence `json:",omitempty"` // the latest occurrences, in the order of their first reports

	restored time.Time // Last when the agent started; zero = no earlier process of this boot has counted one
}

// counted reports whether an earlier process may have counted what an observation reports, because the kernel log is
// read from its beginning again. An occurrence that may have been at any time counts.
func (t *FaultCount) counted(o Observation, seen Occurrence) bool {
	return o.Again && o.Age != UnknownAge && !t.restored.IsZero() && !seen.Earliest.After(t.restored)
}

// reported reports whether an observation is another report of an occurrence, and records that.
func (t *FaultCount) reported(seen Occurrence, s source) bool {
	i := find(t.Recent, seen, s)
	if i < 0 {
		return false
	}
	t.Recent = slices.Clone(t.Recent)
	*t.Recent[i].from(s) = true
	return true
}

// ClearedXID is an XID that was cleared by a reset of the GPU.
type ClearedXID struct {
	Code uint64
	At   time.Time
}

// allocation is the workload, by its number, to which a placement was allocated.
type allocation struct {
	at       gpu.Placement
	workload int
	shared   bool // earlier workloads may still have it
	since    time.Time
}

// appFault is the latest application XID of one workload.
type appFault struct {
	workload int
	at       time.Time
}

// window holds the counters at the beginning of the present comparison window.
type window struct {
	since                   time.Time
	thermal, brake, replays gpu.OptionalUint64
}

// windowResult is which counters increased more than is allowed in a window.
type windowResult struct{ thermal, brake, replays Tristate }

// Bounds of a GPUHistory, so that its size does not grow with uptime.
const (
	maxTimes       = 16
	maxFaultCounts = 64 // codes without a name beyond it count as one code; codes with a name are bounded by the table
)

// clone copies the history, so that a change of the copy does not change the original. Lists other than FaultCounts and
// Operational are not changed in place: appendBounded copies, and so does append to a list without room.
func (h *GPUHistory) clone() *GPUHistory {
	if h == nil {
		return &GPUHistory{}
	}
	copied := *h
	copied.FaultCounts, copied.Operational = slices.Clone(h.FaultCounts), slices.Clone(h.Operational)
	for i := range copied.FaultCounts {
		copied.FaultCounts[i].Recent = slices.Clip(copied.FaultCounts[i].Recent)
	}
	return &copied
}

// appendBounded appends v to a bounded list and does not change the original.
func appendBounded[T any](list []T, v T) []T {
	if len(list) >= maxTimes {
		list = list[len(list)-maxTimes+1:]
	}
	return append(slices.Clip(list), v)
}

// countWithin counts the times that are not older than span.
func countWithin(times []time.Time, now time.Time, span time.Duration) (n int) {
	for _, t := range times {
		if now.Sub(t) <= span {
			n++
		}
	}
	return n
}

// faultCount returns the count of a code; nil if it did not occur.
func (h *GPUHistory) faultCount(reason Reason, code uint64) *FaultCount {
	for i := range h.FaultCounts {
		if t := &h.FaultCounts[i]; t.Reason == reason && t.Code == code {
			return t
		}
	}
	return nil
}

// countFault counts an XID or event and returns the time of the previous occurrence.
func (h *GPUHistory) countFault(reason Reason, code uint64, seen Occurrence) (before time.Time) {
	t := h.faultCount(reason, code)
	if t == nil {
		h.FaultCounts = append(h.FaultCounts, FaultCount{Reason: reason, Code: code})
		t = &h.FaultCounts[len(h.FaultCounts)-1]
	}
	before = t.Last
	t.Count++
	if seen.Latest.After(before) {
		t.Last = seen.Latest
	}
	if reason == ReasonXID { // another event has one source
		t.Recent = withOccurrence(t.Recent, seen)
	}
	return before
}

// countsFull reports whether there is no room for another code without a name. Only a driver that reports invented
// codes reaches the bound.
func (h *GPUHistory) countsFull(code uint64) bool {
	return len(h.FaultCounts) >= maxFaultCounts && h.faultCount(ReasonXID, code) == nil
}

// faultWithin reports whether a fault of the GPU (not of an application) was reported by an XID or event within
// span.
func (h *GPUHistory) faultWithin(now time.Time, span time.Duration) bool {
	return slices.ContainsFunc(h.FaultCounts, func(t FaultCount) bool {
		class := Condition{Reason: t.Reason, Code: t.Code}.rule(Policy{}).Class
		return now.Sub(t.Last) <= span && class != xid.Application && class != xid.Info && class != xid.Trigger
	})
}

// dwell returns how long the evidence against a condition must hold: if it is unhealthy, longer with each unhealthy
// episode of the last six hours.
func (h *GPUHistory) dwell(p Policy, now time.Time, c Condition) time.Duration {
	d := p.RecoveryDwell
	if c.State < Unhealthy || c.Simulated {
		return d
	}
	for range countWithin(h.UnhealthyEpisodes, now, 6*time.Hour) - 1 {
		if d *= 2; d >= p.MaxRecoveryDwell {
			return max(p.MaxRecoveryDwell, p.RecoveryDwell)
		}
	}
	return d
}

// recordAllocation records that a placement was allocated to a new workload, which has it alone unless the placement is shared.
func (h *GPUHistory) recordAllocation(at gpu.Placement, shared bool, now time.Time) {
	h.allocations++
	others := slices.DeleteFunc(slices.Clone(h.allocated), func(a allocation) bool { return a.at.Covers(at) || at.Covers(a.at) })
	h.allocated = appendBounded(others, allocation{at, h.allocations, shared, now})
}

// workload returns the number of the workload that used a placement at a time: 0 if that has used it since before the
// agent started. It is not certain if several may have used it, or an earlier one than is known.
func (h *GPUHistory) workload(at gpu.Placement, then time.Time) (work int, certain bool) {
	found := 0
	for _, a := range h.allocated {
		if a.at.Covers(at) || at.Covers(a.at) {
			if work = a.workload; a.shared || a.since.After(then) {
				return 0, false
			}
			found++
		}
	}
	return work, found <= 1
}

// ofAgent reports whether a fault may be of a program that the agent ran on the GPU: the agent may have had it for
// itself then.
func (h *GPUHistory) ofAgent(seen Occurrence) bool {
	had := h.taken() || !h.takenUntil.IsZero() && !h.takenUntil.Before(seen.Earliest)
	return had && !h.takenSince.After(seen.Latest)
}

// taken reports whether the agent has the GPU for itself.
func (h *GPUHistory) taken() bool { return !h.takenSince.IsZero() && h.takenUntil.IsZero() }

// recordAppFault records an application fault of a workload and returns how many workloads had one within workloadSpan.
func (h *GPUHistory) recordAppFault(work int, at, now time.Time) (n int) {
	others := slices.DeleteFunc(slices.Clone(h.appFaults), func(s appFault) bool { return s.workload == work })
	h.appFaults = appendBounded(others, appFault{work, at})
	for _, s := range h.appFaults {
		if now.Sub(s.at) <= workloadSpan {
			n++
		}
	}
	return n
}
