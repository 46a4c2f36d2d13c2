package core_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

func TestOverrides(t *testing.T) {
	all := func(e xid.Effect) *xid.Effect { return &e }
	for _, tc := range []struct {
		name  string
		xids  map[uint64]xid.Effect
		rest  *xid.Effect
		code  uint64
		want  health.State
		over  time.Duration // with a recovery action
		guest time.Duration // without
	}{
		{"ignore a reset", map[uint64]xid.Effect{95: xid.None}, nil, 95, health.Healthy, 0, 0},
		{"degraded at most", map[uint64]xid.Effect{95: xid.Degrades}, nil, 95, health.Degraded, 90 * time.Second, never},
		{"an application's withdraws", map[uint64]xid.Effect{13: xid.Withdraws}, nil, 13, health.Unhealthy, 90 * time.Second, never},
		{"an application's degrades", map[uint64]xid.Effect{13: xid.Degrades}, nil, 13, health.Degraded, 90 * time.Second, 660 * time.Second},
		{"an unknown one withdraws", map[uint64]xid.Effect{500: xid.Withdraws}, nil, 500, health.Unhealthy, 90 * time.Second, never},
		{"a contained one withdraws", map[uint64]xid.Effect{92: xid.Withdraws}, nil, 92, health.Unhealthy, never, never},
		{"lost", map[uint64]xid.Effect{119: xid.Loses}, nil, 119, health.GPULost, never, never},
		{"all are ignored", nil, all(xid.None), 79, health.Healthy, 0, 0},
		{"all withdraw", nil, all(xid.Withdraws), 31, health.Unhealthy, 90 * time.Second, never},
		{"all but one are ignored", map[uint64]xid.Effect{79: xid.Withdraws}, all(xid.None), 79, health.Unhealthy, 90 * time.Second, never},
		{"all but one withdraw", map[uint64]xid.Effect{31: xid.None}, all(xid.Withdraws), 31, health.Healthy, 0, 0},
		{"another code", map[uint64]xid.Effect{94: xid.None}, nil, 95, health.Unhealthy, 90 * time.Second, never},
	} {
		for action, over := range map[health.RecoveryAction]time.Duration{health.RecoveryNone: tc.over, health.RecoveryUnknown: tc.guest} {
			t.Run(tc.name+" with "+action.String(), func(t *testing.T) {
				s := newUncheckedFixture(t, "580", func(p *health.Policy) { p.XIDs, p.AllXIDs = tc.xids, tc.rest })
				s.setSample(func(v *health.Sample) { v.RecoveryAction = action })
				s.check(1)
				s.reportXIDs(tc.code)
				if h := s.ledger.Health(a); h.State != tc.want {
					t.Errorf("immediately %s, want %s", h, tc.want)
				}
				if tc.want > health.Healthy {
					s.expectRecovery("untouched", over)
				}
			})
		}
	}
}

// An overridden code does not escalate, and the recovery action still applies to it.
func TestOverrideDisablesEscalation(t *testing.T) {
	p := func(p *health.Policy) { p.XIDs = map[uint64]xid.Effect{109: xid.Degrades, 95: xid.None} }
	s := newUncheckedFixture(t, "580", p)
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })
	s.check(1)
	s.reportXIDs(109, 109, 109)
	s.expect("three times 109", health.Degraded, "XID_109")
	s = newLedgerFixture(t, p)
	s.reportXIDs(95)
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset })
	s.check(1)
	s.expect("with a recovery action", health.Unhealthy, "RECOVERY_ACTION_GPU_RESET")
	if n := s.history().FaultCounts[0].Count; n != 1 {
		t.Errorf("an ignored XID is counted %d times", n)
	}
}

func TestDegradedTakesNoWork(t *testing.T) {
	strict := func(p *health.Policy) { p.DegradedTakesNoWork = true }
	for cause, happen := range map[string]func(*ledgerFixture){
		"XID_94": func(s *ledgerFixture) { s.reportXIDs(94) },
		"ROW_REMAP_PENDING": func(s *ledgerFixture) {
			s.setSample(func(v *health.Sample) { v.RemapPending = health.Yes })
			s.check(2)
		},
		"ECC_UNCORRECTABLE": func(s *ledgerFixture) {
			s.setSample(func(v *health.Sample) { v.Uncorrectable.Value++ })
			s.check(1)
		},
		"OPERATIONAL_EVENT": func(s *ledgerFixture) {
			s.observe(operationalEvent(health.OperationalEvent{Severity: health.SeverityFatal}))
		},
		"WORKLOADS_FAILING": func(s *ledgerFixture) {
			for range 3 {
				s.observe(health.Observation{At: a, Kind: health.Reserved}, xidEvent(a, 13))
			}
		},
	} {
		s := newLedgerFixture(t, strict)
		happen(s)
		s.expect("degraded takes no work", health.Unhealthy, cause)
	}
}

