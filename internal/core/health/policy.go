package health

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Mode is what the agent does with the health of units.
type Mode string

// The modes.
const (
	ModeEnforce Mode = "enforce" // an unhealthy unit takes no new work
	ModeObserve Mode = "observe" // health is reported with its reason, but every unit takes work
	ModeOff     Mode = "off"     // health is not evaluated, except whether the driver and the GPU respond
)

// Policy is the configuration of health. Start from DefaultPolicy.
type Policy struct {
	Mode Mode

	// XIDs overrides the effect of single codes; xid.None ignores a code. AllXIDs, if not nil, is the effect of
	// every code that is not in XIDs.
	XIDs    map[uint64]xid.Effect
	AllXIDs *xid.Effect

	DegradedTakesNoWork bool       // degraded units are unhealthy
	ApplicationFaults   xid.Effect // effect of application XIDs of three different workloads within an hour

	ProbeFailures int           // consecutive failed checks until a GPU is unhealthy, at least 1
	CallDeadline  time.Duration // time after which a driver call counts as hung
	SettleTime    time.Duration // time after an XID until the recovery action can be relied on

	ManualRecovery   bool          // an unhealthy GPU recovers only by an operator's command
	CleanChecks      int           // consecutive complete checks that recovery requires beside evidence, at least 1
	RecoveryDwell    time.Duration // time for which evidence must hold; doubles with each unhealthy episode within six hours
	MaxRecoveryDwell time.Duration
	MaxRecoveries    int           // recoveries from severe causes within a day at which a GPU needs service, at least 1
	QuietTime        time.Duration // time without a repeat that clears a fault which the driver's recovery action does not cover
	RemoveLostAfter  time.Duration // time after which a GPU that the driver does not list is removed
	FabricTimeout    time.Duration // time after which a fabric whose registration has not completed (nvmlGpuFabricInfo_t) counts as failed
}

// DefaultPolicy returns the defaults of both agents.
func DefaultPolicy() Policy {
	return Policy{
		Mode:              ModeEnforce,
		ApplicationFaults: xid.Degrades,
		ProbeFailures:     3,
		CallDeadline:      time.Minute,
		SettleTime:        30 * time.Second,
		CleanChecks:       3,
		RecoveryDwell:     time.Minute,
		MaxRecoveryDwell:  time.Hour,
		MaxRecoveries:     3,
		QuietTime:         10 * time.Minute,
		RemoveLostAfter:   24 * time.Hour,
		FabricTimeout:     10 * time.Minute,
	}
}

// Validate returns all problems, each a *setting.Error.
func (p Policy) Validate() (errs []error) {
	switch p.Mode {
	case ModeEnforce, ModeObserve, ModeOff:
	default:
		errs = append(errs, &setting.Error{Key: "health mode", Value: string(p.Mode), Remedy: "want enforce, observe or off"})
	}
	for _, d := range []struct {
		key   string
		value time.Duration
	}{{"call deadline", p.CallDeadline}, {"settle", p.SettleTime}, {"dwell", p.RecoveryDwell}, {"longest dwell", p.MaxRecoveryDwell}, {"quiet", p.QuietTime}, {"forget", p.RemoveLostAfter}} {
		if d.value <= 0 {
			errs = append(errs, &setting.Error{Key: d.key, Value: d.value.String(), Remedy: "want a positive duration such as 30s"})
		}
	}
	for _, n := range []struct {
		key   string
		value int
	}{{"probe failures", p.ProbeFailures}, {"clean checks", p.CleanChecks}, {"recoveries a day", p.MaxRecoveries}} {
		if n.value < 1 {
			errs = append(errs, &setting.Error{Key: n.key, Value: fmt.Sprint(n.value), Remedy: "want 1 or more"})
		}
	}
	return errs
}

// xid returns the rule for an XID of a severity under this policy. An override is for all severities.
func (p Policy) xid(code uint64, severity xid.Severity) xid.Rule {
	effect, ok := p.XIDs[code]
	if !ok && p.AllXIDs != nil {
		effect, ok = *p.AllXIDs, true
	}
	if !ok {
		return xid.Named(code, severity)
	}
	r := xid.XID(code)
	withdrawn := r.Effect >= xid.Withdraws || r.SettledEffect >= xid.Withdraws
	r.Effect, r.SettledEffect, r.RepeatEffect, r.RepeatWindow, r.NVLinkOnly = effect, effect, xid.None, 0, false
	if r.Class == xid.Application || r.Class == xid.Info || r.Class == xid.Trigger {
		r.Class = xid.Suspect
		r.Clears = xid.NoRecoveryAction | xid.ResetSeen | xid.Reboot | xid.Quiet
	}
	if effect >= xid.Withdraws && !withdrawn {
		r.Clears &^= xid.Quiet // the operator made the code unhealthy, so absence of repeats is not enough
	}
	return r
}

// state returns the health state that an effect results in.
func (p Policy) state(e xid.Effect) State {
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
