package core

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// GPUHistory is what the ledger remembers of one GPU beside its conditions. It is a value; what is kept over a
// restart of the agent is exported.
type GPUHistory struct {
	Sample            HealthSample `json:"Vitals"`
	LastReset         time.Time    `json:"Reset"`  // when the GPU was last proven to have been initialised anew
	MaxNVLinks        uint64       `json:"Links"`  // most NVLinks ever seen up
	JoinedFabric      bool         `json:"Joined"` // it has been in a fabric that was up
	UnhealthyEpisodes []time.Time  `json:"Spells"` // beginnings of the latest bad spells
	Recoveries        []time.Time  // the latest times that it got well by itself from something severe
	ClearedByReset    []ClearedXID `json:"Mended"`  // what it got well from by a reset
	UnhealthySince    time.Time    `json:"Bad"`     // since when it takes no work; zero = it does
	SevereCause       bool         `json:"Severe"`  // the present bad spell has a severe cause
	FaultCounts       []FaultCount `json:"Tallies"` // XIDs and events, by code

	checked        time.Time // the latest complete check since the agent started
	onlyGPU        bool      // no other GPU is known here
	responding     bool      // the last word about the GPU was its own
	completeChecks int       // complete checks in a row: one alone does not bring a lost GPU back
	lost           bool      // it has not answered since it was lost
	reloading      bool      // the driver was loaded anew, or will be, and has not given a verdict since
	driverAbsent   bool      // it was absent, and was not asked since: perhaps it was loaded anew
	weakResetSigns [3]time.Time
	window         window
	exceeded       [3]Tristate  // by window: heat, power brake, replays
	allocations    int          // times that the GPU or an instance of it was handed out
	allocated      []allocation // the latest time of each
	appFaults      []appFault
}

// FaultCount counts one XID (or other event) of a GPU.
type FaultCount struct {
	Reason        Reason // ReasonXID or ReasonEvent
	Code          uint64
	Count         uint64
	Last          time.Time
	FromKernelLog bool `json:"Logged"`        // the latest was in the kernel log
	BothSources   bool `json:"Both,omitzero"` // the other source has reported the latest, too
}

// isEcho reports whether an XID is the latest one again, from the other source. What the kernel log had before the agent
// followed it may be read any time later: the first line after an event of NVML's is that event.
func (t FaultCount) isEcho(o Observation, now time.Time) bool {
	return t.FromKernelLog != o.FromKernelLog && now.Sub(t.Last) < echoSpan || o.Backlog && !t.FromKernelLog && !t.BothSources
}

// ClearedXID is an XID that a GPU got well from by a reset.
type ClearedXID struct {
	Code uint64
	At   time.Time
}

// allocation says to which workload a placement was handed out: they are numbered.
type allocation struct {
	at       Placement
	workload int
}

// appFault is the latest application XID of one workload.
type appFault struct {
	workload int
	at       time.Time
}

// window is the present stretch of time over which counters are compared.
type window struct {
	since                   time.Time
	thermal, brake, replays OptionalUint64
}

// Bounds of a chart: it does not grow with uptime.
const (
	maxTimes       = 16
	maxFaultCounts = 64 // beyond it codes without a name count as one; those with a name are no more than the table
)

// clone copies the chart, so that changing the copy leaves the original alone. Slices are only ever
// replaced or appended to by push, which copies.
func (c *GPUHistory) clone() *GPUHistory {
	if c == nil {
		return &GPUHistory{}
	}
	copied := *c
	copied.FaultCounts = slices.Clone(c.FaultCounts)
	return &copied
}

// appendBounded appends v to a bounded list without touching the original.
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

// faultCount is the count of a code; nil if there is none yet.
func (c *GPUHistory) faultCount(reason Reason, code uint64) *FaultCount {
	for i := range c.FaultCounts {
		if t := &c.FaultCounts[i]; t.Reason == reason && t.Code == code {
			return t
		}
	}
	return nil
}

// countFault counts an XID or event and returns when it was seen before.
func (c *GPUHistory) countFault(reason Reason, code uint64, logged bool, now time.Time) (before time.Time) {
	t := c.faultCount(reason, code)
	if t == nil {
		c.FaultCounts = append(c.FaultCounts, FaultCount{Reason: reason, Code: code})
		t = &c.FaultCounts[len(c.FaultCounts)-1]
	}
	before = t.Last
	t.Count, t.Last, t.FromKernelLog, t.BothSources = t.Count+1, now, logged, false
	return before
}

// countsFull reports whether there is no room for another code without a name: only a driver that makes codes
// up has so many.
func (c *GPUHistory) countsFull(code uint64) bool {
	return len(c.FaultCounts) >= maxFaultCounts && c.faultCount(ReasonXID, code) == nil
}

// faultWithin reports whether a fault of the GPU, not one of a program, was reported by code within span.
func (c *GPUHistory) faultWithin(now time.Time, span time.Duration) bool {
	return slices.ContainsFunc(c.FaultCounts, func(t FaultCount) bool {
		class := Condition{Reason: t.Reason, Code: t.Code}.rule(HealthPolicy{}).Class
		return now.Sub(t.Last) <= span && class != xid.Application && class != xid.Info && class != xid.Trigger
	})
}

// dwell is how long evidence must hold: longer with each bad spell of the last six hours.
func (c *GPUHistory) dwell(p HealthPolicy, now time.Time) time.Duration {
	d := p.Dwell
	for range countWithin(c.UnhealthyEpisodes, now, 6*time.Hour) - 1 {
		if d *= 2; d >= p.MaxDwell {
			return max(p.MaxDwell, p.Dwell)
		}
	}
	return d
}

// recordAllocation enters that a placement was handed out to new work.
func (c *GPUHistory) recordAllocation(at Placement) {
	c.allocations++
	others := slices.DeleteFunc(slices.Clone(c.allocated), func(h allocation) bool { return h.at.Covers(at) || at.Covers(h.at) })
	c.allocated = appendBounded(others, allocation{at, c.allocations})
}

// workload is the number of the workload that has a placement; 0 if that is not known, or it is several.
func (c *GPUHistory) workload(at Placement) (work int) {
	for _, h := range c.allocated {
		if h.at.Covers(at) || at.Covers(h.at) {
			if work != 0 {
				return 0
			}
			work = h.workload
		}
	}
	return work
}

// recordAppFault enters an application fault of a workload and counts the different ones that had any within span.
func (c *GPUHistory) recordAppFault(work int, now time.Time, span time.Duration) (n int) {
	others := slices.DeleteFunc(slices.Clone(c.appFaults), func(s appFault) bool { return s.workload == work })
	c.appFaults = appendBounded(others, appFault{work, now})
	for _, s := range c.appFaults {
		if now.Sub(s.at) <= span {
			n++
		}
	}
	return n
}
