package health

import "github.com/tandem-gpu/tandem/internal/core/health/xid"

// effort is what it takes to clear a condition. A greater effort also clears what a smaller one does, but for a repair beside the GPU.
type effort uint8

const (
	needsNothing effort = iota // it ends by itself, or when something beside the GPU is repaired
	needsReset
	needsReboot
	needsService // diagnostics or another GPU: only an operator clears it
)

// effort returns what it takes to clear the condition. An operator who has to clear every condition (Policy.ManualRecovery) has to do the
// same for it.
func (c Condition) effort() effort {
	rule := c.rule(Policy{})
	switch {
	case c.Reason == ReasonRecoveryAction:
		return recoveryActionOf(c.Code).effort()
	case rule.Class == 0:
		return c.Reason.meaning().effort
	case rule.Class == xid.Node:
		return needsReboot
	}
	signs := c.Evidence
	if signs == 0 {
		signs = rule.Clears
	}
	switch {
	case signs == 0:
		return needsService
	case signs&xid.Quiet != 0:
		return needsNothing
	case signs&xid.ResetSeen != 0:
		return needsReset
	case signs == xid.Reboot:
		return needsReboot
	}
	return needsNothing
}

// effort returns what the recovery action asks for.
func (v RecoveryAction) effort() effort {
	switch v {
	case RecoveryReboot, RecoverySystemReboot, RecoveryBusReset: // a reset of the GPU does not reset its bus
		return needsReboot
	case RecoveryReset, RecoveryDrainAndReset, RecoveryDrainP2P, RecoveryOther:
		return needsReset
	default:
		return needsNothing
	}
}
