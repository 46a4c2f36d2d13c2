package core

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Condition is one standing cause against a placement. A placement may have several, each with its own
// way back; the worst counts. It is comparable.
type Condition struct {
	At                  Placement
	Reason              Reason
	Code                uint64      // of an XID, an event or a verdict
	State               HealthState // its effect; Healthy while it is only noted
	Detail              string
	Since               time.Time    // first seen
	Last                time.Time    // last happened; a level that goes on happened once
	Count               int          // how often it was observed
	Repeated            bool         // again so soon that the rule for repetition applies
	ClearingSince       time.Time    `json:"Clearing"` // since when the evidence for recovery holds; zero = it does not
	CleanChecks         int          `json:"Clean"`    // complete checks since then
	Evidence            xid.Evidence // what clears it under this driver and policy
	IgnoredUntil        time.Time    `json:"Ignored"` // an operator disregards it until then; zero = nobody does
	FromRemovedInstance bool         `json:"Moved"`   // it was against a MIG instance that is gone: no more than degraded
	Simulated           bool
}

// Cause names the condition for programs: "XID_95", "LOST", "VERDICT_GPU_RESET".
func (c Condition) Cause() string { return causeName(c.Reason, c.Code) }

// Cause names what is behind the health for programs; "" if nothing is.
func (h Health) Cause() string { return causeName(h.Reason, h.Code) }

func causeName(r Reason, code uint64) string {
	switch r {
	case ReasonXID:
		return fmt.Sprintf("XID_%d", code)
	case ReasonEvent:
		return fmt.Sprintf("EVENT_0x%X", code)
	case ReasonRecoveryAction:
		return "VERDICT_" + strings.ToUpper(strings.ReplaceAll(recoveryActionOf(code).String(), " ", "_"))
	default:
		return r.String()
	}
}

// same reports whether c and o are one cause. A verdict that changes is the same cause in other words.
func (c Condition) same(o Condition) bool {
	return c.Reason == o.Reason && (c.Code == o.Code || c.Reason == ReasonRecoveryAction) && c.At == o.At && c.Simulated == o.Simulated
}

// merge is both conditions as one.
func (c Condition) merge(o Condition) Condition {
	if o.Since.Before(c.Since) {
		c.Since, c.Detail = o.Since, o.Detail
	}
	if o.Last.After(c.Last) {
		c.Last, c.Code = o.Last, o.Code
	}
	if o.IgnoredUntil.Before(c.IgnoredUntil) {
		c.IgnoredUntil = o.IgnoredUntil // whoever disregards one need not know the other
	}
	c.State, c.Count = max(c.State, o.State), c.Count+o.Count
	c.Repeated, c.FromRemovedInstance = c.Repeated || o.Repeated, c.FromRemovedInstance && o.FromRemovedInstance
	c.ClearingSince, c.CleanChecks = time.Time{}, 0
	return c
}

// merged are sorted conditions with each cause once.
func merged(conditions []Condition) []Condition {
	slices.SortStableFunc(conditions, compareConditions)
	var each []Condition
	for _, c := range conditions {
		if last := len(each) - 1; last >= 0 && each[last].same(c) {
			each[last] = each[last].merge(c)
		} else {
			each = append(each, c)
		}
	}
	return each
}

// isEffective reports whether the condition has an effect now.
func (c Condition) isEffective() bool { return c.State > Healthy && c.IgnoredUntil.IsZero() }

// rule is what the table says about an XID or another event; the zero Rule for other reasons.
func (c Condition) rule(p HealthPolicy) xid.Rule {
	switch c.Reason {
	case ReasonXID:
		return p.xid(c.Code)
	case ReasonEvent:
		r, _ := xid.Event(c.Code)
		return r
	default:
		return xid.Rule{}
	}
}

// severe reports whether getting well from the condition counts towards the latch.
func (c Condition) severe(p HealthPolicy) bool {
	if c.Simulated {
		return false
	}
	switch c.rule(p).Class {
	case xid.Reset, xid.Node, xid.Fabric:
		return true
	default:
		return c.Reason.meaning().severe
	}
}

// health is the condition as a verdict.
func (c Condition) health() Health {
	h := Health{
		State: c.State, Reason: c.Reason, Code: c.Code, Detail: c.Detail, Since: c.Since, Simulated: c.Simulated,
		Action: c.Reason.meaning().action, Clears: c.Clears(),
	}
	switch c.Reason {
	case ReasonXID:
		h.Action = xid.XID(c.Code).Action
	case ReasonEvent:
		r, _ := xid.Event(c.Code)
		h.Action = r.Action
	case ReasonRecoveryAction:
		h.Action = recoveryActionOf(c.Code).action()
	default:
	}
	return h
}

// Action says what an operator should do; "" if nothing.
func (c Condition) Action() string { return c.health().Action }

// Clears says what would make it well again.
func (c Condition) Clears() string {
	if says := c.Reason.meaning().clearsText; says != "" && c.Evidence != 0 {
		return says
	}
	return c.Evidence.String()
}

// String is the line of health.
func (c Condition) String() string { return c.health().String() }

func compareConditions(a, b Condition) int {
	if a.Simulated != b.Simulated {
		if b.Simulated {
			return -1
		}
		return 1
	}
	return cmp.Or(ComparePlacements(a.At, b.At), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Code, b.Code))
}
