package core

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// advance lets the time pass: rules that wait come into force, and what has evidence for it gets well.
//
// Silence is never evidence. A condition gets well when its evidence (which kind, says its rule) has held for
// the dwell time, and as many complete checks as the policy wants have gone well meanwhile:
//
//	XID 95 ... verdict "GPU reset" ... reset, verdict "none" ... clean, clean, clean ... dwell over: well
//	           no evidence yet         evidence begins to hold   (a bad check starts it anew)
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

// effectiveState is the effect of a condition now.
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

// answersAgain reports whether a GPU that was lost answers reliably again, which makes it unhealthy and not yet well.
// Once it is back, a check that is slow or incomplete does not lose it again.
func (d *ledgerBuilder) answersAgain(c Condition, history *GPUHistory) bool {
	return c.State == Unhealthy || history.completeChecks >= d.policy.CleanChecks
}

// expired reports whether a note has lost its point: no second one came in time.
func (d *ledgerBuilder) expired(c Condition) bool {
	return c.State == Healthy && (c.Reason == ReasonXID || c.Reason == ReasonEvent) &&
		d.now.Sub(c.Last) > c.rule(d.policy).RepeatWindow
}

// recovered reports whether the evidence has held long enough.
func (d *ledgerBuilder) recovered(c Condition) bool {
	if c.State == Healthy || c.ClearingSince.IsZero() || c.CleanChecks < d.policy.CleanChecks {
		return false // a note is forgotten in its own time
	}
	return d.now.Sub(c.ClearingSince) >= d.dwell(c)
}

// dwell is how long the evidence must hold.
func (d *ledgerBuilder) dwell(c Condition) time.Duration {
	if c.State >= Unhealthy && !c.Simulated {
		return d.readHistory(c.At.GPU).dwell(d.policy, d.now)
	}
	return d.policy.Dwell
}

// Dwell is how long the evidence against a condition must hold before it is over.
func (l Ledger) Dwell(p HealthPolicy, now time.Time, c Condition) time.Duration {
	return l.builder(p, now).dwell(c)
}

// evidenceHolds reports whether something shows that a condition is over.
func (d *ledgerBuilder) evidenceHolds(c Condition) bool {
	history := d.readHistory(c.At.GPU)
	if !history.responding || c.Evidence == 0 || c.State == GPULost {
		return false // who was lost is back first, and then gets well
	}
	switch c.Reason {
	case ReasonLost, ReasonProbe, ReasonUnresponsive:
		return c.At.GI == Whole // it answers; an instance speaks for itself
	case ReasonXID, ReasonEvent, ReasonECC, ReasonWorkloads:
		return d.eventOver(c, history)
	default:
		return history.level(c.Reason) == No
	}
}

// recoveryActionCovers reports whether the verdict of this driver is about what the rule is about.
func (d *ledgerBuilder) recoveryActionCovers(rule xid.Rule) bool {
	return rule.RecoveryActionSince > 0 && branchOf(d.driver) >= rule.RecoveryActionSince
}

// clearingEvidence are what clears a condition under this policy and driver, which may give no verdict, or one that
// covers more codes than the rule says.
func (d *ledgerBuilder) clearingEvidence(c Condition) xid.Evidence {
	rule, signs := c.rule(d.policy), c.Reason.meaning().clears
	switch {
	case d.policy.Manual && c.State >= Unhealthy:
		return 0
	case rule.Clears != 0 && d.recoveryActionCovers(rule):
		signs = rule.Clears | xid.NoRecoveryAction
	case rule.Class != 0: // what is worn out stays so, whatever the driver wants done
		signs = rule.Clears
	}
	if d.readHistory(c.At.GPU).Sample.RecoveryAction == RecoveryUnknown {
		return signs &^ xid.NoRecoveryAction
	} else if rule.Class == xid.Suspect {
		return signs &^ xid.Quiet // of what nobody knows only a driver without a verdict lets silence speak
	}
	return signs
}

// eventOver reports whether one of the signs shows that an event is over. A sign must be younger than the event.
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

// updateEpisode follows the bad spells of a GPU: each makes the next dwell longer, and too many recoveries from
// something severe take it out of service.
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
		if history.SevereCause && !ignored { // an operator's order is no recovery
			history.Recoveries = appendBounded(history.Recoveries, d.now)
			if n := countWithin(history.Recoveries, d.now, 24*time.Hour); n >= d.policy.MaxRecoveries {
				d.requireService(id, fmt.Sprintf("%d recoveries within a day", n))
				return
			}
		}
		history.UnhealthySince, history.SevereCause = time.Time{}, false
	}
}
