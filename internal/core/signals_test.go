package core_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// level is a persistent state that is a fault as long as it is present.
type level struct {
	cause  string
	state  health.State
	checks int // consecutive checks that must show it before it has an effect
	set    func(*health.Sample)
	unset  func(*health.Sample)
	over   time.Duration // from the first check without it until a is healthy
}

func levelReasons() []level {
	action := func(v health.RecoveryAction) func(*health.Sample) {
		return func(o *health.Sample) { o.RecoveryAction = v }
	}
	fabric := func(f health.Fabric) func(*health.Sample) { return func(o *health.Sample) { o.Fabric = f } }
	return []level{
		{"RECOVERY_ACTION_GPU_RESET", health.Unhealthy, 1, action(health.RecoveryReset), action(health.RecoveryNone), time.Minute},
		{"RECOVERY_ACTION_NODE_REBOOT", health.Unhealthy, 1, action(health.RecoveryReboot), action(health.RecoveryNone), time.Minute},
		{"RECOVERY_ACTION_DRAIN_AND_RESET", health.Unhealthy, 1, action(health.RecoveryDrainAndReset), action(health.RecoveryNone), time.Minute},
		{"RECOVERY_ACTION_BUS_RESET", health.Unhealthy, 1, action(health.RecoveryBusReset), action(health.RecoveryNone), time.Minute},
		{"RECOVERY_ACTION_SYSTEM_REBOOT", health.Unhealthy, 1, action(health.RecoverySystemReboot), action(health.RecoveryNone), time.Minute},
		{"RECOVERY_ACTION_UNKNOWN_ACTION", health.Unhealthy, 1, action(health.RecoveryOther), action(health.RecoveryNone), time.Minute},
		{"RECOVERY_ACTION_DRAIN_P2P", health.Unhealthy, 2, action(health.RecoveryDrainP2P), action(health.RecoveryNone), time.Minute},
		{"RECOVERY_ACTION_RECOVER_IMEX_DOMAIN", health.Unhealthy, 2, action(health.RecoveryIMEX), action(health.RecoveryNone), time.Minute},
		{"ROW_REMAP_FAILED", health.Unhealthy, 2, func(v *health.Sample) { v.RemapFailed = health.Yes }, func(v *health.Sample) { v.RemapFailed = health.No }, never},
		{"MEMORY_UNREPAIRABLE", health.Unhealthy, 2, func(v *health.Sample) { v.Unrepairable = health.Yes }, func(v *health.Sample) { v.Unrepairable = health.No }, never},
		{"SRAM_THRESHOLD", health.Unhealthy, 2, func(v *health.Sample) { v.SRAMThreshold = health.Yes }, func(v *health.Sample) { v.SRAMThreshold = health.No }, never},
		{"ROW_REMAP_PENDING", health.Degraded, 2, func(v *health.Sample) { v.RemapPending = health.Yes }, func(v *health.Sample) { v.RemapPending = health.No }, time.Minute},
		{"ROW_REMAP_PENDING", health.Degraded, 2, func(v *health.Sample) { v.BankRemapPending = health.Yes }, func(v *health.Sample) { v.BankRemapPending = health.No }, time.Minute},
		{"PAGE_RETIREMENT_PENDING", health.Degraded, 2, func(v *health.Sample) { v.RetirementPending = health.Yes }, func(v *health.Sample) { v.RetirementPending = health.No }, time.Minute},
		{"REPAIR_PENDING", health.Degraded, 2, func(v *health.Sample) { v.RepairPending = health.Yes }, func(v *health.Sample) { v.RepairPending = health.No }, time.Minute},
		{"INFOROM_CORRUPT", health.Degraded, 1, func(v *health.Sample) { v.InfoROMCorrupt = health.Yes }, func(v *health.Sample) { v.InfoROMCorrupt = health.No }, time.Minute},
		{"FABRIC_STARTING", health.Unknown, 1, fabric(health.FabricStarting), fabric(health.FabricHealthy), 0},
		{"FABRIC_UNHEALTHY", health.Unhealthy, 3, fabric(health.FabricUnhealthy), fabric(health.FabricHealthy), time.Minute},
		{"FABRIC_UNHEALTHY", health.Unhealthy, 3, fabric(health.FabricMisconfigured), fabric(health.FabricHealthy), time.Minute},
		{"FABRIC_LIMITED", health.Degraded, 3, fabric(health.FabricLimited), fabric(health.FabricHealthy), time.Minute},
		{"NVLINK_DOWN", health.Degraded, 3, func(v *health.Sample) { v.LinksUp.Value = 17 }, func(v *health.Sample) { v.LinksUp.Value = 18 }, time.Minute},
		{"PCIE_WIDTH", health.Degraded, 3, func(v *health.Sample) { v.Busy, v.PCIeWidth = true, 8 }, func(v *health.Sample) { v.PCIeWidth = 16 }, time.Minute},
	}
}

