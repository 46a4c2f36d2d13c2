package core

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// HealthMode says what becomes of a verdict.
type HealthMode string

// The modes.
const (
	ModeEnforce HealthMode = "enforce" // an unhealthy unit takes no new work
	ModeObserve HealthMode = "observe" // reported with its reason, never withdrawn
	ModeOff     HealthMode = "off"     // nothing is judged but whether driver and GPU are there
)

// HealthPolicy says what observations mean. Start from DefaultHealthPolicy.
type HealthPolicy struct {
	Mode HealthMode

	// XIDs overrides the effect of single codes; xid.None ignores one. AllXIDs, if not nil, is the
	// effect of every code that XIDs does not name.
	XIDs    map[uint64]xid.Effect
	AllXIDs *xid.Effect

	DegradedTakesNoWork bool       // what would be degraded is unhealthy
	Workloads           xid.Effect // of application XIDs from three different workloads within an hour

	ProbeFailures int           // consecutive failed checks before a GPU is unhealthy, at least 1
	Deadline      time.Duration // after which a driver call counts as stuck
	Settle        time.Duration // after an XID, until the driver's verdict on it can be relied on

	Manual        bool          // only an operator makes an unhealthy GPU well again
	CleanChecks   int           // complete checks in a row that recovery takes beside evidence, at least 1
	Dwell         time.Duration // for which the evidence must hold; doubles with each bad spell within six hours
	MaxDwell      time.Duration
	MaxRecoveries int           // within a day: at this one an operator has to look, at least 1
	Quiet         time.Duration // without another, for the faults of which the driver gives no verdict
	Forget        time.Duration // after which a GPU that the driver no longer lists is dropped
	FabricGrace   time.Duration // for a fabric to come up
}

// DefaultHealthPolicy is what both agents start from.
func DefaultHealthPolicy() HealthPolicy {
	return HealthPolicy{
		Mode:          ModeEnforce,
		Workloads:     xid.Degrades,
		ProbeFailures: 3,
		Deadline:      time.Minute,
		Settle:        30 * time.Second,
		CleanChecks:   3,
		Dwell:         time.Minute,
		MaxDwell:      time.Hour,
		MaxRecoveries: 3,
		Quiet:         10 * time.Minute,
		Forget:        24 * time.Hour,
		FabricGrace:   10 * time.Minute,
	}
}

// Validate returns every problem.
func (p HealthPolicy) Validate() (errs []error) {
	switch p.Mode {
	case ModeEnforce, ModeObserve, ModeOff:
	default:
		errs = append(errs, &ConfigError{"health mode", string(p.Mode), "want enforce, observe or off"})
	}
	for _, d := range []struct {
		key   string
		value time.Duration
	}{{"call deadline", p.Deadline}, {"settle", p.Settle}, {"dwell", p.Dwell}, {"longest dwell", p.MaxDwell}, {"quiet", p.Quiet}, {"forget", p.Forget}} {
		if d.value <= 0 {
			errs = append(errs, &ConfigError{d.key, d.value.String(), "want a positive duration such as 30s"})
		}
	}
	for _, n := range []struct {
		key   string
		value int
	}{{"probe failures", p.ProbeFailures}, {"clean checks", p.CleanChecks}, {"recoveries a day", p.MaxRecoveries}} {
		if n.value < 1 {
			errs = append(errs, &ConfigError{n.key, fmt.Sprint(n.value), "want 1 or more"})
		}
	}
	return errs
}

// xid is the rule for an XID under this policy.
func (p HealthPolicy) xid(code uint64) xid.Rule {
	r := xid.XID(code)
	effect, ok := p.XIDs[code]
	if !ok && p.AllXIDs != nil {
		effect, ok = *p.AllXIDs, true
	}
	if !ok {
		return r
	}
	withdrawn := r.Effect >= xid.Withdraws || r.SettledEffect >= xid.Withdraws
	r.Effect, r.SettledEffect, r.RepeatEffect, r.RepeatWindow, r.NVLinkOnly = effect, effect, xid.None, 0, false
	if r.Class == xid.Application || r.Class == xid.Info || r.Class == xid.Trigger {
		r.Class = xid.Suspect
		r.Clears = xid.NoRecoveryAction | xid.ResetSeen | xid.Reboot | xid.Quiet
	}
	if effect >= xid.Withdraws && !withdrawn {
		r.Clears &^= xid.Quiet // silence is no evidence for what the operator calls unhealthy
	}
	return r
}

// state is what an effect makes of what it concerns.
func (p HealthPolicy) state(e xid.Effect) HealthState {
	switch {
	case e == xid.Degrades && p.DegradedTakesNoWork, e == xid.Withdraws:
		return Unhealthy
	case e == xid.Degrades:
		return Degraded
	case e == xid.Loses:
		return GPULost
	}
	return Healthy
}
