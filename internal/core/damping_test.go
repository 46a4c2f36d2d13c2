package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// noServiceLimit turns the limit on recoveries off, so that only the dwell time delays recovery.
func noServiceLimit(p *health.Policy) { p.MaxRecoveries = 1000 }

// Each unhealthy episode within six hours doubles the next dwell time, up to the maximum.
func TestDwellDoubles(t *testing.T) {
	s := newLedgerFixture(t, noServiceLimit)
	for _, dwell := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		s.reportXIDs(95)
		if got := s.ledger.Dwell(s.policy, s.now, s.condition("XID_95")); got != dwell*time.Minute {
			t.Errorf("dwell %v, want %v", got, dwell*time.Minute)
		}
		s.expectRecovery("by the recovery action", 30*time.Second+dwell*time.Minute)
	}
	s.checkFor(4 * time.Hour)
	s.reportXIDs(95)
	s.expectRecovery("with the last but one episode six hours ago", 30*time.Second+2*time.Minute)
	s.checkFor(6 * time.Hour)
	s.reportXIDs(95)
	s.expectRecovery("after six hours without an episode", 90*time.Second)
}

func TestDwellBounds(t *testing.T) {
	for _, tc := range []struct{ dwell, most, third time.Duration }{
		{time.Minute, 90 * time.Second, 90 * time.Second},
		{2 * time.Hour, time.Hour, 2 * time.Hour}, // a maximum below the minimum has no effect
		{time.Second, 3 * time.Second, 3 * time.Second},
	} {
		s := newLedgerFixture(t, noServiceLimit, func(p *health.Policy) { p.RecoveryDwell, p.MaxRecoveryDwell = tc.dwell, tc.most })
		for i := range 3 {
			s.reportXIDs(95)
			if i == 2 {
				if got := s.ledger.Dwell(s.policy, s.now, s.condition("XID_95")); got != tc.third {
					t.Errorf("%v up to %v: the third is %v, want %v", tc.dwell, tc.most, got, tc.third)
				}
			}
			for s.ledger.Health(a).State > health.Healthy {
				s.check(1)
			}
		}
	}
}

// A degraded GPU has no unhealthy episode, so its dwell time does not grow.
func TestDwellOfDegraded(t *testing.T) {
	s := newLedgerFixture(t)
	for range 6 {
		s.reportXIDs(94)
		s.expectRecovery("degraded", 90*time.Second)
	}
	if c := s.history(); len(c.UnhealthyEpisodes) != 0 || len(c.Recoveries) != 0 {
		t.Errorf("history: %+v", c)
	}
}

// Recovery requires consecutive complete checks, and evidence that holds all the time.
func TestCleanChecks(t *testing.T) {
	for _, n := range []int{1, 3, 10} {
		s := guest(t)
		s.policy.CleanChecks, s.policy.RecoveryDwell = n, time.Second
		s.reportXIDs(119)
		s.observe(health.Observation{At: a, Kind: health.DriverRebound})
		s.wait(time.Second)
		s.observe(health.Observation{At: a, Kind: health.DriverRebound})
		s.expectRecovery("clean checks", time.Duration(n)*checkInterval)
	}
	for name, bad := range map[string]func(*ledgerFixture){
		"a partial check": func(s *ledgerFixture) {
			s.setSample(func(v *health.Sample) { v.Partial = true })
			s.check(1)
			s.setSample(func(v *health.Sample) { v.Partial = false })
		},
		"a pending call": func(s *ledgerFixture) { s.failing[a.GPU] = health.CallPending; s.check(1); delete(s.failing, a.GPU) },
		"an error":       func(s *ledgerFixture) { s.failing[a.GPU] = health.ProbeFailed; s.check(1); delete(s.failing, a.GPU) },
		"the driver unavailable": func(s *ledgerFixture) {
			s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable}, driverAvailable("580"))
		},
		"the same XID": func(s *ledgerFixture) {
			s.reportXIDs(119)
			s.wait(time.Second)
			s.observe(health.Observation{At: a, Kind: health.DriverRebound})
		},
		"an error and a check in one reading": func(s *ledgerFixture) {
			s.observe(health.Observation{At: a, Kind: health.ProbeFailed}, health.Observation{At: a, Kind: health.Checked, Sample: *s.samples[a.GPU]})
		},
		"a hung call": func(s *ledgerFixture) { s.observe(health.Observation{At: a, Kind: health.Unresponsive}) },
	} {
		t.Run(name, func(t *testing.T) {
			s := guest(t)
			s.policy.RecoveryDwell = time.Second
			s.reportXIDs(119)
			s.wait(time.Second)
			s.observe(health.Observation{At: a, Kind: health.DriverRebound})
			s.check(2)
			bad(s)
			s.check(2)
			if h := s.ledger.Health(a); h.State != health.Unhealthy {
				t.Errorf("two clean checks, a bad one, two clean ones: %s", h)
			}
			s.check(2)
			s.expect("four clean checks in a row", health.Healthy, "")
		})
	}
	t.Run("another fault", func(t *testing.T) {
		s := trusted(t)
		s.reportXIDs(119)
		s.reset()
		s.check(2)
		s.reportXIDs(94) // an independent condition, which delays nothing
		s.checkFor(40 * time.Second)
		s.expect("119 is over", health.Degraded, "XID_94")
	})
}

// faultAndReset makes GPU a unhealthy, and resets it.
func (s *ledgerFixture) faultAndReset(codes ...uint64) {
	s.Helper()
	s.reportXIDs(codes...)
	s.reset()
	s.checkFor(20 * time.Minute)
}

