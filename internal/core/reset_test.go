package core_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// resetSign is a change of a sample that may show a reset.
type resetSign struct {
	name   string
	before func(*core.HealthSample) // the sample until then; nil = healthySample
	after  func(*core.HealthSample)
}

var strong = []resetSign{
	{"reset wanted, then nothing", func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReset }, func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryNone }},
	{"drain and reset wanted, then nothing", func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryDrainAndReset }, func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryNone }},
	{"a row remap no longer pending", func(v *core.HealthSample) { v.RemapPending = core.Yes }, func(v *core.HealthSample) { v.RemapPending = core.No }},
	{"a page retirement no longer pending", func(v *core.HealthSample) { v.RetirementPending = core.Yes }, func(v *core.HealthSample) { v.RetirementPending = core.No }},
	{"a repair no longer pending", func(v *core.HealthSample) { v.RepairPending = core.Yes }, func(v *core.HealthSample) { v.RepairPending = core.No }},
}

var weak = []resetSign{
	{"less energy", nil, func(v *core.HealthSample) { v.Energy.Value = 1 }},
	{"fewer replays", nil, func(v *core.HealthSample) { v.Replays.Value = 1 }},
	{"fewer errors", nil, func(v *core.HealthSample) { v.Uncorrectable.Value = 1 }},
}

var none = []resetSign{
	{"nothing", nil, func(*core.HealthSample) {}},
	{"a remap never pending", func(v *core.HealthSample) { v.RemapPending = core.NotReported }, func(v *core.HealthSample) { v.RemapPending = core.No }},
	{"a remap not readable", func(v *core.HealthSample) { v.RemapPending = core.Yes }, func(v *core.HealthSample) { v.RemapPending = core.NotReported }},
	{"peer-to-peer drained, then nothing", func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryDrainP2P }, func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryNone }},
	{"one demand, then another", func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReset }, func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReboot }},
	{"a demand not readable", func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReset }, func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryUnknown }},
	{"energy unread", nil, func(v *core.HealthSample) { v.Energy, v.Replays = core.OptionalUint64{}, core.OptionalUint64{} }},
	{"more of everything", nil, func(v *core.HealthSample) { v.Energy.Value, v.Replays.Value = 9e9, 50 }},
}

// showsReset reports whether signs, in checks with the given time between them, clear a condition that needs a
// reset.
func showsReset(t *testing.T, apart time.Duration, signs ...resetSign) bool {
	t.Helper()
	s := newUncheckedFixture(t, "580")
	for _, sign := range signs {
		if sign.before != nil {
			s.setSample(sign.before)
		}
	}
	s.check(1)
	s.reportXIDs(119)
	s.check(1)
	for i, sign := range signs {
		if i > 0 {
			s.checkFor(apart - checkInterval)
		}
		s.setSample(sign.after)
		s.check(1)
	}
	seen := s.history().LastReset
	if is := !s.condition("XID_119").ClearingSince.IsZero(); is != !seen.IsZero() {
		t.Errorf("the reset was seen at %v, but recovery began: %t", seen, is)
	}
	return !seen.IsZero()
}

func TestStrongSignsOfAReset(t *testing.T) {
	for _, sign := range strong {
		if !showsReset(t, checkInterval, sign) {
			t.Errorf("%s: no reset", sign.name)
		}
	}
	for _, sign := range slices.Concat(none, weak) {
		if showsReset(t, checkInterval, sign) {
			t.Errorf("%s: a reset", sign.name)
		}
	}
}

func TestWeakSignsOfAReset(t *testing.T) {
	for i, one := range weak {
		for j, two := range weak {
			if i == j {
				continue
			}
			for apart, want := range map[time.Duration]bool{checkInterval: true, 5 * time.Minute: true, 5*time.Minute + checkInterval: false, time.Hour: false} {
				if showsReset(t, apart, one, two) != want {
					t.Errorf("%s and, %v later, %s: want %t", one.name, apart, two.name, want)
				}
			}
		}
	}
	if showsReset(t, time.Minute, weak[0], resetSign{after: func(v *core.HealthSample) { v.Energy.Value = 0 }}) {
		t.Error("one counter twice is one sign")
	}
}

