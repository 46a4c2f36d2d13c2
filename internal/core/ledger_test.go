package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Each snapshot may find a lost GPU in another call; the text of the condition must not change.
func TestConditionTextIsStable(t *testing.T) {
	p, a := health.DefaultPolicy(), gpu.WholeGPU("GPU-a")
	l := health.Ledger{}.Apply(p, time.Unix(0, 0), health.Observation{At: a, Kind: health.Lost, Detail: "nvmlDeviceGetUUID: GPU is lost"})
	first := l.Health(a)
	if again := l.Apply(p, time.Unix(9, 0), health.Observation{At: a, Kind: health.Lost, Detail: "not listed"}).Health(a); again != first {
		t.Errorf("was %q, is %q", first, again)
	}
	l = health.Ledger{}.Apply(p, time.Unix(0, 0), health.Observation{Kind: health.DriverUnavailable, Detail: "not loaded"},
		health.Observation{Kind: health.DriverUnavailable, Detail: "versions differ"})
	if got := l.Health(a).Detail; got != "versions differ" {
		t.Errorf("the driver's reason is %q", got)
	}
}

// The history of a GPU is immutable.
func TestHistoryIsImmutable(t *testing.T) {
	p, a := health.DefaultPolicy(), gpu.WholeGPU("GPU-a")
	look := func(l health.Ledger) string { c, _ := l.History(a.GPU); return fmt.Sprintf("%+v", c) }
	happen := func(l health.Ledger, at int) health.Ledger {
		now := time.Unix(int64(at)*100_000, 0) // more than a day apart, so that the limit on recoveries is not reached
		return l.Apply(p, now, health.Observation{At: a, Kind: health.Reserved}, health.Observation{At: a, Kind: health.XID, Code: 119},
			health.Observation{At: a, Kind: health.XID, Code: 13}).
			Apply(p, now.Add(time.Second), health.Observation{At: a, Kind: health.DriverRebound}, health.Observation{At: a, Kind: health.Checked}).
			Apply(p, now.Add(2*time.Second), health.Observation{At: a, Kind: health.Checked}).
			Apply(p, now.Add(3*time.Second), health.Observation{At: a, Kind: health.Checked}).
			Apply(p, now.Add(time.Hour), health.Observation{At: a, Kind: health.Checked})
	}
	var base health.Ledger
	for i := range 40 {
		before := look(base)
		one := happen(base, i)
		after := look(one)
		if c, _ := one.History(a.GPU); i > 0 && (len(c.ClearedByReset) == 0 || len(c.UnhealthyEpisodes) == 0 || len(c.FaultCounts) != 2) {
			t.Fatalf("no history: %s", after)
		}
		happen(base, i+1000)
		if look(base) != before || look(one) != after {
			t.Fatalf("ledger %d was changed by another:\n%s\n%s", i, after, look(one))
		}
		base = one
	}
}

// Counters of time and of replays are compared over ten minutes.
func TestWindows(t *testing.T) {
	thermal := func(share float64) func(*health.Sample) {
		return func(v *health.Sample) { v.ThermalSlowdown.Value += uint64(share * float64(checkInterval)) }
	}
	brake := func(share float64) func(*health.Sample) {
		return func(v *health.Sample) { v.PowerBrake.Value += uint64(share * float64(checkInterval)) }
	}
	replays := func(perMinute uint64) func(*health.Sample) {
		return func(v *health.Sample) { v.Replays.Value += perMinute / 6 }
	}
	gen := func(g int, f func(*health.Sample)) func(*health.Sample) {
		return func(v *health.Sample) { v.PCIeGen = g; f(v) }
	}
	for _, tc := range []struct {
		name  string
		tick  func(*health.Sample) // at each check
		cause string
	}{
		{"cool", thermal(0), ""},
		{"throttled for half of the time", thermal(0.5), ""},
		{"throttled for more", thermal(0.7), "SLOWDOWN_THERMAL"},
		{"always throttled", thermal(1), "SLOWDOWN_THERMAL"},
		{"braked for half of the time", brake(0.5), ""},
		{"braked for more", brake(0.7), "SLOWDOWN_POWER"},
		{"a sound link", replays(6), ""},
		{"a sound link of generation 5", replays(30), ""},
		{"a bad link", replays(36), "PCIE_REPLAYS"},
		{"what is sound at 5 is not at 1", gen(1, replays(12)), "PCIE_REPLAYS"},
		{"any link may have eight", gen(1, replays(6)), ""},
		{"of an unknown generation", gen(0, replays(12)), "PCIE_REPLAYS"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newLedgerFixture(t)
			run := func(d time.Duration, tick func(*health.Sample)) {
				for range int(d / checkInterval) {
					s.setSample(tick)
					s.check(1)
				}
			}
			run(10*time.Minute-checkInterval, tc.tick)
			s.expect("within the window", health.Healthy, "")
			run(checkInterval, tc.tick)
			if tc.cause == "" {
				run(time.Hour, tc.tick)
				s.expect("for an hour", health.Healthy, "")
				return
			}
			s.expect("after a window", health.Degraded, tc.cause)
			previous := s.ledger.Health(a)
			run(time.Hour, tc.tick)
			if h := s.ledger.Health(a); h != previous {
				t.Errorf("was %q, is %q", previous, h)
			}
			s.expectRecovery("without", 11*time.Minute)
		})
	}
}

