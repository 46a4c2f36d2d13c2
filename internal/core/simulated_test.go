package core_test

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// simulate simulates XIDs of a.
func (s *ledgerFixture) simulate(codes ...uint64) {
	for _, code := range codes {
		o := xidEvent(a, code)
		o.Simulated = true
		s.observe(o)
	}
}

// A simulated fault has the effect of a real one, is marked as simulated, and leaves nothing behind.
func TestSimulatedFault(t *testing.T) {
	s := newLedgerFixture(t)
	for range 4 {
		s.simulate(95)
		s.expect("like the real one", core.Unhealthy, "XID_95")
		if h := s.ledger.Health(a); !h.Simulated || !strings.HasPrefix(h.String(), "simulated: unhealthy: XID 95") {
			t.Error(h)
		}
		s.expectRecovery("by the same evidence, in no longer time", 90*time.Second)
	}
	for range 3 {
		s.allocate(a)
		s.simulate(13)
	}
	s.simulate(109, 109, 119)
	if c := s.history(); len(c.FaultCounts)+len(c.UnhealthyEpisodes)+len(c.Recoveries)+len(c.ClearedByReset) != 0 || !c.UnhealthySince.IsZero() {
		t.Errorf("remembered: %+v", c)
	}
	for _, c := range s.ledger.Conditions() {
		if !c.Simulated {
			t.Errorf("a simulated fault caused %s", c)
		}
	}
	if c := s.condition("XID_109"); c.Repeated || c.State != core.Degraded {
		t.Errorf("a simulated fault was repeated: %+v", c)
	}
}

// Earlier unhealthy episodes do not delay the recovery from a simulated fault.
func TestSimulatedFaultAfterEpisodes(t *testing.T) {
	s := newLedgerFixture(t, noServiceLimit)
	s.faultAndReset(46)
	s.faultAndReset(119)
	s.simulate(95)
	s.expectRecovery("a simulated fault", 90*time.Second)
	s.reportXIDs(95)
	s.expectRecovery("the real thing", 30*time.Second+4*time.Minute)
}

// A simulated and a real fault are separate conditions, and the real one is shown.
func TestSimulatedAndRealFault(t *testing.T) {
	s := newLedgerFixture(t)
	s.simulate(95)
	s.wait(time.Minute)
	s.reportXIDs(95)
	if cs := s.ledger.Conditions(); len(cs) != 2 || cs[0].Simulated || !cs[1].Simulated {
		t.Errorf("conditions: %+v", cs)
	}
	if h := s.ledger.Health(a); h.Simulated {
		t.Errorf("the simulated fault began first: %s", h)
	}
	s = newLedgerFixture(t)
	s.faultAndReset(46)
	s.reportXIDs(94)
	s.simulate(119)
	if h := s.ledger.Health(a); !h.Simulated || h.Code != 119 {
		t.Errorf("the worse counts: %s", h)
	}
	if _, err := s.clear(core.Command{Cause: "XID_119"}); err != nil {
		t.Fatal(err)
	}
	s.expect("the fault is left", core.Degraded, "XID_94")
	if c := s.history(); len(c.UnhealthyEpisodes) != 1 || len(c.ClearedByReset) != 1 || len(c.Recoveries) != 1 {
		t.Errorf("a command on a simulated fault changed the history: %+v", c)
	}
}
