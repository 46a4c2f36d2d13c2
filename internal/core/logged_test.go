package core_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Lines of NVLink 5 from public logs, and one that no driver wrote yet.
const (
	bitErrors = "NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001 0x00000000 0x00000000 0x00000000 0x00000000)"
	linkFatal = "NETIR_LINK_EVT Fatal XC0 i0 Link 13 (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
	linkDown  = "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
	otherForm = "NETIR: link 3, severity nonfatal"

	resetRequired = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
)

// xidLine is an XID of a in the kernel log.
func xidLine(code uint64, text string) health.Observation {
	o := xidEvent(a, code)
	o.FromKernelLog, o.Detail = true, text
	return o
}

// withoutAction makes the recovery action of a unreadable from the beginning.
func withoutAction(t *testing.T) *ledgerFixture {
	return newFixtureWith(t, "580.95.05", func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })
}

// The severity in the kernel log decides what XIDs 144 to 150 mean, in whatever order NVML's event and the line come.
func TestSeverityInTheKernelLog(t *testing.T) {
	event := xidEvent(a, 149)
	nonfatal, fatal, down := xidLine(149, bitErrors), xidLine(149, linkFatal), xidLine(149, linkDown)
	both := nonfatal
	both.Repeats = 1
	for _, c := range []struct {
		name           string
		obs            []health.Observation
		atOnce, settle health.State
		count          uint64
	}{
		{"event alone", []health.Observation{event}, health.Degraded, health.Unhealthy, 1},
		{"nonfatal line", []health.Observation{nonfatal}, health.Healthy, health.Healthy, 1},
		{"event, nonfatal line", []health.Observation{event, nonfatal}, health.Healthy, health.Healthy, 1},
		{"nonfatal line, event", []health.Observation{nonfatal, event}, health.Healthy, health.Healthy, 1},
		{"fatal line", []health.Observation{fatal}, health.Unhealthy, health.Unhealthy, 1},
		{"event, fatal line", []health.Observation{event, fatal}, health.Unhealthy, health.Unhealthy, 1},
		{"fatal line, event", []health.Observation{fatal, event}, health.Unhealthy, health.Unhealthy, 1},
		{"link taken down", []health.Observation{down}, health.Degraded, health.Degraded, 1},
		{"event, link taken down", []health.Observation{event, down}, health.Degraded, health.Degraded, 1},
		{"another form", []health.Observation{xidLine(149, otherForm)}, health.Degraded, health.Unhealthy, 1},
		{"no text", []health.Observation{xidLine(149, "")}, health.Degraded, health.Unhealthy, 1},
		{"MIG instance before it", []health.Observation{xidLine(149, "GPU-I:05, "+bitErrors)}, health.Healthy, health.Healthy, 1},

		{"two events, then their lines", []health.Observation{event, event, nonfatal, nonfatal}, health.Healthy, health.Healthy, 2},
		{"two events, one line", []health.Observation{event, event, nonfatal}, health.Degraded, health.Unhealthy, 2},
		{"two events, a line for both", []health.Observation{event, event, both}, health.Healthy, health.Healthy, 2},
		{"the second line is fatal", []health.Observation{event, event, nonfatal, fatal}, health.Unhealthy, health.Unhealthy, 2},
		{"the first line is fatal", []health.Observation{event, event, fatal, nonfatal}, health.Unhealthy, health.Unhealthy, 2},
		{"in turns", []health.Observation{event, nonfatal, event, nonfatal}, health.Healthy, health.Healthy, 2},
		{"lines of both severities", []health.Observation{fatal, nonfatal}, health.Unhealthy, health.Unhealthy, 2},
		{"nonfatal after a link was taken down", []health.Observation{down, nonfatal}, health.Degraded, health.Degraded, 2},
		{"fatal after a link was taken down", []health.Observation{down, fatal}, health.Unhealthy, health.Unhealthy, 2},
	} {
		s := withoutAction(t)
		for _, o := range c.obs {
			s.observe(o)
			s.wait(time.Second)
		}
		if got := s.ledger.Health(a).State; got != c.atOnce {
			t.Errorf("%s: %s, want %s", c.name, got, c.atOnce)
		}
		s.wait(s.policy.SettleTime)
		if got := s.ledger.Health(a).State; got != c.settle {
			t.Errorf("%s: %s at the end of the settle window, want %s", c.name, got, c.settle)
		}
		if got := s.history().FaultCounts; len(got) != 1 || got[0].Count != c.count {
			t.Errorf("%s: counted %+v, want %d", c.name, got, c.count)
		}
	}
}

// A fault that no line explains is not cleared by a nonfatal line of a later one.
func TestNonfatalLineExplainsNoOlderFault(t *testing.T) {
	s := withoutAction(t)
	s.reportXIDs(145)
	s.wait(time.Hour)
	s.reportXIDs(145)
	s.observe(xidLine(145, strings.Replace(bitErrors, "NETIR_BER_EVENT", "RLW_SRC_TRACK", 1)))
	s.expect("after the line of the second", health.Unhealthy, "XID_145")
}

