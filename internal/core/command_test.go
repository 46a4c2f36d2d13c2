package core_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// clear and ignore are an operator's commands on a, now.
func (s *ledgerFixture) clear(o health.Command) ([]health.Condition, error) {
	o.GPU = a.GPU
	ledger, cleared, err := s.ledger.Clear(s.policy, s.now, o)
	s.ledger = ledger
	return cleared, err
}

func (s *ledgerFixture) ignore(d time.Duration, cause string) {
	s.Helper()
	ledger, ignored, err := s.ledger.Ignore(s.policy, s.now, health.Command{GPU: a.GPU, Cause: cause}, s.now.Add(d))
	if err != nil || len(ignored) == 0 {
		s.Fatalf("ignored %v: %v", ignored, err)
	}
	s.ledger = ledger
}

func TestClear(t *testing.T) {
	for _, tc := range []struct {
		name  string
		order health.Command
		left  []string
	}{
		{"everything", health.Command{}, nil},
		{"one cause", health.Command{Cause: "XID_119"}, []string{"XID_54", "XID_94"}},
		{"in lower case", health.Command{Cause: "xid_54"}, []string{"XID_94", "XID_119"}},
		{"verified just then", health.Command{VerifiedAt: testStart.Add(checkInterval)}, nil},
	} {
		s := newLedgerFixture(t)
		s.observe(xidEvent(b, 119))
		s.reportXIDs(119, 94, 54)
		previous, before := s.ledger, s.ledger.Conditions()
		cleared, err := s.clear(tc.order)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		if !slices.Equal(previous.Conditions(), before) {
			t.Errorf("%s: the previous ledger has changed: %v", tc.name, previous.Conditions())
		}
		var left []string
		for _, c := range s.ledger.Conditions() {
			if c.At == a {
				left = append(left, c.Cause())
			}
		}
		if !slices.Equal(left, tc.left) || len(cleared) != 3-len(tc.left) {
			t.Errorf("%s: cleared %v, left %v", tc.name, cleared, left)
		}
		s.expectAt("the neighbour", b, health.Unhealthy, "XID_119")
	}
}

// A command that fails changes nothing.
func TestFailedCommands(t *testing.T) {
	later := testStart.Add(checkInterval).Add(time.Hour)
	for _, tc := range []struct {
		name  string
		order health.Command
		want  any
	}{
		{"verified before the fault", health.Command{GPU: a.GPU, VerifiedAt: testStart}, new(*health.NewerFaultError)},
		{"verified before one of the faults", health.Command{GPU: a.GPU, Cause: "XID_95", VerifiedAt: testStart.Add(checkInterval)}, new(*health.NewerFaultError)},
		{"verified in the future", health.Command{GPU: a.GPU, VerifiedAt: later.Add(time.Minute)}, new(*setting.Error)},
		{"no such cause", health.Command{GPU: a.GPU, Cause: "XID_96"}, new(*health.NoConditionError)},
		{"no such GPU", health.Command{GPU: "GPU-z"}, new(*health.NoConditionError)},
		{"healthy GPU", health.Command{GPU: b.GPU}, new(*health.NoConditionError)},
		{"the node", health.Command{}, new(*health.NoConditionError)},
	} {
		s := newLedgerFixture(t)
		s.reportXIDs(119)
		s.wait(later.Sub(s.now))
		s.reportXIDs(95)
		s.observe(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable})
		before := s.ledger.Conditions()
		cleared, _, clearErr := s.ledger.Clear(s.policy, later, tc.order)
		ignored, _, ignoreErr := s.ledger.Ignore(s.policy, later, tc.order, later.Add(time.Hour))
		for _, err := range []error{clearErr, ignoreErr} {
			if err == nil || !errors.As(err, tc.want) || err.Error() == "" {
				t.Errorf("%s: %v", tc.name, err)
			}
		}
		for _, l := range []health.Ledger{cleared, ignored, s.ledger} {
			if !slices.Equal(l.Conditions(), before) {
				t.Errorf("%s: something changed", tc.name)
			}
		}
	}
	s := newLedgerFixture(t)
	s.reportXIDs(119)
	for _, d := range []time.Duration{0, -time.Hour} {
		if _, _, err := s.ledger.Ignore(s.policy, s.now, health.Command{GPU: a.GPU}, s.now.Add(d)); err == nil {
			t.Errorf("ignored until %v from now", d)
		}
	}
}

// Conditions of a GPU that does not respond can't be cleared or ignored.
func TestCommandsOnUnresponsiveGPU(t *testing.T) {
	for kind, checks := range map[health.ObservationKind]int{health.Lost: 1, health.ProbeFailed: 3, health.Unresponsive: 1, health.CallPending: 1} {
		s := newUncheckedFixture(t, "580")
		s.failing[a.GPU] = kind
		s.check(checks)
		s.reportXIDs(119)
		_, _, clearErr := s.ledger.Clear(s.policy, s.now, health.Command{GPU: a.GPU})
		_, _, ignoreErr := s.ledger.Ignore(s.policy, s.now, health.Command{GPU: a.GPU}, s.now.Add(time.Hour))
		for _, err := range []error{clearErr, ignoreErr} {
			if _, ok := errors.AsType[*health.UnresponsiveError](err); !ok {
				t.Errorf("kind %d: %v", kind, err)
			}
		}
		if _, err := s.clear(health.Command{Cause: "XID_119"}); err != nil {
			t.Errorf("its other faults: %v", err)
		}
		delete(s.failing, a.GPU)
		s.check(1)
		if kind == health.CallPending {
			continue // it was only not checked yet
		}
		if _, err := s.clear(health.Command{}); err != nil {
			t.Errorf("kind %d, after it responded: %v", kind, err)
		}
		s.expect("cleared", health.Healthy, "")
	}
}