func TestLevels(t *testing.T) {
	for _, l := range levelReasons() {
		t.Run(l.cause, func(t *testing.T) {
			s := newLedgerFixture(t)
			s.setSample(l.set)
			for range l.checks - 1 {
				s.check(1)
				s.expect("too early", health.Healthy, "")
			}
			s.check(1)
			s.expect("after its checks", l.state, l.cause)
			first := s.ledger.Health(a)
			s.checkFor(5 * time.Minute)
			if h := s.ledger.Health(a); h != first {
				t.Errorf("was %q, is %q", first, h)
			}
			s.setSample(l.unset)
			s.check(1)
			s.expectRecovery("without it", l.over)
			if l.over == never && l.state == health.Unhealthy { // only an operator clears it
				s.setSample(func(v *health.Sample) { *v = health.Sample{} })
				s.reset()
				s.expect("after a reset", l.state, l.cause)
			}
		})
		t.Run(l.cause+" for a moment", func(t *testing.T) {
			if l.checks == 1 {
				return // it has an effect by then
			}
			s := newLedgerFixture(t)
			for range 4 { // never in enough consecutive checks
				s.setSample(l.set)
				s.check(l.checks - 1)
				s.setSample(l.unset)
				s.check(1)
			}
			if cs := s.ledger.Conditions(); len(cs) != 0 {
				t.Errorf("conditions: %v", cs)
			}
		})
		t.Run(l.cause+" when it is not reported", func(t *testing.T) {
			s := newLedgerFixture(t)
			s.setSample(l.set)
			s.check(l.checks)
			s.setSample(func(v *health.Sample) { *v = health.Sample{} })
			s.check(20)
			s.expect("not reported", l.state, l.cause)
		})
		t.Run(l.cause+" from the start", func(t *testing.T) {
			s := newUncheckedFixture(t, "580")
			s.setSample(func(v *health.Sample) { v.Fabric, v.LinksUp.Value = health.FabricHealthy, 18 })
			s.check(1)
			s.setSample(l.set)
			s.check(l.checks)
			s.expect("before the first check", l.state, l.cause)
		})
	}
}

// A GPU that does not report a signal does not support it, which is never a fault.
func TestNotReportedIsNoFault(t *testing.T) {
	s := newUncheckedFixture(t, "470.1")
	s.setSample(func(v *health.Sample) { *v = health.Sample{} })
	s.checkFor(30 * time.Minute)
	if cs := s.ledger.Conditions(); len(cs) != 0 {
		t.Errorf("conditions: %v", cs)
	}
}

// Different recovery actions are one condition: the GPU stays unhealthy, and the text is that of the latest
// action.
func TestRecoveryActionChanges(t *testing.T) {
	s := newLedgerFixture(t)
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset })
	s.check(1)
	since := s.ledger.Health(a).Since
	for _, step := range []struct {
		action health.RecoveryAction
		cause  string
	}{
		{health.RecoveryDrainP2P, "RECOVERY_ACTION_DRAIN_P2P"}, {health.RecoveryReboot, "RECOVERY_ACTION_NODE_REBOOT"}, {health.RecoveryOther, "RECOVERY_ACTION_UNKNOWN_ACTION"},
	} {
		s.setSample(func(v *health.Sample) { v.RecoveryAction = step.action })
		s.check(1)
		s.expect("changed", health.Unhealthy, step.cause)
		if h := s.ledger.Health(a); !h.Since.Equal(since) || h.Detail != step.action.String() || h.Action == "" {
			t.Errorf("changed to %q: %+v", step.action, h)
		}
	}
	if n := len(s.ledger.Conditions()); n != 1 {
		t.Errorf("%d conditions", n)
	}
}

