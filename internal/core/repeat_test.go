package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// The effect of a second XID soon after the first.
func TestRepeatRule(t *testing.T) {
	r565 := func(t testing.TB) *ledgerFixture { return newFixtureWith(t, "565.57.01", func(*health.Sample) {}) }
	for _, tc := range []struct {
		name          string
		begin         func(testing.TB) *ledgerFixture
		code          uint64
		apart         time.Duration
		first, second health.State
	}{
		{"109 within ten minutes", guest, 109, 10 * time.Minute, health.Degraded, health.Unhealthy},
		{"109 after them", guest, 109, 10*time.Minute + checkInterval, health.Degraded, health.Degraded},
		{"109, and the driver is content", trusted, 109, time.Minute, health.Degraded, health.Degraded},
		{"109, not covered before R570", r565, 109, time.Minute, health.Degraded, health.Unhealthy},
		{"80 within an hour", trusted, 80, time.Hour, health.Healthy, health.Degraded},
		{"80 after it", trusted, 80, time.Hour + checkInterval, health.Healthy, health.Healthy},
		{"80 without a recovery action", guest, 80, time.Minute, health.Healthy, health.Degraded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := tc.begin(t)
			s.reportXIDs(tc.code)
			if h := s.ledger.Health(a); h.State != tc.first {
				t.Errorf("the first: %s", h)
			}
			s.checkFor(tc.apart)
			s.reportXIDs(tc.code)
			if h := s.ledger.Health(a); h.State != tc.second {
				t.Errorf("the second: %s", h)
			}
		})
	}
	t.Run("on two GPUs", func(t *testing.T) {
		s := guest(t)
		s.observe(xidEvent(a, 109), xidEvent(b, 109), xidEvent(a, 80), xidEvent(b, 80))
		for _, at := range []gpu.Placement{a, b} {
			s.expectAt("with one each", at, health.Degraded, "XID_109")
		}
	})
	t.Run("on two instances", func(t *testing.T) {
		s := guest(t)
		s.observe(xidEvent(gi(1), 109), xidEvent(gi(2), 109))
		for _, at := range []gpu.Placement{gi(1), gi(2)} {
			s.expectAt("with one each", at, health.Degraded, "XID_109")
		}
	})
	t.Run("after a reset", func(t *testing.T) {
		s := guest(t)
		s.reportXIDs(109)
		s.wait(time.Second)
		s.observe(health.Observation{At: a, Kind: health.DriverRebound})
		s.expectRecovery("by the reset", time.Minute)
		s.reportXIDs(109)
		s.expect("it is the first since", health.Degraded, "XID_109")
	})
	t.Run("a note is forgotten", func(t *testing.T) {
		s := trusted(t)
		s.reportXIDs(80)
		s.checkFor(time.Hour)
		if n := len(s.ledger.Conditions()); n != 1 {
			t.Errorf("%d conditions within the hour", n)
		}
		s.checkFor(checkInterval)
		if cs := s.ledger.Conditions(); len(cs) != 0 || s.ledger.NeedsTick() {
			t.Errorf("still noted: %v", cs)
		}
	})
	t.Run("80 twice, then quiet", func(t *testing.T) {
		s := trusted(t)
		s.reportXIDs(80, 80)
		s.expect("immediately", health.Degraded, "XID_80")
		s.expectRecovery("after the second", 11*time.Minute)
	})
}

// XID 74 on a GPU without NVLinks is no reason to withdraw it.
func TestNVLinkOnly(t *testing.T) {
	for _, tc := range []struct {
		name  string
		links gpu.OptionalUint64
		want  health.State
	}{
		{"18 links", gpu.OptionalUint64{Value: 18, OK: true}, health.Unhealthy},
		{"none active", gpu.OptionalUint64{OK: true}, health.Degraded},
		{"no such thing", gpu.OptionalUint64{}, health.Degraded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newFixtureWith(t, "580", func(v *health.Sample) { v.RecoveryAction, v.LinksUp = health.RecoveryUnknown, tc.links })
			s.reportXIDs(74)
			s.expect("immediately", health.Degraded, "XID_74")
			s.wait(29 * time.Second)
			s.expect("before it is settled", health.Degraded, "XID_74")
			s.wait(time.Second)
			s.expect("settled", tc.want, "XID_74")
		})
	}
	t.Run("links that went down with it", func(t *testing.T) {
		s := guest(t)
		s.reportXIDs(74)
		s.setSample(func(v *health.Sample) { v.LinksUp.Value = 0 })
		s.checkFor(time.Minute)
		s.expect("settled", health.Unhealthy, "XID_74")
	})
}

