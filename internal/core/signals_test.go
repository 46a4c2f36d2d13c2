package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// level is a persistent state that is a fault as long as it is present.
type level struct {
	cause  string
	state  core.HealthState
	checks int // consecutive checks that must show it before it has an effect
	set    func(*core.HealthSample)
	unset  func(*core.HealthSample)
	over   time.Duration // from the first check without it until a is healthy
}

func levelReasons() []level {
	action := func(v core.RecoveryAction) func(*core.HealthSample) {
		return func(o *core.HealthSample) { o.RecoveryAction = v }
	}
	fabric := func(f core.Fabric) func(*core.HealthSample) { return func(o *core.HealthSample) { o.Fabric = f } }
	return []level{
		{"VERDICT_GPU_RESET", core.Unhealthy, 1, action(core.RecoveryReset), action(core.RecoveryNone), time.Minute},
		{"VERDICT_NODE_REBOOT", core.Unhealthy, 1, action(core.RecoveryReboot), action(core.RecoveryNone), time.Minute},
		{"VERDICT_DRAIN_AND_RESET", core.Unhealthy, 1, action(core.RecoveryDrainAndReset), action(core.RecoveryNone), time.Minute},
		{"VERDICT_UNKNOWN_ACTION", core.Unhealthy, 1, action(core.RecoveryOther), action(core.RecoveryNone), time.Minute},
		{"VERDICT_DRAIN_P2P", core.Unhealthy, 2, action(core.RecoveryDrainP2P), action(core.RecoveryNone), time.Minute},
		{"VERDICT_RECOVER_IMEX_DOMAIN", core.Unhealthy, 2, action(core.RecoveryIMEX), action(core.RecoveryNone), time.Minute},
		{"ROW_REMAP_FAILED", core.Unhealthy, 2, func(v *core.HealthSample) { v.RemapFailed = core.Yes }, func(v *core.HealthSample) { v.RemapFailed = core.No }, never},
		{"MEMORY_UNREPAIRABLE", core.Unhealthy, 2, func(v *core.HealthSample) { v.Unrepairable = core.Yes }, func(v *core.HealthSample) { v.Unrepairable = core.No }, never},
		{"SRAM_THRESHOLD", core.Unhealthy, 2, func(v *core.HealthSample) { v.SRAMThreshold = core.Yes }, func(v *core.HealthSample) { v.SRAMThreshold = core.No }, never},
		{"ROW_REMAP_PENDING", core.Degraded, 2, func(v *core.HealthSample) { v.RemapPending = core.Yes }, func(v *core.HealthSample) { v.RemapPending = core.No }, time.Minute},
		{"PAGE_RETIREMENT_PENDING", core.Degraded, 2, func(v *core.HealthSample) { v.RetirementPending = core.Yes }, func(v *core.HealthSample) { v.RetirementPending = core.No }, time.Minute},
		{"REPAIR_PENDING", core.Degraded, 2, func(v *core.HealthSample) { v.RepairPending = core.Yes }, func(v *core.HealthSample) { v.RepairPending = core.No }, time.Minute},
		{"INFOROM_CORRUPT", core.Degraded, 1, func(v *core.HealthSample) { v.InfoROMCorrupt = core.Yes }, func(v *core.HealthSample) { v.InfoROMCorrupt = core.No }, time.Minute},
		{"FABRIC_STARTING", core.Unknown, 1, fabric(core.FabricStarting), fabric(core.FabricHealthy), 0},
		{"FABRIC_UNHEALTHY", core.Unhealthy, 3, fabric(core.FabricUnhealthy), fabric(core.FabricHealthy), time.Minute},
		{"FABRIC_UNHEALTHY", core.Unhealthy, 3, fabric(core.FabricMisconfigured), fabric(core.FabricHealthy), time.Minute},
		{"FABRIC_LIMITED", core.Degraded, 3, fabric(core.FabricLimited), fabric(core.FabricHealthy), time.Minute},
		{"NVLINK_DOWN", core.Degraded, 3, func(v *core.HealthSample) { v.LinksUp.Value = 17 }, func(v *core.HealthSample) { v.LinksUp.Value = 18 }, time.Minute},
		{"PCIE_WIDTH", core.Degraded, 3, func(v *core.HealthSample) { v.Busy, v.PCIeWidth = true, 8 }, func(v *core.HealthSample) { v.PCIeWidth = 16 }, time.Minute},
	}
}