// A pending repair of any kind requires a reset.
func TestRecoveryWaitsForRepair(t *testing.T) {
	for code, change := range map[uint64]func(*health.Sample){
		63:  func(v *health.Sample) { v.RemapPending, v.RetirementPending = health.Yes, health.No },
		160: func(v *health.Sample) { v.RepairPending = health.Yes },
		155: func(v *health.Sample) { v.LinksUp.Value = 17 },
	} {
		s := guest(t)
		s.reportXIDs(code)
		s.setSample(change)
		s.checkFor(time.Hour)
		if c := s.condition(fmt.Sprint("XID_", code)); !c.ClearingSince.IsZero() {
			t.Errorf("XID %d recovers: %+v", code, c)
		}
	}
}

// A fabric takes some time to complete. Until then the GPU can't be used, and after FabricTimeout this is a fault.
func TestFabric(t *testing.T) {
	starting := func(v *health.Sample) { v.Fabric = health.FabricStarting }
	up := func(v *health.Sample) { v.Fabric = health.FabricHealthy }
	t.Run("up in time", func(t *testing.T) {
		s := newUncheckedFixture(t, "580")
		s.setSample(starting)
		s.check(1)
		s.expect("not yet", health.Unknown, "FABRIC_STARTING")
		s.checkFor(9 * time.Minute)
		s.expect("not yet", health.Unknown, "FABRIC_STARTING")
		s.setSample(up)
		s.check(1)
		s.expect("up", health.Healthy, "")
	})
	t.Run("too late", func(t *testing.T) {
		s := newUncheckedFixture(t, "580")
		s.setSample(starting)
		s.check(1)
		s.checkFor(10*time.Minute - checkInterval)
		s.expect("in time", health.Unknown, "FABRIC_STARTING")
		s.check(1)
		s.expect("too late", health.Unhealthy, "FABRIC_STARTING")
		s.setSample(up)
		s.check(1)
		s.expectRecovery("up at last", time.Minute)
	})
	t.Run("a GPU of a virtual machine", func(t *testing.T) {
		s := newUncheckedFixture(t, "580")
		delete(s.samples, b.GPU)
		o := health.Observation{At: a, Kind: health.Checked, Sample: healthySample()}
		o.Sample.Fabric = health.FabricStarting
		s.observe(o)
		s.expect("alone it needs none", health.Healthy, "")
		o.Sample.Fabric = health.FabricHealthy
		s.observe(o)
		o.Sample.Fabric = health.FabricStarting
		s.observe(o)
		s.expect("unless it was in one", health.Unknown, "FABRIC_STARTING")
	})
	t.Run("worse and better", func(t *testing.T) {
		s := newLedgerFixture(t)
		for _, step := range []struct {
			fabric health.Fabric
			state  health.State
		}{
			{health.FabricLimited, health.Degraded}, {health.FabricUnhealthy, health.Unhealthy}, {health.FabricLimited, health.Unhealthy}, {health.FabricNotReported, health.Unhealthy},
		} {
			s.setSample(func(v *health.Sample) { v.Fabric = step.fabric })
			s.check(3)
			if h := s.ledger.Health(a); h.State != step.state {
				t.Errorf("fabric %d: %s", step.fabric, h)
			}
		}
		s.setSample(func(v *health.Sample) { v.Fabric = health.FabricLimited })
		s.checkFor(5 * time.Minute)
		s.expect("no longer unhealthy", health.Degraded, "FABRIC_LIMITED")
	})
}

// Links that were never up are not missing; links that were up are.
func TestLinks(t *testing.T) {
	s := newUncheckedFixture(t, "580")
	for _, n := range []uint64{0, 6, 18} {
		s.setSample(func(v *health.Sample) { v.LinksUp.Value = n })
		s.check(5)
		s.expect("coming up", health.Healthy, "")
	}
	s.setSample(func(v *health.Sample) { v.LinksUp.Value = 0 })
	s.check(3)
	s.expect("down", health.Degraded, "NVLINK_DOWN")
}