// After the third recovery within a day from a severe cause, the GPU needs service.
func TestTooManyRecoveries(t *testing.T) {
	s := newLedgerFixture(t)
	for _, code := range []uint64{46, 119} {
		s.faultAndReset(code)
		s.expect("recovered", health.Healthy, "")
	}
	s.reportXIDs(140)
	s.reset()
	for range 600 {
		s.check(1)
		if s.ledger.Health(a).Schedulable() {
			t.Fatal("back for a moment")
		}
	}
	s.expect("the third", health.Unhealthy, "NEEDS_SERVICE")
	s.reset()
	s.observe(health.Observation{At: a, Kind: health.DriverRebound})
	s.checkFor(48 * time.Hour)
	s.expect("it does not pass", health.Unhealthy, "NEEDS_SERVICE")
	ledger, cleared, err := s.ledger.Clear(s.policy, s.now, health.Command{GPU: a.GPU, Cause: "needs_service"})
	if err != nil || len(cleared) != 1 {
		t.Fatal(cleared, err)
	}
	s.ledger = ledger
	s.expect("cleared by an operator", health.Healthy, "")
	s.faultAndReset(46)
	s.faultAndReset(119)
	s.expect("the count starts again", health.Healthy, "")
}

func TestRecoveriesThatDoNotCount(t *testing.T) {
	t.Run("three in more than a day", func(t *testing.T) {
		s := newLedgerFixture(t)
		for i := range uint64(6) {
			s.faultAndReset([]uint64{46, 119, 140}[i%3])
			s.checkFor(12 * time.Hour)
			s.expect("recovered", health.Healthy, "")
		}
	})
	for name, happen := range map[string]func(*ledgerFixture){
		"degraded": func(s *ledgerFixture) { s.reportXIDs(94) },
		"contained, withdrawn by the policy": func(s *ledgerFixture) {
			s.policy.DegradedTakesNoWork = true
			s.reportXIDs(94)
		},
		"errors":  func(s *ledgerFixture) { s.failing[a.GPU] = health.ProbeFailed; s.check(3); delete(s.failing, a.GPU) },
		"hangs":   func(s *ledgerFixture) { s.observe(health.Observation{At: a, Kind: health.Unresponsive}) },
		"suspect": func(s *ledgerFixture) { s.reportXIDs(109, 500) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newLedgerFixture(t)
			for range 8 {
				happen(s)
				if s.recovery() == never {
					t.Fatal(s.ledger.Health(a))
				}
			}
			if n := len(s.history().Recoveries); n != 0 {
				t.Errorf("%d recoveries count", n)
			}
		})
	}
	t.Run("together", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.faultAndReset(46, 119, 140, 120)
		s.expect("all together", health.Healthy, "")
		if c := s.history(); len(c.Recoveries) != 1 || len(c.UnhealthyEpisodes) != 1 || len(c.ClearedByReset) != 4 {
			t.Errorf("counted: %+v", c)
		}
	})
	t.Run("one after the other in one episode", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.reportXIDs(95)
		s.checkFor(time.Minute)
		s.reportXIDs(119) // 95 is cleared by the recovery action meanwhile
		s.checkFor(time.Minute)
		s.reset()
		s.checkFor(5 * time.Minute)
		if c := s.history(); len(c.Recoveries) != 1 || len(c.UnhealthyEpisodes) != 1 {
			t.Errorf("counted: %+v", c)
		}
	})
	t.Run("an episode that becomes severe counts", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.failing[a.GPU] = health.ProbeFailed
		s.check(3)
		s.reportXIDs(119)
		delete(s.failing, a.GPU)
		s.reset()
		s.checkFor(10 * time.Minute)
		if n := len(s.history().Recoveries); n != 1 {
			t.Errorf("%d recoveries", n)
		}
	})
}

// The same XID again, soon after the reset that cleared it.
func TestRelapse(t *testing.T) {
	for _, tc := range []struct {
		name  string
		first uint64
		apart time.Duration // from the recovery
		then  uint64
		want  string
	}{
		{"the same immediately", 119, 0, 119, "NEEDS_SERVICE"},
		{"the same within an hour", 119, 30 * time.Minute, 119, "NEEDS_SERVICE"},
		{"the same later", 119, 2 * time.Hour, 119, "XID_119"},
		{"another", 119, 0, 120, "XID_120"},
		{"one that only degrades", 94, 0, 94, "XID_94"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newLedgerFixture(t)
			s.faultAndReset(tc.first)
			s.checkFor(tc.apart)
			s.reportXIDs(tc.then)
			for _, c := range s.ledger.Conditions() {
				if (c.Cause() == "NEEDS_SERVICE") != (tc.want == "NEEDS_SERVICE") && c.Cause() != "XID_119" {
					t.Errorf("conditions: %s", c)
				}
			}
			s.reset()
			s.checkFor(30 * time.Minute)
			if tc.want == "NEEDS_SERVICE" {
				s.expect("after the relapse", health.Unhealthy, "NEEDS_SERVICE")
			} else {
				s.expect("after the second", health.Healthy, "")
			}
		})
	}
	t.Run("cleared by the recovery action", func(t *testing.T) {
		s := newLedgerFixture(t, noServiceLimit)
		for range 5 {
			s.reportXIDs(95, 74, 149)
			if s.recovery() == never {
				t.Fatal(s.ledger.Health(a))
			}
		}
		if n := len(s.history().ClearedByReset); n != 0 {
			t.Errorf("%d cleared without a reset", n)
		}
	})
}
