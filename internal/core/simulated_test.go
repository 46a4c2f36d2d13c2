package core_test

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// rehearse simulates XIDs of a.
func (s *story) rehearse(codes ...uint64) {
	for _, code := range codes {
		o := xidEvent(a, code)
		o.Simulated = true
		s.see(o)
	}
}

// A rehearsal has the effect of the real thing, says what it is, and leaves no trace.
func TestRehearsal(t *testing.T) {
	s := tell(t)
	for range 4 {
		s.rehearse(95)
		s.expect("like the real one", core.Unhealthy, "XID_95")
		if h := s.ledger.Health(a); !h.Simulated || !strings.HasPrefix(h.String(), "simulated: unhealthy: XID 95") {
			t.Error(h)
		}
		s.expectRecovery("by the same evidence, in no longer time", 90*time.Second)
	}
	for range 3 {
		s.handOut(a)
		s.rehearse(13)
	}
	s.rehearse(109, 109, 119)
	if c := s.chart(); len(c.FaultCounts)+len(c.UnhealthyEpisodes)+len(c.Recoveries)+len(c.ClearedByReset) != 0 || !c.UnhealthySince.IsZero() {
		t.Errorf("remembered: %+v", c)
	}
	for _, c := range s.ledger.Conditions() {
		if !c.Simulated {
			t.Errorf("a rehearsal brought about %s", c)
		}
	}
	if c := s.condition("XID_109"); c.Repeated || c.State != core.Degraded {
		t.Errorf("a rehearsal repeats itself: %+v", c)
	}
}

// A past that makes a GPU's recovery slow has nothing to do with a rehearsal.
func TestRehearsalAfterBadSpells(t *testing.T) {
	s := tell(t, unlatched)
	s.mend(46)
	s.mend(119)
	s.rehearse(95)
	s.expectRecovery("a rehearsal", 90*time.Second)
	s.xid(95)
	s.expectRecovery("the real thing", 30*time.Second+4*time.Minute)
}

// A rehearsal and the real thing are two, and the real one is the one that is told.
func TestRehearsalAndFault(t *testing.T) {
	s := tell(t)
	s.rehearse(95)
	s.pass(time.Minute)
	s.xid(95)
	if cs := s.ledger.Conditions(); len(cs) != 2 || cs[0].Simulated || !cs[1].Simulated {
		t.Errorf("stands: %+v", cs)
	}
	if h := s.ledger.Health(a); h.Simulated {
		t.Errorf("the rehearsal began first: %s", h)
	}
	s = tell(t)
	s.mend(46)
	s.xid(94)
	s.rehearse(119)
	if h := s.ledger.Health(a); !h.Simulated || h.Code != 119 {
		t.Errorf("the worse counts: %s", h)
	}
	if _, err := s.clear(core.Command{Cause: "XID_119"}); err != nil {
		t.Fatal(err)
	}
	s.expect("the fault is left", core.Degraded, "XID_94")
	if c := s.chart(); len(c.UnhealthyEpisodes) != 1 || len(c.ClearedByReset) != 1 || len(c.Recoveries) != 1 {
		t.Errorf("an order about a rehearsal forgets what was real: %+v", c)
	}
}
