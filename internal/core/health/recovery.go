package health

import (
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
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
func (b *ledgerBuilder) advance() {
	for id := range b.conditions {
		b.advanceGPU(id)
	}
	for id := range b.histories {
		b.updateEpisode(id)
	}
}

// advanceGPU applies the passage of time to the conditions of a GPU; "" = of the node.
func (b *ledgerBuilder) advanceGPU(id gpu.DeviceID) {
	of := b.conditions[id]
	for i := range of {
		c := &of[i]
		if !c.IgnoredUntil.IsZero() && !b.now.Before(c.IgnoredUntil) {
			c.IgnoredUntil = time.Time{}
		}
		if c.State = b.effectiveState(*c); c.FromRemovedInstance {
			c.State = min(c.State, b.policy.state(xid.Degrades))
		}
		c.Evidence = b.clearingEvidence(*c)
		switch holds := b.evidenceHolds(*c); {
		case !holds:
			c.ClearingSince, c.CleanChecks = time.Time{}, 0
		case c.ClearingSince.IsZero():
			c.ClearingSince, c.CleanChecks = b.now, 0
		}
	}
	b.remove(id, func(c Condition) bool {
		if over := b.expired(c); over || !b.recovered(c) {
			return over
		}
		history := b.history(id)
		if c.Reason == ReasonXID && c.State >= Unhealthy && c.severe(b.policy) && history.LastReset.After(c.Last) {
			history.ClearedByReset = appendBounded(history.ClearedByReset, ClearedXID{c.Code, b.now})
		}
		return true
	})
}

// effectiveState returns the present state that a condition results in.
func (b *ledgerBuilder) effectiveState(c Condition) State {
	history := b.readHistory(c.At.GPU)
	switch c.Reason {
	case ReasonFabricWait:
		if b.now.Sub(c.Since) >= b.policy.FabricTimeout {
			return Unhealthy
		}
		return Unknown
	case ReasonLost:
		if c.At.GI == gpu.Whole && b.answersAgain(c, history) {
			return Unhealthy
		}
		return GPULost
	case ReasonXID, ReasonEvent:
	default:
		return c.State
	}
	rule := c.rule(b.policy)
	effect := rule.Effect
	if history.Sample.RecoveryAction == RecoveryUnknown || !b.recoveryActionCovers(rule) {
		if b.now.Sub(c.Since) >= b.policy.SettleTime {
			effect = max(effect, rule.SettledEffect)
			if rule.NVLinkOnly && history.MaxNVLinks == 0 {
				effect = min(effect, max(rule.Effect, xid.Degrades))
			}
		}
		if c.Repeated {
			effect = max(effect, rule.RepeatEffect)
		}
	}
	if effect == xid.Loses && b.now.Sub(c.Last) >= b.policy.SettleTime && b.answersAgain(c, history) {
		effect = xid.Withdraws
	}
	return b.policy.state(effect)
}

// answersAgain reports whether a lost GPU responds reliably again, so that it is unhealthy instead of lost. After
// that, an incomplete check does not make it lost again.
func (b *ledgerBuilder) answersAgain(c Condition, history *GPUHistory) bool {
	return c.State == Unhealthy || history.completeChecks >= b.policy.CleanChecks
}

// expired reports whether a condition without effect can be removed, because the fault was not repeated in time.
func (b *ledgerBuilder) expired(c Condition) bool {
	return c.State == Healthy && (c.Reason == ReasonXID || c.Reason == ReasonEvent) &&
		b.now.Sub(c.Last) > c.rule(b.policy).RepeatWindow
}

// recovered reports whether the evidence has held long enough.
func (b *ledgerBuilder) recovered(c Condition) bool {
	if c.State == Healthy || c.ClearingSince.IsZero() || c.CleanChecks < b.policy.CleanChecks {
		return false // conditions without effect expire instead
	}
	return b.now.Sub(c.ClearingSince) >= b.readHistory(c.At.GPU).dwell(b.policy, b.now, c)
}

// Dwell returns how long the evidence for recovery must hold until the condition is removed.
func (l Ledger) Dwell(p Policy, now time.Time, c Condition) time.Duration {
	history, _ := l.History(c.At.GPU)
	return history.dwell(p, now, c)
}

// evidenceHolds reports whether there is evidence that a condition is over.
func (b *ledgerBuilder) evidenceHolds(c Condition) bool {
	history := b.readHistory(c.At.GPU)
	if !history.responding || c.Evidence == 0 || c.State == GPULost {
		return false // a lost GPU must respond reliably first
	}
	switch c.Reason {
	case ReasonLost, ReasonProbe, ReasonUnresponsive:
		return c.At.GI == gpu.Whole // the GPU responds; an instance is observed by InstanceRead
	case ReasonXID, ReasonEvent, ReasonECC, ReasonWorkloads, ReasonFaultUnknown:
		return b.eventOver(c, history)
	case ReasonOperational:
		return history.checked.After(c.Last)
	default:
		return history.level(c.Reason) == No
	}
}

// recoveryActionCovers reports whether the recovery action of this driver's version covers the code of a rule.
func (b *ledgerBuilder) recoveryActionCovers(rule xid.Rule) bool {
	return rule.RecoveryActionSince > 0 && gpu.Branch(b.driver) >= rule.RecoveryActionSince
}

// clearingEvidence returns the evidence that clears a condition under this policy and driver. The driver may
// report no recovery action, or its version may cover more codes than the rule assumes.
func (b *ledgerBuilder) clearingEvidence(c Condition) xid.Evidence {
	rule, signs := c.rule(b.policy), c.clearedBy(b.policy)
	if signs != 0 && b.recoveryActionCovers(rule) { // permanent damage is not cleared by the recovery action
		signs |= xid.NoRecoveryAction
	}
	uncovered := c.Reason == ReasonFaultUnknown && gpu.Branch(b.driver) < VerdictBranch
	if uncovered || b.readHistory(c.At.GPU).Sample.RecoveryAction == RecoveryUnknown {
		return signs &^ xid.NoRecoveryAction
	} else if rule.Class == xid.Suspect {
		return signs &^ xid.Quiet // for an unknown code, absence of repeats counts only if the driver reports no recovery action
	}
	return signs
}

// eventOver reports whether one kind of evidence shows that an event is over. Evidence must be later than the
// event.
func (b *ledgerBuilder) eventOver(c Condition, history *GPUHistory) bool {
	has := func(sign xid.Evidence) bool { return c.Evidence&sign != 0 }
	since := b.now.Sub(c.Last)
	quiet := b.policy.QuietTime
	if c.Reason == ReasonWorkloads {
		quiet = workloadSpan
	}
	switch {
	case has(xid.ResetSeen) && history.LastReset.After(c.Last):
		return true
	case !history.checked.After(c.Last):
		return false
	case has(xid.NoRecoveryAction) && history.Sample.RecoveryAction == RecoveryNone && since >= b.policy.SettleTime:
		return true
	case has(xid.LevelClear) && history.levelCleared(c.rule(b.policy).Level):
		return true
	default:
		return has(xid.Quiet) && since >= quiet
	}
}

// updateEpisode tracks the unhealthy episodes of a GPU. Each one makes the next dwell time longer, and too many
// recoveries from severe causes put the GPU out of service.
func (b *ledgerBuilder) updateEpisode(id gpu.DeviceID) {
	bad, severe, ignored := false, false, false
	for _, c := range b.conditions[id] {
		switch {
		case c.State < Unhealthy || c.Simulated:
		case c.isEffective():
			bad, severe = true, severe || c.severe(b.policy)
		default:
			ignored = true
		}
	}
	previous := b.readHistory(id)
	switch began := !previous.UnhealthySince.IsZero(); {
	case bad && !began:
		history := b.history(id)
		history.UnhealthySince, history.SevereCause = b.now, severe
		history.UnhealthyEpisodes = appendBounded(history.UnhealthyEpisodes, b.now)
	case bad && severe && !previous.SevereCause:
		b.history(id).SevereCause = true
	case !bad && began:
		history := b.history(id)
		if history.SevereCause && !ignored { // ignored by an operator is not recovered
			history.Recoveries = appendBounded(history.Recoveries, b.now)
			if n := countWithin(history.Recoveries, b.now, 24*time.Hour); n >= b.policy.MaxRecoveries {
				b.requireService(id, fmt.Sprintf("%d recoveries within a day", n))
				return
			}
		}
		history.UnhealthySince, history.SevereCause = time.Time{}, false
	}
}
