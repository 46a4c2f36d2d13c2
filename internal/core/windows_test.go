package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

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