// An uncorrectable error that no XID reported.
func TestECC(t *testing.T) {
	more := func(v *health.Sample) { v.Uncorrectable.Value++ }
	t.Run("no XID", func(t *testing.T) {
		s := guest(t)
		s.setSample(more)
		s.check(1)
		s.expect("immediately", health.Degraded, "ECC_UNCORRECTABLE")
		s.expectRecovery("quiet", 11*time.Minute)
	})
	t.Run("with a recovery action", func(t *testing.T) {
		s := trusted(t)
		s.setSample(more)
		s.check(1)
		s.expectRecovery("with a recovery action", 90*time.Second)
	})
	t.Run("and again", func(t *testing.T) {
		s := guest(t)
		for range 20 {
			s.setSample(more)
			s.checkFor(time.Minute)
		}
		s.expect("it goes on", health.Degraded, "ECC_UNCORRECTABLE")
		if c := s.condition("ECC_UNCORRECTABLE"); c.Count != 20 {
			t.Errorf("counted %d", c.Count)
		}
	})
	for code, want := range map[uint64]string{95: "XID_95", 94: "XID_94", 48: "XID_48"} {
		s := trusted(t)
		s.reportXIDs(code)
		s.setSample(more)
		s.check(1)
		if cs := s.ledger.Conditions(); len(cs) != 1 || cs[0].Cause() != want {
			t.Errorf("with XID %d: %v", code, cs)
		}
	}
	for _, code := range []uint64{13, 31, 43, 45, 38, 154} {
		s := trusted(t)
		s.reportXIDs(code)
		s.setSample(more)
		s.check(1)
		s.expect("an application's XID is another fault", health.Degraded, "ECC_UNCORRECTABLE")
	}
	for name, change := range map[string]func(*health.Sample){
		"unread": func(v *health.Sample) { v.Uncorrectable = gpu.OptionalUint64{} },
		"reset":  func(v *health.Sample) { v.Uncorrectable.Value = 0 },
		"equal":  func(*health.Sample) {},
	} {
		s := trusted(t)
		s.setSample(change)
		s.check(2)
		s.expect(name, health.Healthy, "")
	}
	s := trusted(t)
	s.setSample(func(v *health.Sample) { v.Uncorrectable = gpu.OptionalUint64{} })
	s.check(1)
	s.setSample(func(v *health.Sample) { v.Uncorrectable = gpu.OptionalUint64{Value: 100, OK: true} })
	s.check(1)
	s.expect("counts from this check on", health.Healthy, "")
}

// A GPU whose first check shows what makes it unhealthy if it persists is not offered before that is known: at the start, and when
// the driver is back. Later such a check has no effect: TestLevels.
func TestUnconfirmedFirstCheck(t *testing.T) {
	for _, l := range levelReasons() {
		if l.state != health.Unhealthy || l.checks == 1 {
			continue
		}
		t.Run(l.cause, func(t *testing.T) {
			s := newUncheckedFixture(t, "580")
			s.setSample(l.set)
			s.check(1)
			s.expect("at the start", health.Unknown, "UNCHECKED")
			first := s.ledger.Health(a)
			if !strings.HasSuffix(first.Detail, ", not confirmed") {
				t.Errorf("%v", first)
			}
			s.check(l.checks - 2)
			if h := s.ledger.Health(a); h != first {
				t.Errorf("was %v, is %v", first, h)
			}
			s.check(1)
			s.expect("confirmed", health.Unhealthy, l.cause)

			s = newLedgerFixture(t)
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverReleased)})
			s.setSample(l.set)
			s.observe(driverAvailable("580.95.05"))
			s.check(1)
			s.expect("after maintenance", health.Unknown, "UNCHECKED")
			s.expectAt("its neighbour", b, health.Healthy, "")
			s.setSample(l.unset)
			s.check(1)
			s.expect("not confirmed", health.Healthy, "")
			s.setSample(l.set)
			s.check(l.checks - 1)
			s.expect("later", health.Healthy, "")
		})
	}
}
