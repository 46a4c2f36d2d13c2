package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

func TestLedger(t *testing.T) {
	a, b := core.WholeGPU("GPU-a"), core.WholeGPU("GPU-b")
	gi := core.Placement{GPU: "GPU-a", GI: 1, CI: core.Whole}
	inGI, otherGI := core.Placement{GPU: "GPU-a", GI: 1, CI: 0}, core.Placement{GPU: "GPU-a", GI: 2, CI: 0}
	at := func(p core.Placement, k core.ObservationKind) core.Observation {
		return core.Observation{At: p, Kind: k}
	}
	event := func(p core.Placement, code uint64) core.Observation {
		return core.Observation{At: p, Kind: core.XID, Code: code}
	}
	for _, tc := range []struct {
		name string
		obs  []core.Observation
		look core.Placement
		want core.Health
	}{
		{"nothing", nil, a, core.Health{}},
		{"lost immediately", []core.Observation{at(a, core.Lost)}, a, core.Health{State: core.GPULost, Reason: core.ReasonLost}},
		{"a neighbour's loss", []core.Observation{at(a, core.Lost)}, b, core.Health{}},
		{"an answer alone does not bring it back", []core.Observation{at(a, core.Lost), at(a, core.Checked)}, a, core.Health{State: core.GPULost, Reason: core.ReasonLost}},
		{"another GPU's answer", []core.Observation{at(a, core.Lost), at(b, core.Checked)}, a, core.Health{State: core.GPULost, Reason: core.ReasonLost}},
		{"one failed probe", []core.Observation{at(a, core.ProbeFailed)}, a, core.Health{}},
		{"three failed probes", []core.Observation{at(a, core.ProbeFailed), at(a, core.ProbeFailed), at(a, core.ProbeFailed)}, a, core.Health{State: core.Unhealthy, Reason: core.ReasonProbe}},
		{"not in a row", []core.Observation{at(a, core.ProbeFailed), at(a, core.ProbeFailed), at(a, core.Checked), at(a, core.ProbeFailed)}, a, core.Health{}},
		{"critical XID", []core.Observation{event(a, 48)}, a, core.Health{State: core.Unhealthy, Reason: core.ReasonXID, Code: 48}},
		{"an answer does not clear an XID", []core.Observation{event(a, 48), at(a, core.Checked)}, a, core.Health{State: core.Unhealthy, Reason: core.ReasonXID, Code: 48}},
		{"application XID", []core.Observation{event(a, 31)}, a, core.Health{}},
		{"XID on the GPU reaches an instance", []core.Observation{event(a, 48)}, inGI, core.Health{State: core.Unhealthy, Reason: core.ReasonXID, Code: 48}},
		{"XID on a GI reaches its own", []core.Observation{event(gi, 94)}, inGI, core.Health{State: core.Degraded, Reason: core.ReasonXID, Code: 94}},
		{"XID on a GI spares its sibling", []core.Observation{event(gi, 94)}, otherGI, core.Health{}},
		{"the worst counts", []core.Observation{at(a, core.Lost), event(a, 48)}, a, core.Health{State: core.GPULost, Reason: core.ReasonLost}},
		{"driver gone reaches all", []core.Observation{at(core.Node, core.DriverUnavailable)}, b, core.Health{State: core.Unknown, Reason: core.ReasonDriver}},
		{"driver back", []core.Observation{at(core.Node, core.DriverUnavailable), at(core.Node, core.DriverAvailable)}, b, core.Health{}},
		{"stuck call", []core.Observation{at(a, core.Unresponsive)}, a, core.Health{State: core.Unhealthy, Reason: core.ReasonUnresponsive}},
		{"stuck call of the driver", []core.Observation{at(core.Node, core.Unresponsive), at(core.Node, core.DriverAvailable)}, a, core.Health{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := core.Ledger{}.Apply(core.DefaultHealthPolicy(), time.Unix(0, 0), at(a, core.Checked), at(b, core.Checked))
			for i, o := range tc.obs {
				l = l.Apply(core.DefaultHealthPolicy(), time.Unix(int64(i), 0), o)
			}
			got := l.Health(tc.look)
			if got := (core.Health{State: got.State, Reason: got.Reason, Code: got.Code}); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

func TestSinceAndCount(t *testing.T) {
	event := core.Observation{At: core.WholeGPU("GPU-a"), Kind: core.XID, Code: 48}
	var l core.Ledger
	for i := range 3 {
		l = l.Apply(core.DefaultHealthPolicy(), time.Unix(int64(100+i), 0), event)
	}
	cs := l.Conditions()
	if len(cs) != 1 || !cs[0].Since.Equal(time.Unix(100, 0)) || cs[0].Count != 3 {
		t.Errorf("conditions: %+v", cs)
	}
}

// Each snapshot may find a lost GPU in another call; the text of the condition must not change.
func TestConditionTextIsStable(t *testing.T) {
	p, a := core.DefaultHealthPolicy(), core.WholeGPU("GPU-a")
	l := core.Ledger{}.Apply(p, time.Unix(0, 0), core.Observation{At: a, Kind: core.Lost, Detail: "nvmlDeviceGetUUID: GPU is lost"})
	first := l.Health(a)
	if again := l.Apply(p, time.Unix(9, 0), core.Observation{At: a, Kind: core.Lost, Detail: "not listed"}).Health(a); again != first {
		t.Errorf("was %q, is %q", first, again)
	}
	l = core.Ledger{}.Apply(p, time.Unix(0, 0), core.Observation{Kind: core.DriverUnavailable, Detail: "not loaded"},
		core.Observation{Kind: core.DriverUnavailable, Detail: "versions differ"})
	if got := l.Health(a).Detail; got != "versions differ" {
		t.Errorf("the driver's reason is %q", got)
	}
}

func TestPolicyOff(t *testing.T) {
	p := core.DefaultHealthPolicy()
	p.Mode = core.ModeOff
	a := core.WholeGPU("GPU-a")
	l := core.Ledger{}.Apply(p, time.Unix(0, 0), core.Observation{At: a, Kind: core.XID, Code: 79})
	if h := l.Health(a); h.State != core.Healthy {
		t.Errorf("an XID counts although health is off: %v", h)
	}
	if h := l.Apply(p, time.Unix(0, 0), core.Observation{At: a, Kind: core.Lost}).Health(a); h.State != core.GPULost {
		t.Errorf("a lost GPU is offered: %v", h)
	}
}

// The history of a GPU is immutable too.
func TestHistoryIsImmutable(t *testing.T) {
	p, a := core.DefaultHealthPolicy(), core.WholeGPU("GPU-a")
	look := func(l core.Ledger) string { c, _ := l.History(a.GPU); return fmt.Sprintf("%+v", c) }
	happen := func(l core.Ledger, at int) core.Ledger {
		now := time.Unix(int64(at)*100_000, 0) // more than a day apart, so that the limit on recoveries is not reached
		return l.Apply(p, now, core.Observation{At: a, Kind: core.Reserved}, core.Observation{At: a, Kind: core.XID, Code: 119},
			core.Observation{At: a, Kind: core.XID, Code: 13}).
			Apply(p, now.Add(time.Second), core.Observation{At: a, Kind: core.DriverRebound}, core.Observation{At: a, Kind: core.Checked}).
			Apply(p, now.Add(2*time.Second), core.Observation{At: a, Kind: core.Checked}).
			Apply(p, now.Add(3*time.Second), core.Observation{At: a, Kind: core.Checked}).
			Apply(p, now.Add(time.Hour), core.Observation{At: a, Kind: core.Checked})
	}
	var base core.Ledger
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
	p, a, b := core.DefaultHealthPolicy(), core.WholeGPU("GPU-a"), core.WholeGPU("GPU-b")
	base := core.Ledger{}.Apply(p, time.Unix(0, 0), core.Observation{At: a, Kind: core.Lost})
	cleared, _, err := base.Apply(p, time.Unix(1, 0), core.Observation{At: a, Kind: core.Checked}).Clear(p, time.Unix(2, 0), core.Command{GPU: a.GPU})
	if err != nil {
		t.Fatal(err)
	}
	more := base.Apply(p, time.Unix(1, 0), core.Observation{At: b, Kind: core.Lost})
	if base.Health(a).State != core.GPULost || base.Health(b).State != core.Healthy {
		t.Errorf("base changed: %+v", base.Conditions())
	}
	if len(cleared.Conditions()) != 0 || len(more.Conditions()) != 4 {
		t.Errorf("cleared %+v, more %+v", cleared.Conditions(), more.Conditions())
	}
}

// Counters of time and of replays are compared over ten minutes.
func TestWindows(t *testing.T) {
	thermal := func(share float64) func(*core.HealthSample) {
		return func(v *core.HealthSample) { v.ThermalSlowdown.Value += uint64(share * float64(checkInterval)) }
	}
	brake := func(share float64) func(*core.HealthSample) {
		return func(v *core.HealthSample) { v.PowerBrake.Value += uint64(share * float64(checkInterval)) }
	}
	replays := func(perMinute uint64) func(*core.HealthSample) {
		return func(v *core.HealthSample) { v.Replays.Value += perMinute / 6 }
	}
	gen := func(g int, f func(*core.HealthSample)) func(*core.HealthSample) {
		return func(v *core.HealthSample) { v.PCIeGen = g; f(v) }
	}
	for _, tc := range []struct {
		name  string
		tick  func(*core.HealthSample) // at each check
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
			run := func(d time.Duration, tick func(*core.HealthSample)) {
				for range int(d / checkInterval) {
					s.setSample(tick)
					s.check(1)
				}
			}
			run(10*time.Minute-checkInterval, tc.tick)
			s.expect("within the window", core.Healthy, "")
			run(checkInterval, tc.tick)
			if tc.cause == "" {
				run(time.Hour, tc.tick)
				s.expect("for an hour", core.Healthy, "")
				return
			}
			s.expect("after a window", core.Degraded, tc.cause)
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
	for name, at := range map[string]func(v *core.HealthSample){
		"gone": func(v *core.HealthSample) {
			v.ThermalSlowdown, v.PowerBrake, v.Replays = core.OptionalUint64{}, core.OptionalUint64{}, core.OptionalUint64{}
		},
		"fell": func(v *core.HealthSample) { v.ThermalSlowdown.Value, v.PowerBrake.Value, v.Replays.Value = 0, 0, 0 },
	} {
		s := newFixtureWith(t, "580", func(v *core.HealthSample) {
			v.ThermalSlowdown.Value, v.PowerBrake.Value, v.Replays.Value = uint64(time.Hour), uint64(time.Hour), 1e6
		})
		for range 58 {
			s.setSample(func(v *core.HealthSample) {
				v.ThermalSlowdown.Value += uint64(checkInterval)
				v.PowerBrake.Value += uint64(checkInterval)
				v.Replays.Value += 1000
			})
			s.check(1)
		}
		s.setSample(at)
		s.check(5)
		s.expect(name, core.Healthy, "")
	}
	t.Run("a gap", func(t *testing.T) { // the driver was unavailable for an hour: the window is as long
		s := newLedgerFixture(t)
		s.now = s.now.Add(time.Hour)
		s.setSample(func(v *core.HealthSample) { v.ThermalSlowdown.Value += uint64(30 * time.Minute) })
		s.check(1)
		s.expect("half of it", core.Healthy, "")
		s.now = s.now.Add(time.Hour)
		s.setSample(func(v *core.HealthSample) { v.ThermalSlowdown.Value += uint64(50 * time.Minute) })
		s.check(1)
		s.expect("most of it", core.Degraded, "SLOWDOWN_THERMAL")
	})
}

// An idle link uses fewer lanes, and lanes that are not supported are not missing.
func TestPCIeWidth(t *testing.T) {
	for _, tc := range []struct {
		name string
		set  func(*core.HealthSample)
		want string
	}{
		{"idle and narrow", func(v *core.HealthSample) { v.PCIeWidth, v.PCIeGen = 4, 1 }, ""},
		{"busy and wide", func(v *core.HealthSample) { v.Busy = true }, ""},
		{"busy and slow", func(v *core.HealthSample) { v.Busy, v.PCIeGen = true, 1 }, ""},
		{"busy and narrow", func(v *core.HealthSample) { v.Busy, v.PCIeWidth = true, 8 }, "PCIE_WIDTH"},
		{"width unknown", func(v *core.HealthSample) { v.Busy, v.PCIeWidth = true, 0 }, ""},
		{"maximum unknown", func(v *core.HealthSample) { v.Busy, v.PCIeWidth, v.PCIeMaxWidth = true, 8, 0 }, ""},
		{"a slot with eight lanes", func(v *core.HealthSample) { v.Busy, v.PCIeWidth, v.PCIeMaxWidth = true, 8, 8 }, ""},
	} {
		s := newLedgerFixture(t)
		s.setSample(tc.set)
		s.check(5)
		if h := s.ledger.Health(a); h.Cause() != tc.want {
			t.Errorf("%s: %s", tc.name, h)
		}
	}
	s := newLedgerFixture(t)
	s.setSample(func(v *core.HealthSample) { v.Busy, v.PCIeWidth = true, 8 })
	s.check(3)
	s.setSample(func(v *core.HealthSample) { v.Busy, v.PCIeWidth = false, 16 })
	s.checkFor(time.Hour)
	s.expect("idle again", core.Degraded, "PCIE_WIDTH")
}
