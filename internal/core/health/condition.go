package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Condition is one cause that affects a placement. A placement may have several conditions, each with its own
// evidence for recovery; the worst one determines the health. It is comparable.
type Condition struct {
	At                  gpu.Placement
	Reason              Reason
	Code                uint64 // XID, NVML event type or recovery action
	State               State  // its effect; Healthy = recorded without effect
	Detail              string
	Since               time.Time    // first occurrence
	Last                time.Time    // latest occurrence; a persistent state occurs once
	Count               int          // occurrences; for a persistent state, checks that showed it, up to the number required
	Repeated            bool         // it occurred again within the time that the rule for repetition sets
	ClearingSince       time.Time    // since when the evidence for recovery holds; zero = it does not
	CleanChecks         int          // complete checks since ClearingSince
	Evidence            xid.Evidence // what clears it under this driver and policy
	IgnoredUntil        time.Time    // ignored by an operator until then; zero = not ignored
	FromRemovedInstance bool         // it was on a MIG instance that was removed: at most degraded
	Simulated           bool

	Severity xid.Severity `json:",omitempty"` // of an XID, the worst that the kernel log named
	Unnamed  int          `json:",omitzero"`  // occurrences of an XID with severities for which it named none yet
}

// Cause returns the name of the cause for programs: "XID_95", "LOST", "RECOVERY_ACTION_GPU_RESET".
func (c Condition) Cause() string { return causeName(c.Reason, c.Code) }

// Cause returns the name of the cause for programs; "" if the unit is healthy.
func (h Health) Cause() string { return causeName(h.Reason, h.Code) }

func causeName(r Reason, code uint64) string {
	switch r {
	case ReasonXID:
		return fmt.Sprintf("XID_%d", code)
	case ReasonEvent:
		return fmt.Sprintf("EVENT_0x%X", code)
	case ReasonRecoveryAction:
		return "RECOVERY_ACTION_" + strings.ToUpper(strings.ReplaceAll(recoveryActionOf(code).String(), " ", "_"))
	default:
		return r.String()
	}
}

// same reports whether c and o have the same cause. Different recovery actions are the same cause.
func (c Condition) same(o Condition) bool {
	return c.Reason == o.Reason && (c.Code == o.Code || c.Reason == ReasonRecoveryAction) && c.At == o.At && c.Simulated == o.Simulated
}

// merge returns one condition for two of the same cause.
func (c Condition) merge(o Condition) Condition {
	if o.Since.Before(c.Since) {
		c.Since, c.Detail = o.Since, o.Detail
	}
	if o.Last.After(c.Last) {
		c.Last, c.Code = o.Last, o.Code
	}
	if o.IgnoredUntil.Before(c.IgnoredUntil) {
		c.IgnoredUntil = o.IgnoredUntil // the shorter time: an operator may have known only one of them
	}
	c.State, c.Count = max(c.State, o.State), c.Count+o.Count
	c.Severity, c.Unnamed = c.Severity.Worse(o.Severity), c.Unnamed+o.Unnamed
	c.Repeated, c.FromRemovedInstance = c.Repeated || o.Repeated, c.FromRemovedInstance && o.FromRemovedInstance
	c.ClearingSince, c.CleanChecks = time.Time{}, 0
	return c
}

// merged sorts conditions and merges those of the same cause.
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

// isEffective reports whether the condition affects health now.
func (c Condition) isEffective() bool { return c.State > Healthy && c.IgnoredUntil.IsZero() }

// rule returns the table's rule for an XID or NVML event; the zero Rule for other reasons.
func (c Condition) rule(p Policy) xid.Rule {
	switch c.Reason {
	case ReasonXID:
		return p.xid(c.Code, c.severity())
	case ReasonEvent:
		r, _ := xid.Event(c.Code)
		return r
	default:
		return xid.Rule{}
	}
}

// clearedBy returns the evidence that clears the condition under a policy, whatever the driver reports.
func (c Condition) clearedBy(p Policy) xid.Evidence {
	if p.ManualRecovery && (c.State >= Unhealthy || c.Reason == ReasonFaultUnknown) {
		return 0
	}
	if rule := c.rule(p); rule.Class != 0 {
		return rule.Clears
	}
	return c.Reason.meaning().clears
}

// severe reports whether recoveries from the condition are limited by Policy.MaxRecoveries.
func (c Condition) severe(p Policy) bool {
	return !c.Simulated && (c.rule(p).WholeGPU() || c.Reason.meaning().severe)
}

// health returns the health of a unit whose worst condition is c.
func (c Condition) health() Health {
	h := Health{
		State: c.State, Reason: c.Reason, Code: c.Code, Detail: c.Detail, Since: c.Since, Simulated: c.Simulated,
		Action: c.Reason.meaning().action, Clears: c.Clears(),
	}
	if rule := c.rule(Policy{}); rule.Class != 0 {
		h.Action = rule.Action
	} else if c.Reason == ReasonRecoveryAction {
		h.Action = recoveryActionOf(c.Code).action()
	}
	return h
}

// Action returns what an operator should do; "" if nothing.
func (c Condition) Action() string { return c.health().Action }

// Clears returns the evidence that clears the condition, as text.
func (c Condition) Clears() string {
	if text := c.Reason.meaning().clearsText; text != "" && c.Evidence != 0 {
		return text
	}
	return c.Evidence.String()
}

// String returns the text of the condition as Health.String formats it.
func (c Condition) String() string { return c.health().String() }

// realFirst is the order of real conditions before simulated ones.
func realFirst(a, b Condition) int {
	switch {
	case a.Simulated == b.Simulated:
		return 0
	case b.Simulated:
		return -1
	}
	return 1
}

func compareConditions(a, b Condition) int {
	return cmp.Or(realFirst(a, b), gpu.ComparePlacements(a.At, b.At), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Code, b.Code))
}