// Only an operator clears an unhealthy GPU; a degraded one recovers by evidence.
func TestManual(t *testing.T) {
	manual := func(p *health.Policy) { p.ManualRecovery = true }
	s := newLedgerFixture(t, manual)
	s.reportXIDs(95)
	s.reset()
	s.expectRecovery("after a reset", never)
	if h := s.ledger.Health(a); h.Clears != xid.Evidence(0).String() {
		t.Errorf("clears: %s", h.Clears)
	}
	if _, _, err := s.ledger.Clear(s.policy, s.now, health.Command{GPU: a.GPU}); err != nil {
		t.Error(err)
	}
	s = newLedgerFixture(t, manual)
	s.reportXIDs(94)
	s.expectRecovery("degraded", 90*time.Second)
	s = newLedgerFixture(t, manual)
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryDrainAndReset })
	s.check(1)
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryNone })
	s.expectRecovery("recovery action None", never)
	if h := s.ledger.Health(a); h.Clears != xid.Evidence(0).String() {
		t.Errorf("clears: %s", h.Clears)
	}
}

// A reboot does not clear an unhealthy GPU either, but it clears a degraded one.
func TestManualReboot(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(1))
	l.cfg.Health.ManualRecovery = true
	l.observe(xidEvent(gpuAt(0), 95), xidEvent(gpuAt(0), 94))
	l.restart("boot 1", "boot 2")
	if cs := l.state.Ledger.Conditions(); len(cs) != 1 || cs[0].Code != 95 {
		t.Errorf("conditions: %v", cs)
	}
}

// ModeOff evaluates only whether GPUs respond, and drops no condition.
func TestModeOff(t *testing.T) {
	off := core.DefaultConfig()
	off.Health.Mode = health.ModeOff
	s := newLedgerFixture(t)
	s.reportXIDs(95)
	s.policy.Mode = health.ModeOff
	s.reportXIDs(79, 13)
	s.observe(health.Observation{At: a, Kind: health.Event, Code: 0x2000})
	s.setSample(func(v *health.Sample) {
		v.RecoveryAction, v.RemapFailed, v.Uncorrectable.Value = health.RecoveryReset, health.Yes, 9
	})
	s.check(5)
	if cs := s.ledger.Conditions(); len(cs) != 1 || cs[0].Cause() != "XID_95" {
		t.Errorf("conditions: %v", cs)
	}
	machine := gpu.NewSnapshot(gpu.Snapshot{Devices: []gpu.Device{{ID: a.GPU, At: a}}})
	offered := func() health.Health {
		u, _ := core.Build(machine, s.ledger, off).Unit(inventory.UnitID(a.GPU))
		return u.Health
	}
	if h := offered(); h.State != health.Healthy {
		t.Errorf("an earlier XID has an effect: %s", h)
	}
	for _, tc := range []struct {
		kind   health.ObservationKind
		checks int
		want   string
	}{{health.Lost, 1, "LOST"}, {health.ProbeFailed, 3, "PROBE_FAILED"}, {health.Unresponsive, 1, "NOT_ANSWERING"}} {
		before := *s
		s.failing = map[gpu.DeviceID]health.ObservationKind{a.GPU: tc.kind}
		s.check(tc.checks)
		if h := offered(); h.Cause() != tc.want || h.Schedulable() {
			t.Errorf("%s, want %s", h, tc.want)
		}
		*s = before
	}
	s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Detail: "gone"})
	if h := offered(); h.Cause() != "NVML_UNAVAILABLE" {
		t.Errorf("without a driver: %s", h)
	}
	s.observe(driverAvailable("580"))
	s.policy.Mode = health.ModeEnforce
	s.check(1)
	s.expect("enforced again", health.Unhealthy, "XID_95")
	if c := s.condition("RECOVERY_ACTION_GPU_RESET"); c.State != health.Unhealthy {
		t.Errorf("the recovery action is %s", c)
	}
}

// ModeObserve reports everything, and every unit takes work.
func TestModeObserve(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Health.Mode = health.ModeObserve
	machine := coretest.GPUs(2)
	state := core.NewState(cfg).Read(cfg, testStart, machine, healthyChecks(machine)...)
	state = state.Observe(cfg, testStart, xidEvent(gpu.WholeGPU(coretest.GPU(0)), 95), xidEvent(gpu.WholeGPU(coretest.GPU(1)), 94))
	one, _ := state.Allocatable.Unit(inventory.UnitID(coretest.GPU(0)))
	if h := one.Health; h.State != health.Unhealthy || !h.Schedulable() || !strings.HasPrefix(h.String(), "observed, not enforced: unhealthy: XID 95") {
		t.Error(h)
	}
	two, _ := state.Allocatable.Unit(inventory.UnitID(coretest.GPU(1)))
	if h := two.Health; h.State != health.Degraded || h.Advisory {
		t.Errorf("degraded takes work anyway: %s", h)
	}
}

// All problems are reported, each with a remedy.
func TestConfigProblems(t *testing.T) {
	if err := core.DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	err := core.Config{Config: inventory.Config{MIG: "some"}, Health: health.Policy{Mode: "strict"}}.Validate()
	for _, key := range []string{
		"mig strategy", "rescan", "probe", "health mode", "call deadline", "settle", "dwell", "longest dwell", "quiet", "forget",
		"probe failures", "clean checks", "recoveries a day",
	} {
		if err == nil || !strings.Contains(err.Error(), key+" = ") {
			t.Errorf("%s is not in the error: %v", key, err)
		}
	}
	if _, ok := errors.AsType[*setting.Error](err); !ok {
		t.Errorf("%T", err)
	}
}
