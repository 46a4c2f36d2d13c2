package core

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// advance applies the passage of time: it updates the effect of each condition, and removes conditions that have
// recovered.
//
// Absence of new errors is not evidence, except where the rule has xid.Quiet. A condition is removed when its
// evidence (of the kinds in its rule) has held for the dwell time, and the required number of complete checks was
// made meanwhile:
//
//	XID 95 ... action "GPU reset" ... reset, action "none" ... check, check, check ... dwell over: removed
//	           no evidence yet        evidence begins to hold  (a failed check starts it again)
func (d *ledgerBuilder) advance() {
	for i := range d.conditions {
		c := &d.conditions[i]
		if !c.IgnoredUntil.IsZero() && !d.now.Before(c.IgnoredUntil) {
			c.IgnoredUntil = time.Time{}
		}
		if c.State = d.effectiveState(*c); c.FromRemovedInstance {
			c.State = min(c.State, d.policy.state(xid.Degrades))
		}
		c.Evidence = d.clearingEvidence(*c)
		switch holds := d.evidenceHolds(*c); {
		case !holds:
			c.ClearingSince, c.CleanChecks = time.Time{}, 0
		case c.ClearingSince.IsZero():
			c.ClearingSince, c.CleanChecks = d.now, 0
		}
	}
	d.remove(func(c Condition) bool {
		if over := d.expired(c); over || !d.recovered(c) {
			return over
		}
		history := d.history(c.At.GPU)
		if c.Reason == ReasonXID && c.State >= Unhealthy && c.severe(d.policy) && history.LastReset.After(c.Last) {
			history.ClearedByReset = appendBounded(history.ClearedByReset, ClearedXID{c.Code, d.now})
		}
		return true
	})
	for id := range d.histories {
		d.updateEpisode(id)
	}
}

// effectiveState returns the present state that a condition results in.
func (d *ledgerBuilder) effectiveState(c Condition) HealthState {
	history := d.readHistory(c.At.GPU)
	switch c.Reason {
	case ReasonFabricWait:
		if d.now.Sub(c.Since) >= d.policy.FabricGrace {
			return Unhealthy
		}
		return Unknown
	case ReasonLost:
		if c.At.GI == Whole && d.answersAgain(c, history) {
			return Unhealthy
		}
		return GPULost
	case ReasonXID, ReasonEvent:
	default:
		return c.State
	}
	rule := c.rule(d.policy)
	effect := rule.Effect
	if history.Sample.RecoveryAction == RecoveryUnknown || !d.recoveryActionCovers(rule) {
		if d.now.Sub(c.Since) >= d.policy.Settle {
			effect = max(effect, rule.SettledEffect)
			if rule.NVLinkOnly && history.MaxNVLinks == 0 {
				effect = min(effect, max(rule.Effect, xid.Degrades))
			}
		}
		if c.Repeated {
			effect = max(effect, rule.RepeatEffect)
		}
	}
	if effect == xid.Loses && d.now.Sub(c.Last) >= d.policy.Settle && d.answersAgain(c, history) {
		effect = xid.Withdraws
	}
	return d.policy.state(effect)
}

// answersAgain reports whether a lost GPU responds reliably again, so that it is unhealthy instead of lost. After
// that, an incomplete check does not make it lost again.
func (d *ledgerBuilder) answersAgain(c Condition, history *GPUHistory) bool {
	return c.State == Unhealthy || history.completeChecks >= d.policy.CleanChecks
}

// expired reports whether a condition without effect can be removed, because the fault was not repeated in time.
func (d *ledgerBuilder) expired(c Condition) bool {
	return c.State == Healthy && (c.Reason == ReasonXID || c.Reason == ReasonEvent) &&
		d.now.Sub(c.Last) > c.rule(d.policy).RepeatWindow
}

// recovered reports whether the evidence has held long enough.
func (d *ledgerBuilder) recovered(c Condition) bool {
	if c.State == Healthy || c.ClearingSince.IsZero() || c.CleanChecks < d.policy.CleanChecks {
		return false // conditions without effect expire instead
	}
	return d.now.Sub(c.ClearingSince) >= d.dwell(c)
}

// dwell returns how long the evidence must hold.
func (d *ledgerBuilder) dwell(c Condition) time.Duration {
	if c.State >= Unhealthy && !c.Simulated {
		return d.readHistory(c.At.GPU).dwell(d.policy, d.now)
	}
	return d.policy.Dwell
}