func TestLevels(t *testing.T) {
	for _, l := range levelReasons() {
		t.Run(l.cause, func(t *testing.T) {
			s := newLedgerFixture(t)
			s.setSample(l.set)
			for range l.checks - 1 {
				s.check(1)
				s.expect("too early", core.Healthy, "")
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
			s.expectRecovery("once gone", l.over)
			if l.over == never && l.state == core.Unhealthy { // only an operator clears it
				s.setSample(func(v *core.HealthSample) { *v = core.HealthSample{} })
				s.reset()
				s.expect("whatever comes", l.state, l.cause)
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
				t.Errorf("not forgotten: %v", cs)
			}
		})
		t.Run(l.cause+" when it is not reported", func(t *testing.T) {
			s := newLedgerFixture(t)
			s.setSample(l.set)
			s.check(l.checks)
			s.setSample(func(v *core.HealthSample) { *v = core.HealthSample{} })
			s.check(20)
			s.expect("no report is no evidence", l.state, l.cause)
		})
		t.Run(l.cause+" from the start", func(t *testing.T) {
			s := newUncheckedFixture(t, "580")
			s.setSample(func(v *core.HealthSample) { v.Fabric, v.LinksUp.Value = core.FabricHealthy, 18 })
			s.check(1)
			s.setSample(l.set)
			s.check(l.checks)
			s.expect("a fault of before the agent", l.state, l.cause)
		})
	}
}

// A GPU that does not report a signal does not support it, which is never a fault.
func TestNotReportedIsNoFault(t *testing.T) {
	s := newUncheckedFixture(t, "470.1")
	s.setSample(func(v *core.HealthSample) { *v = core.HealthSample{} })
	s.checkFor(30 * time.Minute)
	if cs := s.ledger.Conditions(); len(cs) != 0 {
		t.Errorf("conditions: %v", cs)
	}
}

// Different recovery actions are one condition: the GPU stays unhealthy, and the text is that of the latest
// action.
func TestRecoveryActionChanges(t *testing.T) {
	s := newLedgerFixture(t)
	s.setSample(func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReset })
	s.check(1)
	since := s.ledger.Health(a).Since
	for _, step := range []struct {
		action core.RecoveryAction
		cause  string
	}{
		{core.RecoveryDrainP2P, "VERDICT_DRAIN_P2P"}, {core.RecoveryReboot, "VERDICT_NODE_REBOOT"}, {core.RecoveryOther, "VERDICT_UNKNOWN_ACTION"},
	} {
		s.setSample(func(v *core.HealthSample) { v.RecoveryAction = step.action })
		s.check(1)
		s.expect("changed", core.Unhealthy, step.cause)
		if h := s.ledger.Health(a); !h.Since.Equal(since) || h.Detail != step.action.String() || h.Action == "" {
			t.Errorf("changed to %q: %+v", step.action, h)
		}
	}
	if n := len(s.ledger.Conditions()); n != 1 {
		t.Errorf("%d conditions", n)
	}
}

