package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// The GPUs of most stories. What is told happens to a; b is the neighbour whom it is none of the business.
var (
	a = core.WholeGPU("GPU-a")
	b = core.WholeGPU("GPU-b")
)

// testStart is when every story begins.
var testStart = time.Date(2026, time.November, 20, 10, 31, 0, 0, time.UTC)

const (
	checkInterval = 10 * time.Second // between checks
	never         = time.Duration(0) // how long a recovery takes that does not come
)

// ledgerFixture folds what happens to two GPUs into a ledger. Its clock stands still but in check, step and pass.
type ledgerFixture struct {
	testing.TB
	policy  core.HealthPolicy
	now     time.Time
	ledger  core.Ledger
	samples map[core.DeviceID]*core.HealthSample   // what a GPU says when it is checked
	failing map[core.DeviceID]core.ObservationKind // what is observed of it instead
}

// newLedgerFixture begins a story: driver 580, two GPUs that were checked and are well.
func newLedgerFixture(t testing.TB, tune ...func(*core.HealthPolicy)) *ledgerFixture {
	t.Helper()
	s := newUncheckedFixture(t, "580.95.05", tune...)
	s.check(1)
	s.expect("at the beginning", core.Healthy, "")
	return s
}

// newUncheckedFixture is a story before the first check.
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

// healthySample are the vitals of a GPU that says everything, and is well.
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

// setSample changes what a says from the next check on.
func (s *ledgerFixture) setSample(change func(*core.HealthSample)) { change(s.samples[a.GPU]) }

// newFixtureWith is a story in which a says something else from the beginning.
func newFixtureWith(t testing.TB, driver string, change func(*core.HealthSample)) *ledgerFixture {
	t.Helper()
	s := newUncheckedFixture(t, driver)
	s.setSample(change)
	s.check(1)
	return s
}

// observe folds observations now.
func (s *ledgerFixture) observe(obs ...core.Observation) {
	s.ledger = s.ledger.Apply(s.policy, s.now, obs...)
}

// reportXIDs has the driver report XIDs of a, now.
func (s *ledgerFixture) reportXIDs(codes ...uint64) {
	for _, code := range codes {
		s.observe(xidEvent(a, code))
	}
}

// check lets a pace pass and asks both GPUs, n times.
func (s *ledgerFixture) check(n int) {
	for range n {
		s.now = s.now.Add(checkInterval)
		var obs []core.Observation
		for _, at := range []core.Placement{a, b} {
			o := core.Observation{At: at, Kind: core.Checked, Sample: *s.samples[at.GPU]}
			if kind, silent := s.failing[at.GPU]; silent {
				o = core.Observation{At: at, Kind: kind, Detail: "the driver says so"}
			}
			obs = append(obs, o)
		}
		s.observe(obs...)
	}
}

// checkFor is check for as long as d.
func (s *ledgerFixture) checkFor(d time.Duration) { s.check(int(d / checkInterval)) }

// wait lets time pass in which nobody asks anything.
func (s *ledgerFixture) wait(d time.Duration) {
	s.now = s.now.Add(d)
	s.observe()
}

// reset is a reset of a that the driver asked for: the strongest sign there is.
func (s *ledgerFixture) reset() {
	s.setSample(func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReset })
	s.check(1)
	s.setSample(func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryNone })
	s.check(1)
}

// recovery checks until a is healthy and returns how long that took; never if it does not within two hours.
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

// expect compares the health of a, and has b healthy.
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

// expectRecovery compares how long it takes until a is healthy.
func (s *ledgerFixture) expectRecovery(when string, want time.Duration) {
	s.Helper()
	if got := s.recovery(); got != want {
		s.Errorf("%s it takes %v until a is healthy, want %v; %s", when, got, want, s.ledger.Health(a))
	}
}

// condition is the standing one with that cause against a or an instance of it.
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

// history is what is remembered of a.
func (s *ledgerFixture) history() core.GPUHistory {
	s.Helper()
	c, ok := s.ledger.History(a.GPU)
	if !ok {
		s.Fatal("nothing is remembered")
	}
	return c
}