// A sign counts for one reset only.
func TestSignsProveOneReset(t *testing.T) {
	s := newLedgerFixture(t)
	s.setSample(weak[0].after)
	s.setSample(weak[1].after)
	s.check(1)
	first := s.history().LastReset
	if !first.Equal(s.now) {
		t.Fatalf("no reset: %v", first)
	}
	s.reportXIDs(119)
	s.setSample(func(v *core.HealthSample) { v.Uncorrectable.Value = 0 })
	s.check(1)
	if again := s.history().LastReset; !again.Equal(first) {
		t.Errorf("a third counter proves another reset at %v", again)
	}
}

// A sign counts for events before it.
func TestResetBeforeTheFault(t *testing.T) {
	s := newLedgerFixture(t)
	s.reset()
	s.reportXIDs(119)
	s.checkFor(time.Hour)
	s.expect("the reset came first", core.Unhealthy, "XID_119")
	s.observe(core.Observation{At: a, Kind: core.DriverRebound})
	s.expect("at the same moment", core.Unhealthy, "XID_119")
	if c := s.condition("XID_119"); c.ClearingSince.IsZero() {
		t.Error("unbound and bound is no reset")
	}
	s.reportXIDs(119)
	s.checkFor(time.Hour)
	s.expect("and again after that", core.Unhealthy, "XID_119")
}

// A reset of one GPU has no effect on another.
func TestResetOfAnotherGPU(t *testing.T) {
	s := newLedgerFixture(t)
	s.observe(xidEvent(b, 119))
	s.reportXIDs(119)
	s.reset()
	s.checkFor(5 * time.Minute)
	s.expectAt("a", a, core.Healthy, "")
	s.expectAt("b", b, core.Unhealthy, "XID_119")
}

// A driver that was loaded again clears what its recovery action shows to be cleared, but nothing else: its
// counters start at zero each time.
func TestReload(t *testing.T) {
	fallen := func(v *core.HealthSample) { v.Energy.Value, v.Uncorrectable.Value = 0, 0 }
	for _, tc := range []struct {
		name     string
		gone     core.DriverState
		unloaded bool
		as       string // the version that responds
		back     func(*core.HealthSample)
		want     core.HealthState
	}{
		{"recovery action None", core.DriverAbsent, true, "580", func(*core.HealthSample) {}, core.Healthy},
		{"no recovery action", core.DriverAbsent, true, "580", func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryUnknown }, core.Unhealthy},
		{"no recovery action, counters fell", core.DriverAbsent, true, "580", func(v *core.HealthSample) { fallen(v); v.RecoveryAction = core.RecoveryUnknown }, core.Unhealthy},
		{"a reset is wanted", core.DriverAbsent, true, "580", func(v *core.HealthSample) { fallen(v); v.RecoveryAction = core.RecoveryReset }, core.Unhealthy},
		{"a remap is no longer pending", core.DriverAbsent, true, "580", func(v *core.HealthSample) { v.RecoveryAction, v.RemapPending = core.RecoveryUnknown, core.No }, core.Healthy},
		{"only the library was missing", core.DriverAbsent, false, "580", func(*core.HealthSample) {}, core.Unhealthy},
		{"only the library was missing, counters fell", core.DriverAbsent, false, "580", fallen, core.Unhealthy},
		{"only the library was missing, another version", core.DriverAbsent, false, "585.1", func(*core.HealthSample) {}, core.Healthy},
		{"another version", core.DriverFailed, false, "585.1", func(*core.HealthSample) {}, core.Healthy},
		{"it only could not be asked", core.DriverFailed, false, "580", func(*core.HealthSample) {}, core.Unhealthy},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newUncheckedFixture(t, "580")
			s.setSample(func(v *core.HealthSample) { v.RemapPending = core.Yes })
			s.check(1)
			s.reportXIDs(119)
			s.observe(core.Observation{At: core.Node, Kind: core.DriverUnavailable, Code: uint64(tc.gone), Detail: "gone"})
			if tc.unloaded {
				s.observe(core.Observation{At: core.Node, Kind: core.DriverUnloaded})
			}
			for _, at := range []core.Placement{a, b} {
				if h := s.ledger.Health(at); h.Schedulable() {
					t.Errorf("without a driver %v is %s", at, h)
				}
			}
			s.wait(time.Minute)
			s.observe(driverAvailable(tc.as))
			s.setSample(tc.back)
			s.check(1)
			if h := s.ledger.Health(a); h.State != core.Unhealthy {
				t.Errorf("when it is back: %s", h)
			}
			s.checkFor(10 * time.Minute)
			if h := s.ledger.Health(a); h.State != tc.want && (h.State != core.Degraded || tc.want != core.Healthy) {
				t.Errorf("%s, want %s", h, tc.want)
			}
		})
	}
}