// A fabric takes some time to complete. Until then the GPU can't be used, and after FabricGrace this is a fault.
func TestFabric(t *testing.T) {
	starting := func(v *core.HealthSample) { v.Fabric = core.FabricStarting }
	well := func(v *core.HealthSample) { v.Fabric = core.FabricHealthy }
	t.Run("up in time", func(t *testing.T) {
		s := newUncheckedFixture(t, "580")
		s.setSample(starting)
		s.check(1)
		s.expect("not yet", core.Unknown, "FABRIC_STARTING")
		s.checkFor(9 * time.Minute)
		s.expect("not yet", core.Unknown, "FABRIC_STARTING")
		s.setSample(well)
		s.check(1)
		s.expect("up", core.Healthy, "")
	})
	t.Run("too late", func(t *testing.T) {
		s := newUncheckedFixture(t, "580")
		s.setSample(starting)
		s.check(1)
		s.checkFor(10*time.Minute - checkInterval)
		s.expect("in time", core.Unknown, "FABRIC_STARTING")
		s.check(1)
		s.expect("too late", core.Unhealthy, "FABRIC_STARTING")
		s.setSample(well)
		s.check(1)
		s.expectRecovery("up at last", time.Minute)
	})
	t.Run("a GPU of a virtual machine", func(t *testing.T) {
		s := newUncheckedFixture(t, "580")
		delete(s.samples, b.GPU)
		o := core.Observation{At: a, Kind: core.Checked, Sample: healthySample()}
		o.Sample.Fabric = core.FabricStarting
		s.observe(o)
		s.expect("alone it needs none", core.Healthy, "")
		o.Sample.Fabric = core.FabricHealthy
		s.observe(o)
		o.Sample.Fabric = core.FabricStarting
		s.observe(o)
		s.expect("unless it was in one", core.Unknown, "FABRIC_STARTING")
	})
	t.Run("worse and better", func(t *testing.T) {
		s := newLedgerFixture(t)
		for _, step := range []struct {
			fabric core.Fabric
			state  core.HealthState
		}{
			{core.FabricLimited, core.Degraded}, {core.FabricUnhealthy, core.Unhealthy}, {core.FabricLimited, core.Unhealthy}, {core.FabricNotReported, core.Unhealthy},
		} {
			s.setSample(func(v *core.HealthSample) { v.Fabric = step.fabric })
			s.check(3)
			if h := s.ledger.Health(a); h.State != step.state {
				t.Errorf("fabric %d: %s", step.fabric, h)
			}
		}
		s.setSample(func(v *core.HealthSample) { v.Fabric = core.FabricLimited })
		s.checkFor(5 * time.Minute)
		s.expect("no longer unhealthy", core.Degraded, "FABRIC_LIMITED")
	})
}

// Links that were never up are not missing. Links that were up are, also after a restart of the agent.
func TestLinks(t *testing.T) {
	s := newUncheckedFixture(t, "580")
	for _, n := range []uint64{0, 6, 18} {
		s.setSample(func(v *core.HealthSample) { v.LinksUp.Value = n })
		s.check(5)
		s.expect("coming up", core.Healthy, "")
	}
	s.setSample(func(v *core.HealthSample) { v.LinksUp.Value = 0 })
	s.check(3)
	s.expect("down", core.Degraded, "NVLINK_DOWN")
}

// An uncorrectable error that no XID reported.
func TestECC(t *testing.T) {
	more := func(v *core.HealthSample) { v.Uncorrectable.Value++ }
	t.Run("no XID", func(t *testing.T) {
		s := guest(t)
		s.setSample(more)
		s.check(1)
		s.expect("immediately", core.Degraded, "ECC_UNCORRECTABLE")
		s.expectRecovery("quiet", 11*time.Minute)
	})
	t.Run("the driver is content", func(t *testing.T) {
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
		s.expect("it goes on", core.Degraded, "ECC_UNCORRECTABLE")
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
			t.Errorf("XID %d explains it: %v", code, cs)
		}
	}
	for _, code := range []uint64{13, 31, 43, 45, 38, 154} {
		s := trusted(t)
		s.reportXIDs(code)
		s.setSample(more)
		s.check(1)
		s.expect("an application's XID explains nothing", core.Degraded, "ECC_UNCORRECTABLE")
	}
	for name, change := range map[string]func(*core.HealthSample){
		"unread":  func(v *core.HealthSample) { v.Uncorrectable = core.OptionalUint64{} },
		"reset":   func(v *core.HealthSample) { v.Uncorrectable.Value = 0 },
		"no news": func(*core.HealthSample) {},
	} {
		s := trusted(t)
		s.setSample(change)
		s.check(2)
		s.expect(name, core.Healthy, "")
	}
	s := trusted(t)
	s.setSample(func(v *core.HealthSample) { v.Uncorrectable = core.OptionalUint64{} })
	s.check(1)
	s.setSample(func(v *core.HealthSample) { v.Uncorrectable = core.OptionalUint64{Value: 100, OK: true} })
	s.check(1)
	s.expect("counts from this check on", core.Healthy, "")
}
