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

	checked   time.Time // the latest complete check since the agent started
	alone     bool      // no other GPU is known here
	answers   bool      // the last word about the GPU was its own
	row       int       // complete checks in a row: one alone does not bring a lost GPU back
	lost      bool      // it has not answered since it was lost
	reloading bool      // the driver was loaded anew, or will be, and has not given a verdict since
	absent    bool      // it was absent, and was not asked since: perhaps it was loaded anew
	weaker    [3]time.Time
	window    window
	slow      [3]Tristate // by window: heat, power brake, replays
	works     int         // times that the GPU or an instance of it was handed out
	held      []holding   // the latest time of each
	apps      []sighting
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

// echoed reports whether an XID is the latest one again, from the other source. What the kernel log had before the agent
// followed it may be read any time later: the first line after an event of NVML's is that event.
func (t FaultCount) echoed(o Observation, now time.Time) bool {
	return t.FromKernelLog != o.FromKernelLog && now.Sub(t.Last) < echo || o.Backlog && !t.FromKernelLog && !t.BothSources
}

// ClearedXID is an XID that a GPU got well from by a reset.
type ClearedXID struct {
	Code uint64
	At   time.Time
}

// holding says to which workload a placement was handed out: they are numbered.
type holding struct {
	at   Placement
	work int
}

// sighting is the latest application XID of one workload.
type sighting struct {
	work int
	at   time.Time
}

// window is the present stretch of time over which counters are compared.
type window struct {
	since                   time.Time
	thermal, brake, replays OptionalUint64
}

// Bounds of a chart: it does not grow with uptime.
const (
	maxTimes   = 16
	maxTallies = 64 // beyond it codes without a name count as one; those with a name are no more than the table
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

// push appends v to a bounded list without touching the original.
func push[T any](list []T, v T) []T {
	if len(list) >= maxTimes {
		list = list[len(list)-maxTimes+1:]
	}
	return append(slices.Clip(list), v)
}

// within counts the times that are not older than span.
func within(times []time.Time, now time.Time, span time.Duration) (n int) {
	for _, t := range times {
		if now.Sub(t) <= span {
			n++
		}
	}
	return n
}

// tallied is the count of a code; nil if there is none yet.
func (c *GPUHistory) tallied(reason Reason, code uint64) *FaultCount {
	for i := range c.FaultCounts {
		if t := &c.FaultCounts[i]; t.Reason == reason && t.Code == code {
			return t
		}
	}
	return nil
}

// tally counts an XID or event and returns when it was seen before.
func (c *GPUHistory) tally(reason Reason, code uint64, logged bool, now time.Time) (before time.Time) {
	t := c.tallied(reason, code)
	if t == nil {
		c.FaultCounts = append(c.FaultCounts, FaultCount{Reason: reason, Code: code})
		t = &c.FaultCounts[len(c.FaultCounts)-1]
	}
	before = t.Last
	t.Count, t.Last, t.FromKernelLog, t.BothSources = t.Count+1, now, logged, false
	return before
}

// crowded reports whether there is no room for another code without a name: only a driver that makes codes
// up has so many.
func (c *GPUHistory) crowded(code uint64) bool {
	return len(c.FaultCounts) >= maxTallies && c.tallied(ReasonXID, code) == nil
}

// told reports whether a fault of the GPU, not one of a program, was reported by code within span.
func (c *GPUHistory) told(now time.Time, span time.Duration) bool {
	return slices.ContainsFunc(c.FaultCounts, func(t FaultCount) bool {
		class := Condition{Reason: t.Reason, Code: t.Code}.rule(HealthPolicy{}).Class
		return now.Sub(t.Last) <= span && class != xid.Application && class != xid.Info && class != xid.Trigger
	})
}

// dwell is how long evidence must hold: longer with each bad spell of the last six hours.
func (c *GPUHistory) dwell(p HealthPolicy, now time.Time) time.Duration {
	d := p.Dwell
	for range within(c.UnhealthyEpisodes, now, 6*time.Hour) - 1 {
		if d *= 2; d >= p.MaxDwell {
			return max(p.MaxDwell, p.Dwell)
		}
	}
	return d
}

// hand enters that a placement was handed out to new work.
func (c *GPUHistory) hand(at Placement) {
	c.works++
	others := slices.DeleteFunc(slices.Clone(c.held), func(h holding) bool { return h.at.Covers(at) || at.Covers(h.at) })
	c.held = push(others, holding{at, c.works})
}

// workload is the number of the workload that has a placement; 0 if that is not known, or it is several.
func (c *GPUHistory) workload(at Placement) (work int) {
	for _, h := range c.held {
		if h.at.Covers(at) || at.Covers(h.at) {
			if work != 0 {
				return 0
			}
			work = h.work
		}
	}
	return work
}

// failed enters an application fault of a workload and counts the different ones that had any within span.
func (c *GPUHistory) failed(work int, now time.Time, span time.Duration) (n int) {
	others := slices.DeleteFunc(slices.Clone(c.apps), func(s sighting) bool { return s.work == work })
	c.apps = push(others, sighting{work, now})
	for _, s := range c.apps {
		if now.Sub(s.at) <= span {
			n++
		}
	}
	return n
}
