package core_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// faults cause one condition each.
var faults = map[string]func(*ledgerFixture){
	"XID_48":            func(s *ledgerFixture) { s.reportXIDs(48) },
	"XID_119":           func(s *ledgerFixture) { s.reportXIDs(119) },
	"XID_54":            func(s *ledgerFixture) { s.reportXIDs(54) },
	"XID_94":            func(s *ledgerFixture) { s.reportXIDs(94) },
	"XID_157":           func(s *ledgerFixture) { s.reportXIDs(157) },
	"ROW_REMAP_FAILED":  func(s *ledgerFixture) { s.setSample(func(v *health.Sample) { v.RemapFailed = health.Yes }) },
	"ROW_REMAP_PENDING": func(s *ledgerFixture) { s.setSample(func(v *health.Sample) { v.RemapPending = health.Yes }) },
	"FABRIC_UNHEALTHY":  func(s *ledgerFixture) { s.setSample(func(v *health.Sample) { v.Fabric = health.FabricUnhealthy }) },
	"RECOVERY_ACTION_NODE_REBOOT": func(s *ledgerFixture) {
		s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReboot })
	},
	"RECOVERY_ACTION_GPU_RESET": func(s *ledgerFixture) {
		s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset })
	},
	"LOST": func(s *ledgerFixture) { s.observe(health.Observation{At: a, Kind: health.Lost}) },
}

// Of equally bad conditions the one that is hardest to clear is the health of the GPU, whichever came first, and also if an operator has to
// clear each: what only an operator clears, then what a reboot clears, then what a reset clears. Each keeps its own action.
func TestHardestFaultToClearIsTheHealth(t *testing.T) {
	for _, order := range [][]string{ // the health, then what it hides
		{"ROW_REMAP_FAILED", "XID_48"},
		{"ROW_REMAP_FAILED", "XID_54"},
		{"ROW_REMAP_FAILED", "RECOVERY_ACTION_NODE_REBOOT"},
		{"XID_54", "XID_119"},
		{"RECOVERY_ACTION_NODE_REBOOT", "XID_48"},
		{"XID_119", "FABRIC_UNHEALTHY"},
		{"XID_157", "XID_94"},
		{"XID_157", "ROW_REMAP_PENDING"},
		{"XID_48", "XID_157"}, // that it takes no work is worse than that it must be replaced some day
		{"LOST", "XID_54"},
	} {
		for _, manual := range []bool{false, true} {
			for _, causes := range [][]string{order, {order[1], order[0]}} {
				s := newLedgerFixture(t, func(p *health.Policy) { p.ManualRecovery = manual })
				for _, cause := range causes {
					faults[cause](s)
					s.wait(time.Second)
					if !slices.Contains(causes, "LOST") {
						s.check(3)
					}
				}
				var got []string
				for _, h := range s.ledger.All(a) {
					got = append(got, h.Cause())
					if alone := s.condition(h.Cause()); h.Action != alone.Action() || h.Clears != alone.Clears() {
						t.Errorf("%v: %+v", causes, h)
					}
				}
				if !slices.Equal(got, order) || s.ledger.Health(a).Cause() != order[0] {
					t.Errorf("manual recovery %t, %v: %v, health %s", manual, causes, got, s.ledger.Health(a))
				}
			}
		}
	}
}

// Equal effort: the earlier one may be the cause of the later one.
func TestEarliestOfEqualFaultsIsTheHealth(t *testing.T) {
	s := newLedgerFixture(t)
	s.reportXIDs(119)
	s.wait(time.Second)
	s.reportXIDs(48)
	faults["RECOVERY_ACTION_GPU_RESET"](s)
	s.check(1)
	s.expect("three faults that a reset clears", health.Unhealthy, "XID_119")
}