// A fatal line makes the GPU unhealthy until the driver asks for no recovery, and the cause has the driver's text.
func TestFatalLineIsClearedByTheRecoveryAction(t *testing.T) {
	s := newLedgerFixture(t)
	s.observe(xidLine(149, linkFatal))
	s.expect("at once", health.Unhealthy, "XID_149")
	if c := s.condition("XID_149"); c.Severity != xid.Fatal || !strings.Contains(c.Detail, "NETIR_LINK_EVT Fatal") {
		t.Errorf("%+v", c)
	}
	if took := s.recovery(); took == never || took > 5*time.Minute {
		t.Errorf("recovered after %v", took)
	}
}

// A link that software took down is over when all links are up.
func TestLinkTakenDownIsClearedByLinks(t *testing.T) {
	s := withoutAction(t)
	s.observe(xidLine(149, linkDown))
	if got := s.condition("XID_149").Action(); got != xid.XID(155).Action {
		t.Errorf("action %q", got)
	}
	if took := s.recovery(); took == never || took > 5*time.Minute {
		t.Errorf("recovered after %v", took)
	}
}

// An operator's effect of an XID is for all severities, and other XIDs have none.
func TestSeverityOfOtherXIDs(t *testing.T) {
	s := newLedgerFixture(t, func(p *health.Policy) { p.XIDs = map[uint64]xid.Effect{149: xid.Withdraws} })
	s.observe(xidLine(149, bitErrors))
	s.expect("by the operator's setting", health.Unhealthy, "XID_149")
	s = newLedgerFixture(t)
	s.observe(xidLine(95, bitErrors))
	s.expect("an XID without severities", health.Unhealthy, "XID_95")
}

// A severity is kept over a restart.
func TestSeverityOnDisk(t *testing.T) {
	s := withoutAction(t)
	s.observe(xidEvent(a, 149), xidEvent(a, 149), xidLine(149, linkDown))
	text, err := json.Marshal(s.ledger.Checkpoint())
	if err != nil {
		t.Fatal(err)
	}
	var c health.Checkpoint
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	was := s.condition("XID_149")
	s.ledger = health.Restore(s.policy, c, false)
	if got := s.condition("XID_149"); got.Severity != was.Severity || got.Unnamed != was.Unnamed || was.Unnamed != 1 {
		t.Errorf("%+v, was %+v", got, was)
	}
}

// XID 154 names the recovery action, which counts where the driver does not report it.
func TestRecoveryActionInTheKernelLog(t *testing.T) {
	changed := func(to string) string { return "GPU recovery action changed from 0x0 (None) to " + to }
	for _, c := range []struct{ text, cause string }{
		{changed("0x1 (GPU Reset Required)"), "RECOVERY_ACTION_GPU_RESET"},
		{changed("0x1 (PF FLR)"), "RECOVERY_ACTION_GPU_RESET"},
		{changed("0x2 (Node Reboot Required)"), "RECOVERY_ACTION_NODE_REBOOT"},
		{changed("0x2 (OS Reboot)"), "RECOVERY_ACTION_NODE_REBOOT"},
		{changed("0x4 (Drain and Reset)"), "RECOVERY_ACTION_DRAIN_AND_RESET"},
		{changed("0x7 (System Reboot)"), "RECOVERY_ACTION_SYSTEM_REBOOT"},
		{changed("0x63 (Of a later driver)"), "RECOVERY_ACTION_UNKNOWN_ACTION"},
		{"GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", ""},
		{changed(""), ""},
		{changed("0x (None)"), ""},
		{changed("0x1"), ""},
		{"GPU recovery action is 0x1 (GPU Reset Required)", ""},
		{"", ""},
	} {
		s := withoutAction(t)
		s.observe(xidLine(154, c.text))
		want := health.Healthy
		if c.cause != "" {
			want = health.Unhealthy
		}
		s.expect(c.text, want, c.cause)
		s.check(3)
		s.expect(c.text+", after checks", want, c.cause)
	}
	s := withoutAction(t)
	s.observe(xidLine(154, changed("0x3 (Drain P2P)")))
	s.check(1)
	s.expect("drain P2P after a check", health.Unhealthy, "RECOVERY_ACTION_DRAIN_P2P")
}

// The action of the kernel log comes after NVML's event of XID 154, and before the first check too.
func TestOrderOfTheLoggedAction(t *testing.T) {
	s := withoutAction(t)
	s.observe(xidEvent(a, 154), xidLine(154, resetRequired))
	s.expect("after the event", health.Unhealthy, "RECOVERY_ACTION_GPU_RESET")

	s = newUncheckedFixture(t, "580.95.05")
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })
	s.observe(xidLine(154, resetRequired))
	if h := s.ledger.Health(a); h.Cause() == "RECOVERY_ACTION_GPU_RESET" {
		t.Error("it counts before a check has shown whether the driver reports the action")
	}
	s.check(1)
	s.expect("after the first check", health.Unhealthy, "RECOVERY_ACTION_GPU_RESET")

	s = newUncheckedFixture(t, "580.95.05")
	s.observe(xidLine(154, resetRequired))
	s.check(1)
	s.expect("the driver reports none", health.Healthy, "")
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })
	s.check(1)
	s.expect("the driver reported none later", health.Healthy, "")
}

