package core

import (
	"cmp"
	"slices"
	"time"
)

// Condition is one standing cause against a placement. A placement may have several; the worst counts.
type Condition struct {
	At     Placement
	Reason Reason
	Code   uint64
	State  HealthState
	Detail string
	Since  time.Time // first seen
	Count  int       // how often it was observed
}

// Ledger is the memory of conditions. The zero value is an empty ledger.
type Ledger struct {
	conditions []Condition // sorted by placement, reason, code; never changed in place
}

// Conditions returns the standing conditions in canonical order.
func (l Ledger) Conditions() []Condition { return slices.Clone(l.conditions) }

// Apply folds observations into a new ledger.
func (l Ledger) Apply(p HealthPolicy, now time.Time, obs ...Observation) Ledger {
	next := slices.Clone(l.conditions)
	for _, o := range obs {
		next = apply(next, p, now, o)
	}
	slices.SortFunc(next, compareConditions)
	return Ledger{next}
}

func apply(cs []Condition, p HealthPolicy, now time.Time, o Observation) []Condition {
	switch o.Kind {
	case XID:
		if p.Off || slices.Contains(p.IgnoredXIDs, o.Code) {
			return cs
		}
		return raise(cs, now, Condition{At: o.At, Reason: ReasonXID, Code: o.Code, State: Unhealthy, Detail: o.Detail}, 1)
	case Lost:
		return raise(cs, now, Condition{At: o.At, Reason: ReasonLost, State: GPULost, Detail: o.Detail}, 1)
	case ProbeFailed:
		return raise(cs, now, Condition{At: o.At, Reason: ReasonProbe, State: Unhealthy, Detail: o.Detail}, p.ProbeFailures)
	case NoAnswer:
		return raise(cs, now, Condition{At: o.At, Reason: ReasonNoAnswer, State: Unhealthy, Detail: o.Detail}, 1)
	case Answered, Checked:
		return clear(cs, o.At, ReasonLost, ReasonProbe, ReasonNoAnswer)
	case DriverLost:
		return raise(cs, now, Condition{At: Node, Reason: ReasonDriver, State: Unknown, Detail: o.Detail}, 1)
	case DriverAnswered:
		return slices.DeleteFunc(cs, func(c Condition) bool {
			return c.At == Node && (c.Reason == ReasonDriver || c.Reason == ReasonNoAnswer)
		})
	}
	return cs
}

// raise adds c or counts it again; below the threshold it stands as a note (Healthy). A standing condition
// of a device keeps its first words, as each reading may meet it in another call and every new text is an
// update to an orchestrator; why the driver is gone, the latest attempt knows best.
func raise(cs []Condition, now time.Time, c Condition, threshold int) []Condition {
	c.Since, c.Count = now, 1
	if i := slices.IndexFunc(cs, func(d Condition) bool {
		return d.At == c.At && d.Reason == c.Reason && d.Code == c.Code
	}); i >= 0 {
		c.Since, c.Count = cs[i].Since, cs[i].Count+1
		if c.Reason != ReasonDriver {
			c.Detail = cs[i].Detail
		}
		cs = slices.Delete(cs, i, i+1)
	}
	if c.Count < threshold {
		c.State = Healthy
	}
	return append(cs, c)
}

// clear drops conditions that a complete answer from at disproves: those against it, and those against
// the GPU that it sits on, since the GPU must answer for its instance to be read.
func clear(cs []Condition, at Placement, reasons ...Reason) []Condition {
	return slices.DeleteFunc(cs, func(c Condition) bool {
		return c.At.GPU == at.GPU && c.At.Covers(at) && slices.Contains(reasons, c.Reason)
	})
}

// Health is the worst standing condition that covers the placement.
func (l Ledger) Health(at Placement) Health {
	var worst Health
	for _, c := range l.conditions {
		if c.State > worst.State && c.At.Covers(at) {
			worst = Health{State: c.State, Reason: c.Reason, Code: c.Code, Detail: c.Detail}
		}
	}
	return worst
}

func compareConditions(a, b Condition) int {
	return cmp.Or(comparePlacements(a.At, b.At), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Code, b.Code))
}