// From the driver branch in the catalogue on, the recovery action overrides a rule, in both directions.
func TestRecoveryActionSince(t *testing.T) {
	for _, tc := range []struct {
		driver string
		code   uint64
		want   health.State // with the recovery action None, after the settle window
		over   time.Duration
	}{
		{"564.99", 144, health.Unhealthy, 90 * time.Second},
		{"565.01", 144, health.Degraded, 90 * time.Second},
		{"565.01", 143, health.Unhealthy, never},
		{"575.01", 143, health.Unhealthy, 90 * time.Second},
		{"565.01", 120, health.Unhealthy, 90 * time.Second},
		{"550.01", 120, health.Unhealthy, never},
		{"580.95.05", 119, health.Unhealthy, never},
		{"unheard of", 120, health.Unhealthy, never},
	} {
		s := newFixtureWith(t, tc.driver, func(*health.Sample) {})
		s.reportXIDs(tc.code)
		begun := *s
		s.checkFor(40 * time.Second)
		if h := s.ledger.Health(a); h.State != tc.want {
			t.Errorf("driver %s: %s", tc.driver, h)
		}
		begun.expectRecovery("driver "+tc.driver, tc.over)
	}
}

// The kernel log and NVML report the same XID, in any order: it counts once.
func TestEcho(t *testing.T) {
	logged := xidEvent(a, 109)
	logged.FromKernelLog, logged.Detail = true, "Ch 00000008"
	event := xidEvent(gi(1), 109)
	for _, tc := range []struct {
		name   string
		first  health.Observation
		apart  time.Duration
		second health.Observation
		count  uint64
	}{
		{"the log after NVML", event, 9 * time.Second, logged, 1},
		{"NVML after the log", logged, 9 * time.Second, event, 1},
		{"too late", event, 10 * time.Second, logged, 2},
		{"NVML twice", event, time.Second, event, 2},
		{"the log twice", logged, time.Second, logged, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := guest(t)
			s.observe(tc.first)
			s.wait(tc.apart)
			s.observe(tc.second)
			if tallies := s.history().FaultCounts; len(tallies) != 1 || tallies[0].Count != tc.count {
				t.Errorf("counted %+v, want %d", tallies, tc.count)
			}
			if cs := s.ledger.Conditions(); tc.count == 1 && (len(cs) != 1 || cs[0].Count != 1 || cs[0].Repeated) {
				t.Errorf("conditions: %+v", cs)
			}
		})
	}
	t.Run("pairs", func(t *testing.T) {
		s := guest(t)
		for range 5 {
			s.observe(event, logged)
			s.wait(time.Second)
		}
		if n := s.history().FaultCounts[0].Count; n != 5 {
			t.Errorf("counted %d", n)
		}
	})
	t.Run("another XID, another GPU", func(t *testing.T) {
		s := guest(t)
		other, neighbour := logged, logged
		other.Code, neighbour.At = 110, b
		s.observe(event, other, neighbour)
		if n := len(s.ledger.Conditions()); n != 3 {
			t.Errorf("%d conditions", n)
		}
	})
}

// allocate allocates a placement to a new workload.
func (s *ledgerFixture) allocate(at gpu.Placement) {
	s.observe(health.Observation{At: at, Kind: health.Reserved})
}

