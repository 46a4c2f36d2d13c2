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

// dawn is when every story begins.
var dawn = time.Date(2026, time.November, 20, 10, 31, 0, 0, time.UTC)

const (
	pace  = 10 * time.Second // between checks
	never = time.Duration(0) // how long a recovery takes that does not come
)

// story folds what happens to two GPUs into a ledger. Its clock stands still but in check, step and pass.
type story struct {
	testing.TB
	policy core.HealthPolicy
	now    time.Time
	ledger core.Ledger
	says   map[core.DeviceID]*core.HealthSample   // what a GPU says when it is checked
	mute   map[core.DeviceID]core.ObservationKind // what is observed of it instead
}

// tell begins a story: driver 580, two GPUs that were checked and are well.
func tell(t testing.TB, tune ...func(*core.HealthPolicy)) *story {
	t.Helper()
	s := untold(t, "580.95.05", tune...)
	s.check(1)
	s.expect("at the beginning", core.Healthy, "")
	return s
}

// untold is a story before the first check.
func untold(t testing.TB, driver string, tune ...func(*core.HealthPolicy)) *story {
	t.Helper()
	va, vb := fit(), fit()
	s := &story{
		TB: t, policy: core.DefaultHealthPolicy(), now: dawn,
		says: map[core.DeviceID]*core.HealthSample{a.GPU: &va, b.GPU: &vb},
		mute: map[core.DeviceID]core.ObservationKind{},
	}
	for _, f := range tune {
		f(&s.policy)
	}
	s.see(answered(driver))
	return s
}

// fit are the vitals of a GPU that says everything, and is well.
func fit() core.HealthSample {
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

func answered(driver string) core.Observation {
	return core.Observation{At: core.Node, Kind: core.DriverAvailable, Detail: driver}
}

func xidEvent(at core.Placement, code uint64) core.Observation {
	return core.Observation{At: at, Kind: core.XID, Code: code}
}

func gi(n uint32) core.Placement { return core.Placement{GPU: a.GPU, GI: n, CI: core.Whole} }

func ci(g, c uint32) core.Placement { return core.Placement{GPU: a.GPU, GI: g, CI: c} }

// say changes what a says from the next check on.
func (s *story) say(change func(*core.HealthSample)) { change(s.says[a.GPU]) }

// saying is a story in which a says something else from the beginning.
func saying(t testing.TB, driver string, change func(*core.HealthSample)) *story {
	t.Helper()
	s := untold(t, driver)
	s.say(change)
	s.check(1)
	return s
}

// see folds observations now.
func (s *story) see(obs ...core.Observation) { s.ledger = s.ledger.Apply(s.policy, s.now, obs...) }

// xid has the driver report XIDs of a, now.
func (s *story) xid(codes ...uint64) {
	for _, code := range codes {
		s.see(xidEvent(a, code))
	}
}

// check lets a pace pass and asks both GPUs, n times.
func (s *story) check(n int) {
	for range n {
		s.now = s.now.Add(pace)
		var obs []core.Observation
		for _, at := range []core.Placement{a, b} {
			o := core.Observation{At: at, Kind: core.Checked, Sample: *s.says[at.GPU]}
			if kind, silent := s.mute[at.GPU]; silent {
				o = core.Observation{At: at, Kind: kind, Detail: "the driver says so"}
			}
			obs = append(obs, o)
		}
		s.see(obs...)
	}
}

// step is check for as long as d.
func (s *story) step(d time.Duration) { s.check(int(d / pace)) }

// pass lets time pass in which nobody asks anything.
func (s *story) pass(d time.Duration) {
	s.now = s.now.Add(d)
	s.see()
}

// reset is a reset of a that the driver asked for: the strongest sign there is.
func (s *story) reset() {
	s.say(func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryReset })
	s.check(1)
	s.say(func(v *core.HealthSample) { v.RecoveryAction = core.RecoveryNone })
	s.check(1)
}

// recovery checks until a is healthy and returns how long that took; never if it does not within two hours.
func (s *story) recovery() time.Duration {
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
func (s *story) expect(when string, state core.HealthState, cause string) {
	s.Helper()
	s.expectAt(when, a, state, cause)
	if h := s.ledger.Health(b); h.State != core.Healthy {
		s.Errorf("%s the neighbour is %s", when, h)
	}
}

func (s *story) expectAt(when string, at core.Placement, state core.HealthState, cause string) {
	s.Helper()
	if h := s.ledger.Health(at); h.State != state || h.Cause() != cause {
		s.Errorf("%s %v is %q (%s), want %s (%s)", when, at, h, h.Cause(), state, cause)
	}
}

// expectRecovery compares how long it takes until a is healthy.
func (s *story) expectRecovery(when string, want time.Duration) {
	s.Helper()
	if got := s.recovery(); got != want {
		s.Errorf("%s it takes %v until a is healthy, want %v; %s", when, got, want, s.ledger.Health(a))
	}
}

// condition is the standing one with that cause against a or an instance of it.
func (s *story) condition(cause string) core.Condition {
	s.Helper()
	for _, c := range s.ledger.Conditions() {
		if c.At.GPU == a.GPU && c.Cause() == cause {
			return c
		}
	}
	s.Fatalf("no condition %s: %v", cause, s.ledger.Conditions())
	return core.Condition{}
}

// chart is what is remembered of a.
func (s *story) chart() core.GPUHistory {
	s.Helper()
	c, ok := s.ledger.History(a.GPU)
	if !ok {
		s.Fatal("nothing is remembered")
	}
	return c
}
