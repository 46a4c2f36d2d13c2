package health

import "testing"

// The repair of a cause by its name is that of its condition.
func TestRepairOf(t *testing.T) {
	for cause, want := range map[string]Repair{
		"XID_95": Reset, "XID_79": Reboot, "XID_x": NoRepair, "LOST": Reboot, "ROW_REMAP_FAILED": Replace, "DEGRADED": NoRepair, "": NoRepair,
		"RECOVERY_ACTION_GPU_RESET": Reset, "RECOVERY_ACTION_BUS_RESET": BusReset, "RECOVERY_ACTION_NODE_REBOOT": Reboot, "HELD": NoRepair,
	} {
		if got := RepairOf(cause); got != want {
			t.Errorf("%s: %s, want %s", cause, got, want)
		}
	}
	for _, r := range Reasons() {
		if r == ReasonXID || r == ReasonEvent || r == ReasonRecoveryAction {
			continue
		}
		if c := (Condition{Reason: r}); RepairOf(c.Cause()) != c.Repair() {
			t.Errorf("%s: %s, want %s", c.Cause(), RepairOf(c.Cause()), c.Repair())
		}
	}
}
