package core_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// resetSign is a change of a sample that may show a reset.
type resetSign struct {
	name   string
	before func(*health.Sample) // the sample until then; nil = healthySample
	after  func(*health.Sample)
}

var strong = []resetSign{
	{"reset, then None", func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset }, func(v *health.Sample) { v.RecoveryAction = health.RecoveryNone }},
	{"drain and reset, then None", func(v *health.Sample) { v.RecoveryAction = health.RecoveryDrainAndReset }, func(v *health.Sample) { v.RecoveryAction = health.RecoveryNone }},
	{"a row remap no longer pending", func(v *health.Sample) { v.RemapPending = health.Yes }, func(v *health.Sample) { v.RemapPending = health.No }},
	{"a page retirement no longer pending", func(v *health.Sample) { v.RetirementPending = health.Yes }, func(v *health.Sample) { v.RetirementPending = health.No }},
	{"a repair no longer pending", func(v *health.Sample) { v.RepairPending = health.Yes }, func(v *health.Sample) { v.RepairPending = health.No }},
}

var weak = []resetSign{
	{"less energy", nil, func(v *health.Sample) { v.Energy.Value = 1 }},
	{"fewer replays", nil, func(v *health.Sample) { v.Replays.Value = 1 }},
	{"fewer errors", nil, func(v *health.Sample) { v.Uncorrectable.Value = 1 }},
}

var none = []resetSign{
	{"nothing", nil, func(*health.Sample) {}},
	{"a remap never pending", func(v *health.Sample) { v.RemapPending = health.NotReported }, func(v *health.Sample) { v.RemapPending = health.No }},
	{"a remap not readable", func(v *health.Sample) { v.RemapPending = health.Yes }, func(v *health.Sample) { v.RemapPending = health.NotReported }},
	{"drain peer-to-peer, then None", func(v *health.Sample) { v.RecoveryAction = health.RecoveryDrainP2P }, func(v *health.Sample) { v.RecoveryAction = health.RecoveryNone }},
	{"one recovery action, then another", func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset }, func(v *health.Sample) { v.RecoveryAction = health.RecoveryReboot }},
	{"a recovery action not readable", func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset }, func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown }},
	{"energy unread", nil, func(v *health.Sample) { v.Energy, v.Replays = gpu.OptionalUint64{}, gpu.OptionalUint64{} }},
	{"more of everything", nil, func(v *health.Sample) { v.Energy.Value, v.Replays.Value = 9e9, 50 }},
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
	if showsReset(t, time.Minute, weak[0], resetSign{after: func(v *health.Sample) { v.Energy.Value = 0 }}) {
		t.Error("one counter twice is two signs")
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
	s.setSample(func(v *health.Sample) { v.Uncorrectable.Value = 0 })
	s.check(1)
	if again := s.history().LastReset; !again.Equal(first) {
		t.Errorf("a third counter proves another reset at %v", again)
	}
}

// What a reset clears, and what it does not clear.
func TestRecoveryByReset(t *testing.T) {
	for _, tc := range []struct {
		code uint64
		want time.Duration // from the check that shows the reset
	}{
		{46, time.Minute}, {48, time.Minute}, {62, time.Minute}, {64, time.Minute}, {94, time.Minute}, {95, time.Minute},
		{109, time.Minute}, {110, time.Minute}, {119, time.Minute}, {120, time.Minute}, {136, time.Minute}, {140, time.Minute},
		{159, time.Minute}, {167, time.Minute}, {168, time.Minute}, {175, time.Minute}, {177, time.Minute}, {185, time.Minute},
		{54, never}, {151, never}, {157, never}, {164, never}, {165, never},
	} {
		s := trusted(t)
		s.reportXIDs(tc.code)
		s.reset()
		s.expectRecovery(fmt.Sprint("XID ", tc.code, " reset"), tc.want)
	}
}

