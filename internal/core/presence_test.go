package core_test

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// checkAs checks n times, with kind as what is observed of a.
func (s *ledgerFixture) checkAs(kind health.ObservationKind, n int) {
	if s.failing[a.GPU] = kind; kind == health.Checked {
		delete(s.failing, a.GPU)
	}
	s.check(n)
}

// A lost GPU that responds again is unhealthy first, then it recovers as any other.
func TestLostGPUResponds(t *testing.T) {
	s := newLedgerFixture(t)
	s.checkAs(health.Lost, 1)
	s.expect("immediately", health.GPULost, "LOST")
	s.checkFor(time.Hour)
	s.expect("for an hour", health.GPULost, "LOST")
	s.checkAs(health.Checked, 2)
	s.expect("after two checks", health.GPULost, "LOST")
	s.check(1)
	s.expect("after three checks", health.Unhealthy, "LOST")
	if text := s.ledger.Health(a).String(); !strings.HasPrefix(text, "unhealthy: GPU was lost") {
		t.Error(text)
	}
	s.expectRecovery("since it passed its checks", time.Minute)
}

// A lost GPU that responds again was reset.
func TestLostGPUWasReset(t *testing.T) {
	s := guest(t)
	s.reportXIDs(79, 119)
	s.expect("fallen off the bus", health.GPULost, "XID_79")
	s.checkAs(health.Lost, 6)
	s.expect("fallen off the bus", health.GPULost, "XID_79")
	s.setSample(func(v *health.Sample) { v.Energy.Value = 100 })
	s.checkAs(health.Checked, 3)
	s.expect("back", health.Unhealthy, "XID_79")
	s.expectRecovery("since then", time.Minute)
}

// A GPU that is lost again is a new occurrence, also for existing conditions.
func TestLostAgain(t *testing.T) {
	s := newLedgerFixture(t)
	s.checkAs(health.Lost, 3)
	for range 3 {
		s.checkAs(health.Checked, 5)
		s.expect("back", health.Unhealthy, "LOST")
		s.checkAs(health.Lost, 1)
		s.expect("lost again", health.GPULost, "LOST")
	}
	if c := s.condition("LOST"); !c.Last.Equal(s.now) {
		t.Errorf("it was lost again at %v, not at %v", s.now, c.Last)
	}
}

// A GPU that responds again stays so when a check is slow or incomplete.
func TestSlowAfterLoss(t *testing.T) {
	s := newLedgerFixture(t)
	s.checkAs(health.Lost, 1)
	s.checkAs(health.Checked, 3)
	s.expect("back", health.Unhealthy, "LOST")
	s.checkAs(health.CallPending, 3)
	s.expect("slow", health.Unhealthy, "LOST")
	delete(s.failing, a.GPU)
	s.setSample(func(v *health.Sample) { v.Partial = true })
	s.check(3)
	s.expect("incomplete", health.Unhealthy, "LOST")
}

// XID 79 may be in the kernel log while the GPU still seems to respond.
func TestXID79WhileGPUResponds(t *testing.T) {
	s := newLedgerFixture(t)
	s.reportXIDs(79)
	s.check(2)
	s.expect("samples may be old", health.GPULost, "XID_79")
	s.check(1)
	s.expect("after three checks", health.Unhealthy, "XID_79")
}

func TestProbeFailures(t *testing.T) {
	for _, n := range []int{1, 3, 5} {
		s := newLedgerFixture(t, func(p *health.Policy) { p.ProbeFailures = n })
		for range 4 { // never consecutive
			s.checkAs(health.ProbeFailed, n-1)
			s.expect("too few", health.Healthy, "")
			s.checkAs(health.Checked, 1)
		}
		if cs := s.ledger.Conditions(); len(cs) != 0 {
			t.Errorf("conditions after a check: %v", cs)
		}
		s.checkAs(health.ProbeFailed, n)
		s.expect("in a row", health.Unhealthy, "PROBE_FAILED")
		s.checkAs(health.Checked, 1)
		s.expect("one check", health.Unhealthy, "PROBE_FAILED")
		s.expectRecovery("after the check", time.Minute)
	}
}

// A call that does not return is waited for briefly. It results in a condition when it is overdue.
func TestHang(t *testing.T) {
	s := newLedgerFixture(t)
	s.reportXIDs(119)
	s.failing[a.GPU] = health.CallPending
	s.checkFor(50 * time.Second)
	s.expect("slow calls are no fault", health.Unhealthy, "XID_119")
	overdue := health.Observation{At: a, Kind: health.Unresponsive, Detail: "nvmlDeviceGetFieldValues"}
	s.observe(overdue)
	s.condition("NOT_ANSWERING")
	for range 120 {
		s.wait(500 * time.Millisecond)
		s.observe(overdue)
	}
	if cs := s.ledger.Conditions(); len(cs) != 2 {
		t.Errorf("conditions: %v", cs)
	}
	delete(s.failing, a.GPU)
	s.checkFor(3 * time.Minute)
	s.expect("the call returned, the fault stays", health.Unhealthy, "XID_119")
	if cs := s.ledger.Conditions(); len(cs) != 1 {
		t.Errorf("conditions: %v", cs)
	}
}

