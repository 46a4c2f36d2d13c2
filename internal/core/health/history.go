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
	responding     bool // the latest observation shows that it responds
	completeChecks int  // consecutive complete checks: a lost GPU needs several before it counts as responding
	lost           bool // it has not responded since it was lost
	reloading      bool // the driver is being, or was, loaded again, and has not reported a recovery action since
	driverAbsent   bool // the driver was absent since the latest check, so it may have been loaded again
	weakResetSigns [3]time.Time
	window         window
	exceeded       windowResult // of the latest complete window
	allocations    int          // how often the GPU or an instance of it was allocated
	allocated      []allocation // latest allocation of each placement
	appFaults      []appFault
	taken          bool      // the agent has the GPU for itself
	takenUntil     time.Time // when it last gave it back; zero = it never did
}

// FaultCount counts the occurrences of one XID or NVML event on one GPU.
type FaultCount struct {
	Reason        Reason // ReasonXID or ReasonEvent
	Code          uint64
	Count         uint64
	Last          time.Time
	FromKernelLog bool // the latest occurrence was in the kernel log first

	FromOperational bool `json:",omitzero"` // it was in an operational event first
	BothSources     bool `json:",omitzero"` // the kernel log and NVML both reported the latest occurrence
}

// isDuplicate reports whether an XID is the latest occurrence, reported by another source too. A line that was in the
// kernel log before the agent started to follow it can be read at any later time: the first such line after an
// NVML event is that event. So is an event that was read late, after the line.
func (t FaultCount) isDuplicate(o Observation, now time.Time) bool {
	other := t.FromKernelLog != o.FromKernelLog || t.FromOperational != o.FromOperational
	return other && now.Sub(t.Last) < duplicateWindow+o.Delay || o.Backlog && !t.FromKernelLog && !t.BothSources
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

// clone copies the history, so that a change of the copy does not change the original. Lists other than
// FaultCounts and Operational are not changed in place: appendBounded copies.
func (h *GPUHistory) clone() *GPUHistory {
	if h == nil {
		return &GPUHistory{}
	}
	copied := *h
	copied.FaultCounts, copied.Operational = slices.Clone(h.FaultCounts), slices.Clone(h.Operational)
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
func (h *GPUHistory) countFault(reason Reason, o Observation, now time.Time) (before time.Time) {
	t := h.faultCount(reason, o.Code)
	if t == nil {
		h.FaultCounts = append(h.FaultCounts, FaultCount{Reason: reason, Code: o.Code})
		t = &h.FaultCounts[len(h.FaultCounts)-1]
	}
	before = t.Last
	t.Count, t.Last, t.FromKernelLog, t.FromOperational, t.BothSources = t.Count+1, now, o.FromKernelLog, o.FromOperational, false
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
func (h *GPUHistory) recordAllocation(at gpu.Placement, shared bool) {
	h.allocations++
	others := slices.DeleteFunc(slices.Clone(h.allocated), func(a allocation) bool { return a.at.Covers(at) || at.Covers(a.at) })
	h.allocated = appendBounded(others, allocation{at, h.allocations, shared})
}

// workload returns the number of the workload that uses a placement: 0 if that has used it since before the agent started. It is not
// certain if several may use it.
func (h *GPUHistory) workload(at gpu.Placement) (work int, certain bool) {
	found := 0
	for _, a := range h.allocated {
		if a.at.Covers(at) || at.Covers(a.at) {
			if work = a.workload; a.shared {
				return 0, false
			}
			found++
		}
	}
	return work, found <= 1
}

// ofAgent reports whether a fault that is observed now may be of a program that the agent runs on the GPU: it has the GPU for itself, or had it
// until just now.
func (h *GPUHistory) ofAgent(now time.Time) bool {
	return h.taken || !h.takenUntil.IsZero() && now.Sub(h.takenUntil) <= takenFaultDelay
}

// recordAppFault records an application fault of a workload and returns how many workloads had one within span.
func (h *GPUHistory) recordAppFault(work int, now time.Time, span time.Duration) (n int) {
	others := slices.DeleteFunc(slices.Clone(h.appFaults), func(s appFault) bool { return s.workload == work })
	h.appFaults = appendBounded(others, appFault{work, now})
	for _, s := range h.appFaults {
		if now.Sub(s.at) <= span {
			n++
		}
	}
	return n
}