// A sign counts for events before it.
func TestResetBeforeTheFault(t *testing.T) {
	s := newLedgerFixture(t)
	s.reset()
	s.reportXIDs(119)
	s.checkFor(time.Hour)
	s.expect("the reset came first", health.Unhealthy, "XID_119")
	s.observe(health.Observation{At: a, Kind: health.DriverRebound})
	s.expect("at the same moment", health.Unhealthy, "XID_119")
	if c := s.condition("XID_119"); c.ClearingSince.IsZero() {
		t.Error("recovery did not begin")
	}
	s.reportXIDs(119)
	s.checkFor(time.Hour)
	s.expect("and again after that", health.Unhealthy, "XID_119")
}

// A driver that was loaded again clears what its recovery action shows to be cleared, but nothing else: its
// counters start at zero each time.
func TestReload(t *testing.T) {
	fallen := func(v *health.Sample) { v.Energy.Value, v.Uncorrectable.Value = 0, 0 }
	for _, tc := range []struct {
		name     string
		gone     gpu.DriverState
		unloaded bool
		as       string // the version that responds
		back     func(*health.Sample)
		want     health.State
	}{
		{"recovery action None", gpu.DriverAbsent, true, "580", func(*health.Sample) {}, health.Healthy},
		{"no recovery action", gpu.DriverAbsent, true, "580", func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown }, health.Unhealthy},
		{"no recovery action, counters fell", gpu.DriverAbsent, true, "580", func(v *health.Sample) { fallen(v); v.RecoveryAction = health.RecoveryUnknown }, health.Unhealthy},
		{"a recovery action", gpu.DriverAbsent, true, "580", func(v *health.Sample) { fallen(v); v.RecoveryAction = health.RecoveryReset }, health.Unhealthy},
		{"a remap is no longer pending", gpu.DriverAbsent, true, "580", func(v *health.Sample) { v.RecoveryAction, v.RemapPending = health.RecoveryUnknown, health.No }, health.Healthy},
		{"only the library was missing", gpu.DriverAbsent, false, "580", func(*health.Sample) {}, health.Unhealthy},
		{"only the library was missing, counters fell", gpu.DriverAbsent, false, "580", fallen, health.Unhealthy},
		{"only the library was missing, another version", gpu.DriverAbsent, false, "585.1", func(*health.Sample) {}, health.Healthy},
		{"another version", gpu.DriverFailed, false, "585.1", func(*health.Sample) {}, health.Healthy},
		{"the driver only could not be called", gpu.DriverFailed, false, "580", func(*health.Sample) {}, health.Unhealthy},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newUncheckedFixture(t, "580")
			s.setSample(func(v *health.Sample) { v.RemapPending = health.Yes })
			s.check(1)
			s.reportXIDs(119)
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(tc.gone), Detail: "gone"})
			if tc.unloaded {
				s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnloaded})
			}
			for _, at := range []gpu.Placement{a, b} {
				if h := s.ledger.Health(at); h.Schedulable() {
					t.Errorf("without a driver %v is %s", at, h)
				}
			}
			s.wait(time.Minute)
			s.observe(driverAvailable(tc.as))
			s.setSample(tc.back)
			s.check(1)
			if h := s.ledger.Health(a); h.State != health.Unhealthy {
				t.Errorf("when it is back: %s", h)
			}
			s.checkFor(10 * time.Minute)
			if h := s.ledger.Health(a); h.State != tc.want && (h.State != health.Degraded || tc.want != health.Healthy) {
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
		s.expect("as a real one", health.Unhealthy, "XID_95")
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
		t.Errorf("history: %+v", c)
	}
	for _, c := range s.ledger.Conditions() {
		if !c.Simulated {
			t.Errorf("a simulated fault caused %s", c)
		}
	}
	if c := s.condition("XID_109"); c.Repeated || c.State != health.Degraded {
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
	s.expectRecovery("a real fault", 30*time.Second+4*time.Minute)
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
	if _, err := s.clear(health.Command{Cause: "XID_119"}); err != nil {
		t.Fatal(err)
	}
	s.expect("the fault is left", health.Degraded, "XID_94")
	if c := s.history(); len(c.UnhealthyEpisodes) != 1 || len(c.ClearedByReset) != 1 || len(c.Recoveries) != 1 {
		t.Errorf("a command on a simulated fault changed the history: %+v", c)
	}
}