// A hang of one GPU affects only that GPU. A hang of the driver makes the health of all GPUs unknown.
func TestHangOfTheDriver(t *testing.T) {
	s := newLedgerFixture(t)
	s.observe(health.Observation{At: gpu.Node, Kind: health.Unresponsive, Detail: "nvmlInit"})
	for _, at := range []gpu.Placement{a, b, ci(1, 0)} {
		s.expectAt("the driver hangs", at, health.Unknown, "NOT_ANSWERING")
	}
	s.observe(driverAvailable("580"))
	s.expect("it responds", health.Healthy, "")
}

// Slow checks delay a recovery, but do not restart it. A GPU that was never checked is not healthy.
func TestUnchecked(t *testing.T) {
	s := newUncheckedFixture(t, "580")
	s.checkAs(health.CallPending, 1)
	s.expect("never checked", health.Unknown, "UNCHECKED")
	s.checkFor(10 * time.Minute)
	s.expect("never checked", health.Unknown, "UNCHECKED")
	delete(s.failing, a.GPU)
	s.setSample(func(v *health.Sample) { v.Partial = true })
	s.check(3)
	s.expect("incomplete", health.Unknown, "UNCHECKED")
	s.setSample(func(v *health.Sample) { v.Partial = false })
	s.check(1)
	s.expect("first complete check", health.Healthy, "")
	s.failing[a.GPU] = health.CallPending
	s.checkFor(10 * time.Minute)
	s.expect("slow later", health.Healthy, "")
	s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Detail: "gone"})
	s.observe(driverAvailable("580"))
	s.check(1)
	s.expect("slow after the driver was away", health.Unknown, "UNCHECKED")
}

// A driver that is unavailable changes no condition of a GPU.
func TestDriverUnavailable(t *testing.T) {
	s := newLedgerFixture(t)
	s.reportXIDs(95)
	s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Detail: "versions differ"})
	s.expectAt("the neighbour", b, health.Unknown, "NVML_UNAVAILABLE")
	s.expectAt("the unhealthy GPU", a, health.Unhealthy, "XID_95")
	began := s.condition("XID_95")
	s.wait(24 * time.Hour)
	if c := s.condition("XID_95"); c != began {
		t.Errorf("time alone made it %+v", c)
	}
	s.observe(driverAvailable("580"))
	s.check(1)
	s.expect("the driver is back", health.Unhealthy, "XID_95")
}

