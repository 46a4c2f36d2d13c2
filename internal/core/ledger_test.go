package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

func TestLedger(t *testing.T) {
	a, b := gpu.WholeGPU("GPU-a"), gpu.WholeGPU("GPU-b")
	gi := gpu.Placement{GPU: "GPU-a", GI: 1, CI: gpu.Whole}
	inGI, otherGI := gpu.Placement{GPU: "GPU-a", GI: 1, CI: 0}, gpu.Placement{GPU: "GPU-a", GI: 2, CI: 0}
	at := func(p gpu.Placement, k health.ObservationKind) health.Observation {
		return health.Observation{At: p, Kind: k}
	}
	event := func(p gpu.Placement, code uint64) health.Observation {
		return health.Observation{At: p, Kind: health.XID, Code: code}
	}
	for _, tc := range []struct {
		name string
		obs  []health.Observation
		look gpu.Placement
		want health.Health
	}{
		{"nothing", nil, a, health.Health{}},
		{"lost immediately", []health.Observation{at(a, health.Lost)}, a, health.Health{State: health.GPULost, Reason: health.ReasonLost}},
		{"a neighbour's loss", []health.Observation{at(a, health.Lost)}, b, health.Health{}},
		{"an answer alone does not bring it back", []health.Observation{at(a, health.Lost), at(a, health.Checked)}, a, health.Health{State: health.GPULost, Reason: health.ReasonLost}},
		{"another GPU's answer", []health.Observation{at(a, health.Lost), at(b, health.Checked)}, a, health.Health{State: health.GPULost, Reason: health.ReasonLost}},
		{"one failed probe", []health.Observation{at(a, health.ProbeFailed)}, a, health.Health{}},
		{"three failed probes", []health.Observation{at(a, health.ProbeFailed), at(a, health.ProbeFailed), at(a, health.ProbeFailed)}, a, health.Health{State: health.Unhealthy, Reason: health.ReasonProbe}},
		{"not in a row", []health.Observation{at(a, health.ProbeFailed), at(a, health.ProbeFailed), at(a, health.Checked), at(a, health.ProbeFailed)}, a, health.Health{}},
		{"critical XID", []health.Observation{event(a, 48)}, a, health.Health{State: health.Unhealthy, Reason: health.ReasonXID, Code: 48}},
		{"an answer does not clear an XID", []health.Observation{event(a, 48), at(a, health.Checked)}, a, health.Health{State: health.Unhealthy, Reason: health.ReasonXID, Code: 48}},
		{"application XID", []health.Observation{event(a, 31)}, a, health.Health{}},
		{"XID on the GPU reaches an instance", []health.Observation{event(a, 48)}, inGI, health.Health{State: health.Unhealthy, Reason: health.ReasonXID, Code: 48}},
		{"XID on a GI reaches its own", []health.Observation{event(gi, 94)}, inGI, health.Health{State: health.Degraded, Reason: health.ReasonXID, Code: 94}},
		{"XID on a GI spares its sibling", []health.Observation{event(gi, 94)}, otherGI, health.Health{}},
		{"the worst counts", []health.Observation{at(a, health.Lost), event(a, 48)}, a, health.Health{State: health.GPULost, Reason: health.ReasonLost}},
		{"driver gone reaches all", []health.Observation{at(gpu.Node, health.DriverUnavailable)}, b, health.Health{State: health.Unknown, Reason: health.ReasonDriver}},
		{"driver back", []health.Observation{at(gpu.Node, health.DriverUnavailable), at(gpu.Node, health.DriverAvailable)}, b, health.Health{}},
		{"stuck call", []health.Observation{at(a, health.Unresponsive)}, a, health.Health{State: health.Unhealthy, Reason: health.ReasonUnresponsive}},
		{"stuck call of the driver", []health.Observation{at(gpu.Node, health.Unresponsive), at(gpu.Node, health.DriverAvailable)}, a, health.Health{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := health.Ledger{}.Apply(health.DefaultPolicy(), time.Unix(0, 0), at(a, health.Checked), at(b, health.Checked))
			for i, o := range tc.obs {
				l = l.Apply(health.DefaultPolicy(), time.Unix(int64(i), 0), o)
			}
			got := l.Health(tc.look)
			if got := (health.Health{State: got.State, Reason: got.Reason, Code: got.Code}); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

func TestSinceAndCount(t *testing.T) {
	event := health.Observation{At: gpu.WholeGPU("GPU-a"), Kind: health.XID, Code: 48}
	var l health.Ledger
	for i := range 3 {
		l = l.Apply(health.DefaultPolicy(), time.Unix(int64(100+i), 0), event)
	}
	cs := l.Conditions()
	if len(cs) != 1 || !cs[0].Since.Equal(time.Unix(100, 0)) || cs[0].Count != 3 {
		t.Errorf("conditions: %+v", cs)
	}
}

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

func TestPolicyOff(t *testing.T) {
	p := health.DefaultPolicy()
	p.Mode = health.ModeOff
	a := gpu.WholeGPU("GPU-a")
	l := health.Ledger{}.Apply(p, time.Unix(0, 0), health.Observation{At: a, Kind: health.XID, Code: 79})
	if h := l.Health(a); h.State != health.Healthy {
		t.Errorf("an XID counts although health is off: %v", h)
	}
	if h := l.Apply(p, time.Unix(0, 0), health.Observation{At: a, Kind: health.Lost}).Health(a); h.State != health.GPULost {
		t.Errorf("a lost GPU is offered: %v", h)
	}
}

// The history of a GPU is immutable too.
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
			t.Fatalf("nothing to see: %s", after)
		}
		happen(base, i+1000)
		if look(base) != before || look(one) != after {
			t.Fatalf("ledger %d was changed by another:\n%s\n%s", i, after, look(one))
		}
		base = one
	}
}

// Apply is pure: ledgers derived from the same one do not affect each other.
func TestLedgerIsImmutable(t *testing.T) {
	p, a, b := health.DefaultPolicy(), gpu.WholeGPU("GPU-a"), gpu.WholeGPU("GPU-b")
	base := health.Ledger{}.Apply(p, time.Unix(0, 0), health.Observation{At: a, Kind: health.Lost})
	cleared, _, err := base.Apply(p, time.Unix(1, 0), health.Observation{At: a, Kind: health.Checked}).Clear(p, time.Unix(2, 0), health.Command{GPU: a.GPU})
	if err != nil {
		t.Fatal(err)
	}
	more := base.Apply(p, time.Unix(1, 0), health.Observation{At: b, Kind: health.Lost})
	if base.Health(a).State != health.GPULost || base.Health(b).State != health.Healthy {
		t.Errorf("base changed: %+v", base.Conditions())
	}
	if len(cleared.Conditions()) != 0 || len(more.Conditions()) != 4 {
		t.Errorf("cleared %+v, more %+v", cleared.Conditions(), more.Conditions())
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
