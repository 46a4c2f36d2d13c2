package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// The GPUs of most tests. Faults happen on a; b must not be affected.
var (
	a = core.WholeGPU("GPU-a")
	b = core.WholeGPU("GPU-b")
)

// testStart is the time at which every test begins.
var testStart = time.Date(2026, time.November, 20, 10, 31, 0, 0, time.UTC)

const (
	checkInterval = 10 * time.Second // between checks
	never         = time.Duration(0) // as the duration of a recovery that does not happen
)

// ledgerFixture applies observations of two GPUs to a ledger. Its clock advances in check, checkFor and wait only.
type ledgerFixture struct {
	testing.TB
	policy  core.HealthPolicy
	now     time.Time
	ledger  core.Ledger
	samples map[core.DeviceID]*core.HealthSample   // result of the next check
	failing map[core.DeviceID]core.ObservationKind // observed instead of a check
}

// newLedgerFixture returns a ledger with driver 580 and two GPUs that were checked and are healthy.
func newLedgerFixture(t testing.TB, tune ...func(*core.HealthPolicy)) *ledgerFixture {
	t.Helper()
	s := newUncheckedFixture(t, "580.95.05", tune...)
	s.check(1)
	s.expect("at the beginning", core.Healthy, "")
	return s
}

// newUncheckedFixture returns a ledger before the first check.
func newUncheckedFixture(t testing.TB, driver string, tune ...func(*core.HealthPolicy)) *ledgerFixture {
	t.Helper()
	va, vb := healthySample(), healthySample()
	s := &ledgerFixture{
		TB: t, policy: core.DefaultHealthPolicy(), now: testStart,
		samples: map[core.DeviceID]*core.HealthSample{a.GPU: &va, b.GPU: &vb},
		failing: map[core.DeviceID]core.ObservationKind{},
	}
	for _, f := range tune {
		f(&s.policy)
	}
	s.observe(driverAvailable(driver))
	return s
}

// healthySample is the sample of a healthy GPU that reports every value.
func healthySample() core.HealthSample {
	gauge := func(v uint64) core.OptionalUint64 { return core.OptionalUint64{Value: v, OK: true} }
	return core.HealthSample{
		RecoveryAction: core.RecoveryNone,
		RemapPending:   core.No, RemapFailed: core.No, RepairPending: core.No, Unrepairable: core.No,
		SRAMThreshold: core.No, InfoROMCorrupt: core.No, Events: core.Yes,
		Uncorrectable: gauge(2), Energy: gauge(5_000_000), Replays: gauge(40),
		ThermalSlowdown: gauge(0), PowerBrake: gauge(0),
		PCIeWidth: 16, PCIeMaxWidth: 16, PCIeGen: 5, LinksUp: gauge(18), Fabric: core.FabricHealthy,
	}
}

func driverAvailable(driver string) core.Observation {
	return core.Observation{At: core.Node, Kind: core.DriverAvailable, Detail: driver}
}

func xidEvent(at core.Placement, code uint64) core.Observation {
	return core.Observation{At: at, Kind: core.XID, Code: code}
}

func gi(n uint32) core.Placement { return core.Placement{GPU: a.GPU, GI: n, CI: core.Whole} }

func ci(g, c uint32) core.Placement { return core.Placement{GPU: a.GPU, GI: g, CI: c} }

// setSample changes the sample of a from the next check on.
func (s *ledgerFixture) setSample(change func(*core.HealthSample)) { change(s.samples[a.GPU]) }

// newFixtureWith returns a ledger with another sample of a from the beginning.
func newFixtureWith(t testing.TB, driver string, change func(*core.HealthSample)) *ledgerFixture {
	t.Helper()
	s := newUncheckedFixture(t, driver)
	s.setSample(change)
	s.check(1)
	return s
}

// observe applies observations now.
func (s *ledgerFixture) observe(obs ...core.Observation) {
	s.ledger = s.ledger.Apply(s.policy, s.now, obs...)
}

// reportXIDs reports XIDs of a, now.
func (s *ledgerFixture) reportXIDs(codes ...uint64) {
	for _, code := range codes {
		s.observe(xidEvent(a, code))
	}
}

// check waits for checkInterval and checks both GPUs, n times.
func (s *ledgerFixture) check(n int) {
	for range n {
		s.now = s.now.Add(checkInterval)
		var obs []core.Observation
		for _, at := range []core.Placement{a, b} {
			o := core.Observation{At: at, Kind: core.Checked, Sample: *s.samples[at.GPU]}
			if kind, failed := s.failing[at.GPU]; failed {
				o = core.Observation{At: at, Kind: kind, Detail: "reported by the driver"}
			}
			obs = append(obs, o)
		}
		s.observe(obs...)
	}
}

// checkFor checks for as long as d.
func (s *ledgerFixture) checkFor(d time.Duration) { s.check(int(d / checkInterval)) }

// wait advances the clock by d without a check.
func (s *ledgerFixture) wait(d time.Duration) {
	s.now = s.now.Add(d)
	s.observe()
}

// reset resets a as the recovery action required: the strongest sign of a reset.
func (s *ledgerFixture) reset() {
	s.setSample(func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReset })
	s.check(1)
	s.setSample(func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryNone })
	s.check(1)
}

// recovery checks until a is healthy and returns how long that took; never after two hours.
func (s *ledgerFixture) recovery() time.Duration {
	began := s.now
	for s.now.Sub(began) < 2*time.Hour {
		if s.ledger.Health(a).State == core.Healthy {
			return s.now.Sub(began)
		}
		s.check(1)
	}
	return never
}

// expect compares the health of a, and requires that b is healthy.
func (s *ledgerFixture) expect(when string, state core.HealthState, cause string) {
	s.Helper()
	s.expectAt(when, a, state, cause)
	if h := s.ledger.Health(b); h.State != core.Healthy {
		s.Errorf("%s the neighbour is %s", when, h)
	}
}

func (s *ledgerFixture) expectAt(when string, at core.Placement, state core.HealthState, cause string) {
	s.Helper()
	if h := s.ledger.Health(at); h.State != state || h.Cause() != cause {
		s.Errorf("%s %v is %q (%s), want %s (%s)", when, at, h, h.Cause(), state, cause)
	}
}

// expectRecovery compares the time until a is healthy.
func (s *ledgerFixture) expectRecovery(when string, want time.Duration) {
	s.Helper()
	if got := s.recovery(); got != want {
		s.Errorf("%s it takes %v until a is healthy, want %v; %s", when, got, want, s.ledger.Health(a))
	}
}

// condition returns the condition with that cause on a or one of its instances.
func (s *ledgerFixture) condition(cause string) core.Condition {
	s.Helper()
	for _, c := range s.ledger.Conditions() {
		if c.At.GPU == a.GPU && c.Cause() == cause {
			return c
		}
	}
	s.Fatalf("no condition %s: %v", cause, s.ledger.Conditions())
	return core.Condition{}
}

// history returns the history of a.
func (s *ledgerFixture) history() core.GPUHistory {
	s.Helper()
	c, ok := s.ledger.History(a.GPU)
	if !ok {
		s.Fatal("no history")
	}
	return c
}
