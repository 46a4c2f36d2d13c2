package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// allocate allocates a placement to a new workload.
func (s *ledgerFixture) allocate(at core.Placement) {
	s.observe(core.Observation{At: at, Kind: core.Reserved})
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
		want   core.HealthState
	}{
		{"one in a loop", xid.Degrades, fail(1, 0, 31), core.Healthy},
		{"unknown workload", xid.Degrades, func(s *ledgerFixture) { s.reportXIDs(31, 31, 31, 31) }, core.Healthy},
		{"two", xid.Degrades, fail(2, 0, 31), core.Healthy},
		{"three", xid.Degrades, fail(3, 0, 31), core.Degraded},
		{"three with different faults", xid.Degrades, func(s *ledgerFixture) { fail(1, 0, 13)(s); fail(1, 0, 31)(s); fail(1, 0, 43)(s) }, core.Degraded},
		{"three within an hour", xid.Degrades, fail(3, 30*time.Minute, 31), core.Degraded},
		{"three in more", xid.Degrades, fail(3, 31*time.Minute, 31), core.Healthy},
		{"three of class Info and Trigger", xid.Degrades, fail(3, 0, 38, 154), core.Healthy},
		{"three, policy None", xid.None, fail(3, 0, 31), core.Healthy},
		{"three, taken seriously", xid.Withdraws, fail(3, 0, 31), core.Unhealthy},
		{"one before it was handed out, two since", xid.Degrades, func(s *ledgerFixture) { s.reportXIDs(31); fail(2, 0, 31)(s) }, core.Degraded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newLedgerFixture(t, func(p *core.HealthPolicy) { p.Workloads = tc.effect })
			tc.happen(s)
			cause := ""
			if tc.want > core.Healthy {
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

// Instances are allocated separately: a workload that shares a GPU with a failing program does not count as
// failing.
func TestWorkloadsOfInstances(t *testing.T) {
	one, two, three := ci(1, 0), ci(2, 0), ci(3, 0)
	for _, tc := range []struct {
		name   string
		happen func(*ledgerFixture)
		want   core.HealthState
	}{
		{"one in a loop while others come and go", func(s *ledgerFixture) {
			s.allocate(one)
			for range 20 {
				s.allocate(two)
				s.allocate(three)
				s.observe(xidEvent(one, 31))
			}
		}, core.Healthy},
		{"three on one instance", func(s *ledgerFixture) {
			for range 3 {
				s.allocate(one)
				s.observe(xidEvent(one, 31))
			}
		}, core.Degraded},
		{"one on each of three", func(s *ledgerFixture) {
			for _, at := range []core.Placement{one, two, three} {
				s.allocate(at)
			}
			s.observe(xidEvent(one, 31), xidEvent(two, 31), xidEvent(gi(3), 31))
		}, core.Degraded},
		{"unknown instance", func(s *ledgerFixture) {
			for range 5 {
				s.allocate(one)
				s.allocate(two)
				s.observe(xidEvent(a, 31))
			}
		}, core.Healthy},
	} {
		s := newLedgerFixture(t)
		tc.happen(s)
		if h := s.ledger.Health(a); h.State != tc.want {
			t.Errorf("%s: %s", tc.name, h)
		}
	}
}
