package health

import (
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Repair is what it takes to clear a condition, from the least to the most. A greater one also clears what a smaller one does. The zero value is nothing
// that is done to the GPU: the condition ends by itself, or when something beside the GPU is repaired.
type Repair uint8

// Repairs.
const (
	NoRepair Repair = iota
	Reset
	BusReset // a reset of the GPU does not reset its bus
	Reboot
	Replace // diagnostics or another GPU: only an operator clears it
)

var repairNames = [...]string{"none", "reset", "bus-reset", "reboot", "replace"}

// String returns the name of the repair.
func (r Repair) String() string { return repairNames[r] }

// MarshalText returns the name of the repair.
func (r Repair) MarshalText() ([]byte, error) { return gpu.MarshalName(r, repairNames[:], "repair") }

// UnmarshalText parses the output of MarshalText.
func (r *Repair) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(r, repairNames[:], string(text), "repair")
}

// Repair returns what it takes to clear the condition. An operator who has to clear every condition (Policy.ManualRecovery) has to do the
// same for it.
func (c Condition) Repair() Repair {
	rule := c.rule(Policy{})
	switch {
	case c.Reason == ReasonRecoveryAction:
		return recoveryActionOf(c.Code).repair()
	case rule.Class == 0:
		return c.Reason.meaning().repair
	case rule.Class == xid.Node:
		return Reboot
	}
	signs := c.Evidence
	if signs == 0 {
		signs = rule.Clears
	}
	switch {
	case signs == 0:
		return Replace
	case signs&xid.Quiet != 0:
		return NoRepair
	case signs&xid.ResetSeen != 0:
		return Reset
	case signs == xid.Reboot:
		return Reboot
	}
	return NoRepair
}

// RepairOf returns what it takes to clear a condition with a cause as Condition.Cause names it, by the rules without a policy; NoRepair if there
// is no such cause.
func RepairOf(cause string) Repair {
	if code, ok := strings.CutPrefix(cause, "XID_"); ok {
		n, err := strconv.ParseUint(code, 10, 64)
		if err != nil {
			return NoRepair
		}
		return Condition{Reason: ReasonXID, Code: n}.Repair()
	}
	for v := range RecoveryOther + 1 {
		if c := (Condition{Reason: ReasonRecoveryAction, Code: uint64(v)}); c.Cause() == cause {
			return c.Repair()
		}
	}
	for _, r := range Reasons() {
		if r.String() == cause {
			return Condition{Reason: r}.Repair()
		}
	}
	return NoRepair
}

// repair returns what the recovery action asks for.
func (v RecoveryAction) repair() Repair {
	switch v {
	case RecoveryReboot, RecoverySystemReboot:
		return Reboot
	case RecoveryBusReset:
		return BusReset
	case RecoveryReset, RecoveryDrainAndReset, RecoveryDrainP2P, RecoveryOther:
		return Reset
	default:
		return NoRepair
	}
}