// Dwell returns how long the evidence for recovery must hold until the condition is removed.
func (l Ledger) Dwell(p HealthPolicy, now time.Time, c Condition) time.Duration {
	return l.builder(p, now).dwell(c)
}

// evidenceHolds reports whether there is evidence that a condition is over.
func (d *ledgerBuilder) evidenceHolds(c Condition) bool {
	history := d.readHistory(c.At.GPU)
	if !history.responding || c.Evidence == 0 || c.State == GPULost {
		return false // a lost GPU must respond reliably first
	}
	switch c.Reason {
	case ReasonLost, ReasonProbe, ReasonUnresponsive:
		return c.At.GI == Whole // the GPU responds; an instance is observed by InstanceRead
	case ReasonXID, ReasonEvent, ReasonECC, ReasonWorkloads:
		return d.eventOver(c, history)
	default:
		return history.level(c.Reason) == No
	}
}

// recoveryActionCovers reports whether the recovery action of this driver's version covers the code of a rule.
func (d *ledgerBuilder) recoveryActionCovers(rule xid.Rule) bool {
	return rule.RecoveryActionSince > 0 && branchOf(d.driver) >= rule.RecoveryActionSince
}

// clearingEvidence returns the evidence that clears a condition under this policy and driver. The driver may
// report no recovery action, or its version may cover more codes than the rule assumes.
func (d *ledgerBuilder) clearingEvidence(c Condition) xid.Evidence {
	rule, signs := c.rule(d.policy), c.Reason.meaning().clears
	switch {
	case d.policy.Manual && c.State >= Unhealthy:
		return 0
	case rule.Clears != 0 && d.recoveryActionCovers(rule):
		signs = rule.Clears | xid.NoRecoveryAction
	case rule.Class != 0: // permanent damage is not cleared by the recovery action
		signs = rule.Clears
	}
	if d.readHistory(c.At.GPU).Sample.RecoveryAction == RecoveryUnknown {
		return signs &^ xid.NoRecoveryAction
	} else if rule.Class == xid.Suspect {
		return signs &^ xid.Quiet // for an unknown code, absence of repeats counts only if the driver reports no recovery action
	}
	return signs
}

// eventOver reports whether one kind of evidence shows that an event is over. Evidence must be later than the
// event.
func (d *ledgerBuilder) eventOver(c Condition, history *GPUHistory) bool {
	has := func(sign xid.Evidence) bool { return c.Evidence&sign != 0 }
	since := d.now.Sub(c.Last)
	quiet := d.policy.Quiet
	if c.Reason == ReasonWorkloads {
		quiet = workloadSpan
	}
	switch {
	case has(xid.ResetSeen) && history.LastReset.After(c.Last):
		return true
	case !history.checked.After(c.Last):
		return false
	case has(xid.NoRecoveryAction) && history.Sample.RecoveryAction == RecoveryNone && since >= d.policy.Settle:
		return true
	case has(xid.LevelClear) && history.levelCleared(c.rule(d.policy).Level):
		return true
	default:
		return has(xid.Quiet) && since >= quiet
	}
}

// updateEpisode tracks the unhealthy episodes of a GPU. Each one makes the next dwell time longer, and too many
// recoveries from severe causes put the GPU out of service.
func (d *ledgerBuilder) updateEpisode(id DeviceID) {
	bad, severe, ignored := false, false, false
	for _, c := range d.conditions {
		switch {
		case c.At.GPU != id || c.State < Unhealthy || c.Simulated:
		case c.isEffective():
			bad, severe = true, severe || c.severe(d.policy)
		default:
			ignored = true
		}
	}
	was := d.readHistory(id)
	switch began := !was.UnhealthySince.IsZero(); {
	case bad && !began:
		history := d.history(id)
		history.UnhealthySince, history.SevereCause = d.now, severe
		history.UnhealthyEpisodes = appendBounded(history.UnhealthyEpisodes, d.now)
	case bad && severe && !was.SevereCause:
		d.history(id).SevereCause = true
	case !bad && began:
		history := d.history(id)
		if history.SevereCause && !ignored { // ignored by an operator is not recovered
			history.Recoveries = appendBounded(history.Recoveries, d.now)
			if n := countWithin(history.Recoveries, d.now, 24*time.Hour); n >= d.policy.MaxRecoveries {
				d.requireService(id, fmt.Sprintf("%d recoveries within a day", n))
				return
			}
		}
		history.UnhealthySince, history.SevereCause = time.Time{}, false
	}
}