// simulate simulates XIDs of a.
func (s *ledgerFixture) simulate(codes ...uint64) {
	for _, code := range codes {
		o := xidEvent(a, code)
		o.Simulated = true
		s.observe(o)
	}
}

// A simulated fault has the effect of a real one, is marked as simulated, and leaves nothing behind.
func TestSimulatedFault(t *testing.T) {
	s := newLedgerFixture(t)
	for range 4 {
		s.simulate(95)
		s.expect("like the real one", core.Unhealthy, "XID_95")
		if h := s.ledger.Health(a); !h.Simulated || !strings.HasPrefix(h.String(), "simulated: unhealthy: XID 95") {
			t.Error(h)
		}
		s.expectRecovery("by the same evidence, in no longer time", 90*time.Second)
	}
	for range 3 {
		s.allocate(a)
		s.simulate(13)
	}
	s.simulate(109, 109, 119)
	if c := s.history(); len(c.FaultCounts)+len(c.UnhealthyEpisodes)+len(c.Recoveries)+len(c.ClearedByReset) != 0 || !c.UnhealthySince.IsZero() {
		t.Errorf("remembered: %+v", c)
	}
	for _, c := range s.ledger.Conditions() {
		if !c.Simulated {
			t.Errorf("a simulated fault caused %s", c)
		}
	}
	if c := s.condition("XID_109"); c.Repeated || c.State != core.Degraded {
		t.Errorf("a simulated fault was repeated: %+v", c)
	}
}

// Earlier unhealthy episodes do not delay the recovery from a simulated fault.
func TestSimulatedFaultAfterEpisodes(t *testing.T) {
	s := newLedgerFixture(t, noServiceLimit)
	s.faultAndReset(46)
	s.faultAndReset(119)
	s.simulate(95)
	s.expectRecovery("a simulated fault", 90*time.Second)
	s.reportXIDs(95)
	s.expectRecovery("the real thing", 30*time.Second+4*time.Minute)
}

// A simulated and a real fault are separate conditions, and the real one is shown.
func TestSimulatedAndRealFault(t *testing.T) {
	s := newLedgerFixture(t)
	s.simulate(95)
	s.wait(time.Minute)
	s.reportXIDs(95)
	if cs := s.ledger.Conditions(); len(cs) != 2 || cs[0].Simulated || !cs[1].Simulated {
		t.Errorf("conditions: %+v", cs)
	}
	if h := s.ledger.Health(a); h.Simulated {
		t.Errorf("the simulated fault began first: %s", h)
	}
	s = newLedgerFixture(t)
	s.faultAndReset(46)
	s.reportXIDs(94)
	s.simulate(119)
	if h := s.ledger.Health(a); !h.Simulated || h.Code != 119 {
		t.Errorf("the worse counts: %s", h)
	}
	if _, err := s.clear(core.Command{Cause: "XID_119"}); err != nil {
		t.Fatal(err)
	}
	s.expect("the fault is left", core.Degraded, "XID_94")
	if c := s.history(); len(c.UnhealthyEpisodes) != 1 || len(c.ClearedByReset) != 1 || len(c.Recoveries) != 1 {
		t.Errorf("a command on a simulated fault changed the history: %+v", c)
	}
}