// A GPU that hangs may be partitioned again meanwhile: its instances are not offered before they were read.
func TestInstancesAfterHang(t *testing.T) {
	l := newRestartFixture(t, migMachine())
	at := gpu.WholeGPU("GPU-m")
	l.observe(health.Observation{At: at, Kind: health.Unresponsive, Detail: "nvmlDeviceGetUUID"})
	hung := map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", "MIG-1": "unhealthy NOT_ANSWERING", "MIG-2": "unhealthy NOT_ANSWERING"}
	l.expect("while it hangs", hung)
	l.observe(health.Observation{At: at, Kind: health.Checked, Sample: *l.samples[at.GPU]})
	l.now = l.now.Add(10 * time.Minute)
	l.observe(health.Observation{At: at, Kind: health.Checked, Sample: *l.samples[at.GPU]})
	l.expect("it responds, its instances were not read", hung)
	l.host = without(l.host, "MIG-1")
	l.read(2)
	l.now = l.now.Add(time.Minute)
	l.read(1)
	l.expect("it was read", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", "MIG-2": "healthy "})
	if cs := l.state.Ledger.Conditions(); len(cs) != 0 {
		t.Errorf("left: %v", cs)
	}
}

// During maintenance no unit takes work, in any health mode.
func TestMaintenance(t *testing.T) {
	for _, mode := range []health.Mode{health.ModeEnforce, health.ModeObserve, health.ModeOff} {
		t.Run(string(mode), func(t *testing.T) {
			l := newRestartFixture(t, coretest.GPUs(2))
			l.cfg.Health.Mode = mode
			l.read(1)
			l.state = l.state.EnterMaintenance(l.cfg, l.now, health.Maintenance{Since: l.now})
			for u := range l.state.Allocatable.Units() {
				if u.Health.Schedulable() || u.Health.Cause() != "MAINTENANCE" {
					t.Errorf("%s: %s", u.ID, u.Health)
				}
			}
			if d := l.state.Allocatable.Driver(); d.State != gpu.DriverReleased || !strings.Contains(d.Reason, "released") {
				t.Errorf("driver: %+v", d)
			}
			if _, err := l.state.Allocatable.Reserve(inventory.UnitID(coretest.GPU(0))); err == nil {
				t.Error("a unit was reserved")
			}
			l.state = l.state.ExitMaintenance()
			l.read(1)
			for u := range l.state.Allocatable.Units() {
				if u.Health.State != health.Healthy {
					t.Errorf("afterwards %s: %s", u.ID, u.Health)
				}
			}
		})
	}
}

// Conditions from before maintenance remain, unless there is evidence for recovery.
func TestMaintenanceKeepsConditions(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(xidEvent(gpuAt(0), 95))
	l.samples[coretest.GPU(0)].RecoveryAction = health.RecoveryUnknown
	l.state = l.state.EnterMaintenance(l.cfg, l.now, health.Maintenance{Since: l.now})
	l.state = l.state.ExitMaintenance()
	l.read(20)
	l.expect("afterwards", map[gpu.DeviceID]string{coretest.GPU(0): "unhealthy XID_95", coretest.GPU(1): "healthy "})
}

func TestMaintenanceOverRestartAndReboot(t *testing.T) {
	for next, want := range map[string]bool{"one": true, "two": false} {
		l := newRestartFixture(t, coretest.GPUs(1))
		away := health.Maintenance{Since: l.now.UTC(), Until: l.now.Add(time.Hour).UTC()}
		l.state = l.state.EnterMaintenance(l.cfg, l.now, away)
		l.restart("one", next)
		if got := l.state.Maintenance.Active(l.now); got != want {
			t.Errorf("boot %s: maintenance %v", next, l.state.Maintenance)
		}
		if want && (l.state.Maintenance != away || l.state.Maintenance.Active(away.Until)) {
			t.Errorf("maintenance: %v, want %v and no longer", l.state.Maintenance, away)
		}
	}
}

// A driver of another version requires a new process of the agent, which detects that the driver was loaded again.
func TestDriverVersionChangedOverRestart(t *testing.T) {
	for version, want := range map[string]string{"580.95.05": "unhealthy XID_119", "590.1": "healthy "} {
		l := newRestartFixture(t, coretest.GPUs(1))
		l.host.Driver.Version = "580.95.05"
		l.read(1)
		l.observe(xidEvent(gpuAt(0), 119))
		l.restart("boot", "boot")
		l.host.Driver.Version = version
		l.read(200)
		l.expect("driver "+version, map[gpu.DeviceID]string{coretest.GPU(0): want})
	}
}

// A GPU that one reading does not list was not reset: its faults stay. Its energy counter shows that, and without one the time.
func TestGPUMissingOnceWasNotReset(t *testing.T) {
	for name, c := range map[string]struct {
		checks  int    // in which it is lost
		energy  uint64 // after that; 0 = no such counter
		cleared bool
	}{
		"one reading":                            {1, 5_000_100, false},
		"many readings":                          {60, 5_600_000, false},
		"reset":                                  {6, 100, true},
		"one reading, without a counter":         {1, 0, false},
		"many readings, without a counter":       {60, 0, true},
		"reset in one reading, with the counter": {1, 100, true},
	} {
		s := guest(t)
		set := func(energy uint64) {
			s.setSample(func(v *health.Sample) {
				v.Energy.Value, v.Energy.OK = energy, c.energy > 0
			})
		}
		set(5_000_000)
		s.check(1)
		s.reportXIDs(119)
		s.checkAs(health.Lost, c.checks)
		set(c.energy)
		s.checkAs(health.Checked, 1)
		s.checkFor(time.Hour)
		if cleared := s.ledger.Health(a).State == health.Healthy; cleared != c.cleared {
			t.Errorf("%s: %s", name, s.ledger.Health(a))
		}
	}
}

// One count of NVLinks that is too high is no new maximum: the right count is not too low after it.
func TestNVLinksCountedTooHighOnce(t *testing.T) {
	s := newLedgerFixture(t)
	links := func(n uint64) {
		s.setSample(func(v *health.Sample) { v.LinksUp = gpu.OptionalUint64Of(n) })
		s.check(1)
	}
	links(18)
	links(18)
	links(24)
	links(18)
	s.check(3)
	s.expect("after one count of 24", health.Healthy, "")
	links(16)
	s.check(3)
	s.expect("two links less", health.Degraded, "NVLINK_DOWN")
}

// A GPU that responds again before the agent ends was not lost when the next one starts, and an energy counter that one
// check does not read is no sign of a reset.
func TestRespondingGPUWasNotReset(t *testing.T) {
	s := guest(t)
	s.setSample(func(v *health.Sample) { v.Energy = gpu.OptionalUint64{} })
	s.check(1)
	s.reportXIDs(119)
	s.checkAs(health.Lost, 1)
	s.checkAs(health.Checked, 3)
	s.wait(2 * time.Minute)
	s.ledger = health.Restore(s.policy, s.ledger.Checkpoint(), false)
	s.check(1)
	if h := s.history(); !h.LastReset.IsZero() {
		t.Errorf("reset at %v by a restart of the agent", h.LastReset)
	}

	s = guest(t)
	s.reportXIDs(119)
	s.checkAs(health.Lost, 20)
	s.setSample(func(v *health.Sample) { v.Energy, v.Partial = gpu.OptionalUint64{}, true })
	s.checkAs(health.Checked, 1)
	if h := s.history(); !h.LastReset.IsZero() {
		t.Errorf("reset at %v by a partial check", h.LastReset)
	}
}