// A level that is still present is ignored until it is gone. When it is present again, it is a new condition.
func TestClearOfPresentLevel(t *testing.T) {
	for _, l := range levelReasons() {
		s := newLedgerFixture(t)
		s.setSample(l.set)
		s.check(l.checks)
		if _, err := s.clear(health.Command{}); err != nil {
			t.Errorf("%s: %v", l.cause, err)
		}
		s.checkFor(20 * time.Minute)
		s.expect(l.cause+" is ignored", health.Healthy, "")
		s.setSample(l.unset)
		s.check(1)
		if cs := s.ledger.Conditions(); len(cs) != 0 {
			t.Errorf("%s is gone, but conditions: %v", l.cause, cs)
		}
		s.setSample(l.set)
		s.check(l.checks)
		s.expect("present again", l.state, l.cause)
	}
	s := newLedgerFixture(t)
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryDrainP2P })
	s.check(2)
	if _, err := s.clear(health.Command{}); err != nil {
		t.Error(err)
	}
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset })
	s.check(1)
	s.expect("another recovery action", health.Unhealthy, "RECOVERY_ACTION_GPU_RESET")
}

func TestIgnore(t *testing.T) {
	t.Run("until a time", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.reportXIDs(119)
		s.ignore(time.Hour, "")
		s.checkFor(time.Hour - checkInterval)
		s.expect("within the hour", health.Healthy, "")
		s.check(1)
		s.expect("after it", health.Unhealthy, "XID_119")
	})
	t.Run("until it happens again", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.reportXIDs(119)
		s.ignore(time.Hour, "XID_119")
		s.reportXIDs(46)
		s.expect("another", health.Unhealthy, "XID_46")
		s.ignore(time.Hour, "")
		s.expect("ignored, too", health.Healthy, "")
		s.reportXIDs(119)
		s.expect("the same", health.Unhealthy, "XID_119")
	})
	t.Run("until it is over", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.reportXIDs(119)
		s.ignore(24*time.Hour, "")
		s.reset()
		s.ignore(24*time.Hour, "RECOVERY_ACTION_GPU_RESET")
		s.checkFor(10 * time.Minute)
		if cs := s.ledger.Conditions(); len(cs) != 0 {
			t.Errorf("conditions: %v", cs)
		}
		s.reportXIDs(119)
		s.expect("a new one, within an hour of a reset", health.Unhealthy, "NEEDS_SERVICE")
	})
	t.Run("until it is lost again", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.failing[a.GPU] = health.Lost
		s.check(1)
		delete(s.failing, a.GPU)
		s.check(1)
		s.ignore(24*time.Hour, "LOST")
		s.expect("it responds", health.Healthy, "")
		s.failing[a.GPU] = health.Lost
		s.check(1)
		s.expect("lost again", health.GPULost, "LOST")
	})
	t.Run("until the recovery action changes", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryDrainP2P })
		s.check(2)
		s.ignore(24*time.Hour, "")
		s.check(10)
		s.expect("ignored", health.Healthy, "")
		s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReboot })
		s.check(1)
		s.expect("changed", health.Unhealthy, "RECOVERY_ACTION_NODE_REBOOT")
	})
	t.Run("is no recovery", func(t *testing.T) {
		s := newLedgerFixture(t)
		for range 5 {
			s.reportXIDs(119)
			s.ignore(time.Minute, "")
			s.checkFor(2 * time.Minute)
		}
		if n := len(s.history().Recoveries); n != 0 {
			t.Errorf("%d recoveries", n)
		}
	})
}

// A cleared GPU has no recoveries and episodes any more.
func TestClearForgetsHistory(t *testing.T) {
	s := newLedgerFixture(t)
	s.faultAndReset(46)
	s.faultAndReset(119)
	s.reportXIDs(119)
	if c := s.history(); len(c.UnhealthyEpisodes) != 3 || len(c.ClearedByReset) != 2 || len(c.Recoveries) != 2 {
		t.Errorf("before: %+v", c)
	}
	if _, err := s.clear(health.Command{}); err != nil {
		t.Fatal(err)
	}
	if c := s.history(); len(c.UnhealthyEpisodes) != 0 || len(c.ClearedByReset) != 0 || len(c.Recoveries) != 0 || !c.UnhealthySince.IsZero() {
		t.Errorf("after: %+v", c)
	}
	if c := s.history(); len(c.FaultCounts) == 0 || c.LastReset.IsZero() {
		t.Errorf("a command cleared the counts: %+v", c)
	}
}