// What ends the action of the kernel log: another line, a reset, a reboot, or the driver's own report.
func TestEndOfTheLoggedAction(t *testing.T) {
	const rebootRequired = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
	none := xidLine(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
	reset := health.Observation{At: a, Kind: health.WasReset}
	operatorClears := func(s *ledgerFixture) {
		if _, err := s.clear(health.Command{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, action string
		end          func(*ledgerFixture)
		ends         bool
	}{
		{"nothing", resetRequired, func(*ledgerFixture) {}, false},
		{"a line", resetRequired, func(s *ledgerFixture) { s.observe(none) }, true},
		{"a reset", resetRequired, func(s *ledgerFixture) { s.observe(reset) }, true},
		{"a reset where a reboot is required", rebootRequired, func(s *ledgerFixture) { s.observe(reset) }, false},
		{"the driver's report", resetRequired, func(s *ledgerFixture) {
			s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryNone })
		}, true},
		{"a restart of the agent", resetRequired, func(s *ledgerFixture) {
			s.ledger = health.Restore(s.policy, s.ledger.Checkpoint(), false)
			s.observe(driverAvailable("580.95.05"))
		}, false},
		{"an operator", rebootRequired, operatorClears, true},
		{"an operator, then another line", rebootRequired, func(s *ledgerFixture) {
			operatorClears(s)
			s.check(1)
			s.observe(xidLine(154, rebootRequired))
		}, false},
		{"an operator ignores it, then another line", rebootRequired, func(s *ledgerFixture) {
			s.ignore(24*time.Hour, "")
			s.expect("ignored", health.Healthy, "")
			s.observe(xidLine(154, rebootRequired))
		}, false},
		{"a reboot", rebootRequired, func(s *ledgerFixture) {
			s.ledger = health.Restore(s.policy, s.ledger.Checkpoint(), true)
			s.observe(driverAvailable("580.95.05"))
		}, true},
	} {
		s := withoutAction(t)
		s.observe(xidLine(154, c.action))
		s.check(1)
		c.end(s)
		s.checkFor(10 * time.Minute)
		if got := s.ledger.Health(a); (got.State == health.Healthy) != c.ends {
			t.Errorf("%s: %s", c.name, got)
		}
	}
}

// A log that is read from its beginning again has lines of faults and actions that are over. None of them begins anew.
func TestLogThatIsReadAgainBeginsNothingAnew(t *testing.T) {
	const rebootRequired = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
	reset := func(s *ledgerFixture) { s.observe(health.Observation{At: a, Kind: health.WasReset}) }
	operator := func(s *ledgerFixture) {
		if _, err := s.clear(health.Command{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name string
		line health.Observation
		end  func(*ledgerFixture)
	}{
		{"a fatal fault, a reset", xidLine(149, linkFatal), reset},
		{"a fatal fault, an operator", xidLine(149, linkFatal), operator},
		{"an action, a reset", xidLine(154, resetRequired), reset},
		{"an action, an operator", xidLine(154, rebootRequired), operator},
	} {
		s := withoutAction(t)
		s.observe(c.line)
		s.check(1)
		if got := s.ledger.Health(a).State; got != health.Unhealthy {
			t.Errorf("%s: %s at first", c.name, got)
		}
		c.end(s)
		s.checkFor(5 * time.Minute)
		s.expect(c.name+": over", health.Healthy, "")
		s.ledger = health.Restore(s.policy, s.ledger.Checkpoint(), false)
		s.observe(driverAvailable("580.95.05"))
		s.check(1)
		again := loggedAgo(c.line, 5*time.Minute+checkInterval*2)
		again.Backlog, again.Again = true, true
		s.observe(again)
		s.check(1)
		s.expect(c.name+": read again", health.Healthy, "")
	}
}

// An action that the log named before a reset is over, although the agent reads its line after that.
func TestLoggedActionFromBeforeAReset(t *testing.T) {
	s := withoutAction(t)
	s.observe(health.Observation{At: a, Kind: health.WasReset})
	s.wait(time.Minute)
	s.observe(loggedAgo(xidLine(154, resetRequired), 90*time.Second))
	s.check(1)
	s.expect("logged before the reset", health.Healthy, "")
	s.observe(loggedAgo(xidLine(154, resetRequired), 5*time.Second))
	s.check(1)
	s.expect("logged after it", health.Unhealthy, "RECOVERY_ACTION_GPU_RESET")
}

// A line that is read late says no more about a fault that an operator has cleared.
func TestLateLineOfAClearedFault(t *testing.T) {
	s := withoutAction(t)
	s.observe(xidEvent(a, 149))
	s.wait(20 * time.Second)
	if _, err := s.clear(health.Command{}); err != nil {
		t.Fatal(err)
	}
	s.wait(20 * time.Second)
	s.observe(loggedAgo(xidLine(149, linkFatal), 40*time.Second))
	s.expect("cleared", health.Healthy, "")
	if got := s.history().FaultCounts; len(got) != 1 || got[0].Count != 1 {
		t.Errorf("%+v", got)
	}
}