func TestWorkloads(t *testing.T) {
	fail := func(n int, apart time.Duration, xids ...uint64) func(*ledgerFixture) {
		return func(s *ledgerFixture) {
			for range n {
				s.allocate(a)
				for range 20 { // one program that fails repeatedly
					s.reportXIDs(xids...)
				}
				s.wait(apart)
			}
		}
	}
	for _, tc := range []struct {
		name   string
		effect xid.Effect
		happen func(*ledgerFixture)
		want   health.State
	}{
		{"one in a loop", xid.Degrades, fail(1, 0, 31), health.Healthy},
		{"unknown workload", xid.Degrades, func(s *ledgerFixture) { s.reportXIDs(31, 31, 31, 31) }, health.Healthy},
		{"two", xid.Degrades, fail(2, 0, 31), health.Healthy},
		{"three", xid.Degrades, fail(3, 0, 31), health.Degraded},
		{"three with different faults", xid.Degrades, func(s *ledgerFixture) { fail(1, 0, 13)(s); fail(1, 0, 31)(s); fail(1, 0, 43)(s) }, health.Degraded},
		{"three within an hour", xid.Degrades, fail(3, 30*time.Minute, 31), health.Degraded},
		{"three in more", xid.Degrades, fail(3, 31*time.Minute, 31), health.Healthy},
		{"three of class Info and Trigger", xid.Degrades, fail(3, 0, 38, 154), health.Healthy},
		{"three, policy None", xid.None, fail(3, 0, 31), health.Healthy},
		{"three, taken seriously", xid.Withdraws, fail(3, 0, 31), health.Unhealthy},
		{"one before the allocation, two after", xid.Degrades, func(s *ledgerFixture) { s.reportXIDs(31); fail(2, 0, 31)(s) }, health.Degraded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newLedgerFixture(t, func(p *health.Policy) { p.ApplicationFaults = tc.effect })
			tc.happen(s)
			cause := ""
			if tc.want > health.Healthy {
				cause = "WORKLOADS_FAILING"
			}
			s.expect("then", tc.want, cause)
		})
	}
	t.Run("an hour without", func(t *testing.T) {
		s := newLedgerFixture(t)
		fail(3, 0, 31)(s)
		s.checkFor(30 * time.Minute)
		s.reportXIDs(31)
		s.expectRecovery("since the last", time.Hour+time.Minute)
	})
	t.Run("one text however many", func(t *testing.T) {
		s := newLedgerFixture(t)
		fail(3, 0, 31)(s)
		first := s.ledger.Health(a)
		fail(10, time.Minute, 13)(s)
		if h := s.ledger.Health(a); h != first {
			t.Errorf("was %q, is %q", first, h)
		}
	})
}

// Instances are allocated separately: a workload that shares a GPU with a failing program does not count.
func TestWorkloadsOfInstances(t *testing.T) {
	one, two, three := ci(1, 0), ci(2, 0), ci(3, 0)
	for _, tc := range []struct {
		name   string
		happen func(*ledgerFixture)
		want   health.State
	}{
		{"one in a loop while others come and go", func(s *ledgerFixture) {
			s.allocate(one)
			for range 20 {
				s.allocate(two)
				s.allocate(three)
				s.observe(xidEvent(one, 31))
			}
		}, health.Healthy},
		{"three on one instance", func(s *ledgerFixture) {
			for range 3 {
				s.allocate(one)
				s.observe(xidEvent(one, 31))
			}
		}, health.Degraded},
		{"one on each of three", func(s *ledgerFixture) {
			for _, at := range []gpu.Placement{one, two, three} {
				s.allocate(at)
			}
			s.observe(xidEvent(one, 31), xidEvent(two, 31), xidEvent(gi(3), 31))
		}, health.Degraded},
		{"unknown instance", func(s *ledgerFixture) {
			for range 5 {
				s.allocate(one)
				s.allocate(two)
				s.observe(xidEvent(a, 31))
			}
		}, health.Healthy},
	} {
		s := newLedgerFixture(t)
		tc.happen(s)
		if h := s.ledger.Health(a); h.State != tc.want {
			t.Errorf("%s: %s", tc.name, h)
		}
	}
}