// A counter that is missing or that decreased gives no information on its window.
func TestWindowsOfMissingCounters(t *testing.T) {
	for name, at := range map[string]func(v *health.Sample){
		"gone": func(v *health.Sample) {
			v.ThermalSlowdown, v.PowerBrake, v.Replays = gpu.OptionalUint64{}, gpu.OptionalUint64{}, gpu.OptionalUint64{}
		},
		"fell": func(v *health.Sample) { v.ThermalSlowdown.Value, v.PowerBrake.Value, v.Replays.Value = 0, 0, 0 },
	} {
		s := newFixtureWith(t, "580", func(v *health.Sample) {
			v.ThermalSlowdown.Value, v.PowerBrake.Value, v.Replays.Value = uint64(time.Hour), uint64(time.Hour), 1e6
		})
		for range 58 {
			s.setSample(func(v *health.Sample) {
				v.ThermalSlowdown.Value += uint64(checkInterval)
				v.PowerBrake.Value += uint64(checkInterval)
				v.Replays.Value += 1000
			})
			s.check(1)
		}
		s.setSample(at)
		s.check(5)
		s.expect(name, health.Healthy, "")
	}
	t.Run("a gap", func(t *testing.T) { // the driver was unavailable for an hour: the window is as long
		s := newLedgerFixture(t)
		s.now = s.now.Add(time.Hour)
		s.setSample(func(v *health.Sample) { v.ThermalSlowdown.Value += uint64(30 * time.Minute) })
		s.check(1)
		s.expect("half of it", health.Healthy, "")
		s.now = s.now.Add(time.Hour)
		s.setSample(func(v *health.Sample) { v.ThermalSlowdown.Value += uint64(50 * time.Minute) })
		s.check(1)
		s.expect("most of it", health.Degraded, "SLOWDOWN_THERMAL")
	})
}

// An idle link uses fewer lanes, and lanes that are not supported are not missing.
func TestPCIeWidth(t *testing.T) {
	for _, tc := range []struct {
		name string
		set  func(*health.Sample)
		want string
	}{
		{"idle and narrow", func(v *health.Sample) { v.PCIeWidth, v.PCIeGen = 4, 1 }, ""},
		{"busy and wide", func(v *health.Sample) { v.Busy = true }, ""},
		{"busy and slow", func(v *health.Sample) { v.Busy, v.PCIeGen = true, 1 }, ""},
		{"busy and narrow", func(v *health.Sample) { v.Busy, v.PCIeWidth = true, 8 }, "PCIE_WIDTH"},
		{"width unknown", func(v *health.Sample) { v.Busy, v.PCIeWidth = true, 0 }, ""},
		{"maximum unknown", func(v *health.Sample) { v.Busy, v.PCIeWidth, v.PCIeMaxWidth = true, 8, 0 }, ""},
		{"a slot with eight lanes", func(v *health.Sample) { v.Busy, v.PCIeWidth, v.PCIeMaxWidth = true, 8, 8 }, ""},
	} {
		s := newLedgerFixture(t)
		s.setSample(tc.set)
		s.check(5)
		if h := s.ledger.Health(a); h.Cause() != tc.want {
			t.Errorf("%s: %s", tc.name, h)
		}
	}
	s := newLedgerFixture(t)
	s.setSample(func(v *health.Sample) { v.Busy, v.PCIeWidth = true, 8 })
	s.check(3)
	s.setSample(func(v *health.Sample) { v.Busy, v.PCIeWidth = false, 16 })
	s.checkFor(time.Hour)
	s.expect("idle again", health.Degraded, "PCIE_WIDTH")
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
		{"three, policy Withdraws", xid.Withdraws, fail(3, 0, 31), health.Unhealthy},
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

// On a shared GPU one workload that fails again and again is not told from others that come and go meanwhile: the faults count for none. A
// MIG instance that is shared is no different, and its GPU is not as long as the XID names no instance.
func TestWorkloadsOfSharedGPU(t *testing.T) {
	for name, at := range map[string]gpu.Placement{"GPU": a, "instance": ci(1, 0), "an XID of the whole GPU": a} {
		s := newLedgerFixture(t)
		s.reportXIDs(31) // before the agent knew of an allocation
		for range 5 {
			shared := at
			if name == "an XID of the whole GPU" {
				shared = ci(1, 0)
				s.allocate(ci(2, 0))
			}
			s.observe(health.Observation{At: shared, Kind: health.Reserved, Shared: true})
			s.observe(xidEvent(at, 31))
		}
		s.expect(name, health.Healthy, "")
		for range 2 { // it is exclusive from now on
			s.allocate(at)
			s.observe(xidEvent(at, 31))
		}
		if name != "an XID of the whole GPU" {
			s.expect(name+", exclusive", health.Degraded, "WORKLOADS_FAILING")
		}
	}
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
