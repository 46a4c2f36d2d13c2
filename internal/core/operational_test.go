package core_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// operationalEvent is the observation of an operational event of a.
func operationalEvent(e health.OperationalEvent) health.Observation {
	return health.Observation{At: a, Kind: health.Operational, Operational: e}
}

// The NVML event, the operational event and the kernel log's line of one XID are one occurrence, in whatever order they come and with the
// event late. The same XID from a source that has reported it is another one.
func TestXIDOfThreeSourcesIsCountedOnce(t *testing.T) {
	event, log, operational := xidEvent(a, 119), xidEvent(a, 119), xidEvent(a, 119)
	log.FromKernelLog, operational.FromOperational = true, true
	late := event
	late.Age.Most = time.Minute
	for _, c := range []struct {
		name string
		obs  []health.Observation
		want uint64
	}{
		{"event, operational, log", []health.Observation{event, operational, log}, 1},
		{"event, log, operational", []health.Observation{event, log, operational}, 1},
		{"operational, event, log", []health.Observation{operational, event, log}, 1},
		{"operational, log, event", []health.Observation{operational, log, event}, 1},
		{"log, operational, event", []health.Observation{log, operational, event}, 1},
		{"operational, late event", []health.Observation{operational, late}, 1},
		{"operational alone", []health.Observation{operational}, 1},
		{"twice", []health.Observation{event, operational, log, event, operational, log}, 2},
		{"twice, operational first", []health.Observation{operational, event, log, operational, event, log}, 2},
	} {
		s := newLedgerFixture(t)
		for _, o := range c.obs {
			s.observe(o)
			s.wait(time.Second)
		}
		if counts := s.history().FaultCounts; len(counts) != 1 || counts[0].Count != c.want {
			t.Errorf("%s: %+v, want %d", c.name, counts, c.want)
		}
		s.expect(c.name, health.Unhealthy, "XID_119")
	}
}

// A line that was in the kernel log before the agent started is the occurrence that an NVML event and an operational event reported.
func TestBacklogOfAnOperationalXID(t *testing.T) {
	s := newLedgerFixture(t)
	operational, line := xidEvent(a, 119), xidEvent(a, 119)
	operational.FromOperational, line.FromKernelLog, line.Backlog = true, true, true
	s.reportXIDs(119)
	s.observe(operational)
	s.wait(time.Hour)
	s.observe(loggedAgo(line, time.Hour))
	if counts := s.history().FaultCounts; len(counts) != 1 || counts[0].Count != 1 {
		t.Errorf("%+v", counts)
	}
}

// An operational event that is not fatal has no effect on health. It is counted, with numbers that have no name as numbers.
func TestOperationalEventIsNoFault(t *testing.T) {
	s := newLedgerFixture(t)
	for _, e := range []health.OperationalEvent{
		{Module: "GSP", Code: 7, Severity: health.SeverityRecoverable},
		{Module: "GSP", Code: 7, Severity: health.SeverityRecoverable},
		{Code: 8, Severity: 55, Attributes: 1 << 20, GroupAttributes: 1<<2 | 1<<9},
		{Module: "PMU", Severity: health.SeverityRecoverable, Attributes: 1<<6 | 1<<2, XID: 79},
	} {
		s.observe(operationalEvent(e))
	}
	s.expect("after them", health.Healthy, "")
	h := s.history()
	var got []string
	for _, c := range h.Operational {
		got = append(got, fmt.Sprintf("%d %s: %s", c.Count, c.Event.Cause(), c.Event.Detail()))
	}
	want := []string{
		"2 OPERATIONAL_GSP_7: recoverable",
		"1 OPERATIONAL_UNKNOWN_8: severity 55, attributes 0x100000, simulated, group attributes 0x200",
		"1 OPERATIONAL_PMU_0: recoverable, XID 79, propagated, events dropped",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") || h.EventsDropped != 1 || len(h.FaultCounts) > 0 {
		t.Errorf("%q, %d dropped, faults %v", got, h.EventsDropped, h.FaultCounts)
	}
	s = newLedgerFixture(t, func(p *health.Policy) { p.Mode = health.ModeOff })
	s.observe(operationalEvent(health.OperationalEvent{Severity: health.SeverityFatal}))
	if h := s.history(); len(h.Operational) > 0 {
		t.Errorf("health off: %v", h.Operational)
	}
	s.expect("health off", health.Healthy, "")
}

// A fatal event without an XID degrades its GPU until checks have passed, also one with numbers of a later driver.
func TestFatalOperationalEvent(t *testing.T) {
	const uncontained, propagated, previous, simulated = 1 << 0, 1 << 2, 1 << 1, 1 << 2
	for _, c := range []struct {
		name  string
		event health.OperationalEvent
		fault bool
	}{
		{"fatal", health.OperationalEvent{Module: "GSP", Code: 7, Severity: health.SeverityFatal}, true},
		{"uncontained", health.OperationalEvent{Severity: health.SeverityFatal, Attributes: uncontained}, true},
		{"numbers of a later driver", health.OperationalEvent{Code: 1 << 31, Severity: 55, Attributes: 1 << 30, GroupAttributes: 1 << 30}, true},
		{"less than fatal", health.OperationalEvent{Severity: 39}, false},
		{"propagated", health.OperationalEvent{Severity: health.SeverityFatal, Attributes: propagated}, false},
		{"about a previous error", health.OperationalEvent{Severity: health.SeverityFatal, GroupAttributes: previous}, false},
		{"simulated", health.OperationalEvent{Severity: health.SeverityFatal, GroupAttributes: simulated}, false},
		{"with an XID", health.OperationalEvent{Severity: health.SeverityFatal, XID: 31}, false},
	} {
		s := newLedgerFixture(t)
		s.observe(operationalEvent(c.event))
		if !c.fault {
			s.expect(c.name, health.Healthy, "")
			continue
		}
		s.expect(c.name, health.Degraded, "OPERATIONAL_EVENT")
		s.wait(time.Hour)
		s.expect(c.name+", without a check", health.Degraded, "OPERATIONAL_EVENT")
		s.failing[a.GPU] = health.ProbeFailed
		s.check(2)
		delete(s.failing, a.GPU)
		s.expectRecovery(c.name, 70*time.Second)
	}
	s := newLedgerFixture(t)
	for code := range uint32(1000) {
		s.observe(operationalEvent(health.OperationalEvent{Module: "GSP", Code: code, Severity: health.SeverityFatal}))
	}
	if got := s.ledger.Conditions(); len(got) != 1 || got[0].Count != 1000 || got[0].Detail != "OPERATIONAL_GSP_0" {
		t.Errorf("%+v", got)
	}
}

// What an event is, is decided by its XID, its severity and the attributes that nvml.h names.
func TestMeaningOfOperationalEvents(t *testing.T) {
	const propagated, dropped, recovered, previous, simulated, later = 1 << 2, 1 << 6, 1 << 0, 1 << 1, 1 << 2, 1 << 30
	for _, c := range []struct {
		name         string
		event        health.OperationalEvent
		fault, check bool
	}{
		{"informational", health.OperationalEvent{Severity: health.SeverityInformational}, false, false},
		{"corrected", health.OperationalEvent{Severity: health.SeverityCorrected}, false, false},
		{"recoverable", health.OperationalEvent{Severity: health.SeverityRecoverable}, false, true},
		{"fatal", health.OperationalEvent{Severity: health.SeverityFatal}, false, true},
		{"a severity of a later driver", health.OperationalEvent{Severity: 35}, false, true},
		{"a lesser one", health.OperationalEvent{Severity: 25}, false, false},
		{"XID", health.OperationalEvent{Severity: health.SeverityInformational, XID: 63}, true, true},
		{"XID, unknown attributes", health.OperationalEvent{XID: 63, Attributes: later, GroupAttributes: later}, true, true},
		{"XID, recovered", health.OperationalEvent{XID: 63, GroupAttributes: recovered}, true, true},
		{"XID, propagated", health.OperationalEvent{XID: 63, Attributes: propagated}, false, true},
		{"XID, previous error", health.OperationalEvent{XID: 63, GroupAttributes: previous}, false, true},
		{"XID, simulated", health.OperationalEvent{Severity: health.SeverityFatal, XID: 79, GroupAttributes: simulated}, false, false},
		{"events dropped", health.OperationalEvent{Severity: health.SeverityInformational, Attributes: dropped}, false, true},
		{"events dropped, simulated", health.OperationalEvent{Attributes: dropped, GroupAttributes: simulated}, false, true},
	} {
		if fault, check := c.event.Fault(), operationalEvent(c.event).CallsForCheck(); fault != c.fault || check != c.check {
			t.Errorf("%s: fault %t, check %t", c.name, fault, check)
		}
	}
}

// A driver that invents kinds of events makes the history no longer than its bound, and each event is still counted.
func TestOperationalKindsAreBounded(t *testing.T) {
	s := newLedgerFixture(t)
	for i := range uint32(1000) {
		s.observe(operationalEvent(health.OperationalEvent{Module: "GSP", Code: i, Severity: health.Severity(i % 50)}))
	}
	var n uint64
	kinds := s.history().Operational
	for _, c := range kinds {
		n += c.Count
	}
	if len(kinds) > 40 || n != 1000 {
		t.Errorf("%d kinds, %d events", len(kinds), n)
	}
}

// The history on disk keeps operational events. An agent that does not know them reads the rest, and one that does reads a file without.
func TestOperationalEventsOnDisk(t *testing.T) {
	s := newLedgerFixture(t)
	operational := xidEvent(a, 119)
	operational.FromOperational = true
	s.observe(operationalEvent(health.OperationalEvent{Module: "GSP", Severity: health.SeverityFatal, Attributes: 1 << 6, XID: 119}), operational)
	text, err := json.Marshal(s.ledger.Checkpoint())
	if err != nil {
		t.Fatal(err)
	}
	var c health.Checkpoint
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	was := s.now
	s.ledger = health.Restore(s.policy, c.Shift(time.Hour), false)
	h := s.history()
	if len(h.Operational) != 1 || h.EventsDropped != 1 || !h.Operational[0].Last.Equal(was.Add(time.Hour)) || !h.FaultCounts[0].Recent[0].FromOperational {
		t.Errorf("%+v", h)
	}
	without, err := json.Marshal(newLedgerFixture(t).ledger.Checkpoint())
	if err != nil || strings.Contains(string(without), "perational") || strings.Contains(string(without), "Bank") || strings.Contains(string(without), "EventsDropped") {
		t.Errorf("without events the file is as before: %s, %v", without, err)
	}
}

// A bank remap that is pending is one reason with a row's, which ends when neither is pending. It is no sign of a reset that it ends.
func TestBankRemap(t *testing.T) {
	s := newLedgerFixture(t)
	s.reportXIDs(46)
	s.setSample(func(v *health.Sample) { v.BankRemapPending = health.Yes })
	s.check(2)
	if c := s.condition("ROW_REMAP_PENDING"); c.Detail != "memory bank" || c.State != health.Degraded {
		t.Errorf("%+v", c)
	}
	s.setSample(func(v *health.Sample) { v.BankRemapPending = health.No })
	s.checkFor(5 * time.Minute)
	if !s.history().LastReset.IsZero() {
		t.Error("the end of a bank remap counts as a reset")
	}
	s.expect("the XID is not cleared", health.Unhealthy, "XID_46")
	s = newLedgerFixture(t)
	s.setSample(func(v *health.Sample) { v.RemapPending, v.BankRemapPending = health.Yes, health.No })
	s.check(2)
	s.expect("a row", health.Degraded, "ROW_REMAP_PENDING")
	s.setSample(func(v *health.Sample) { v.BankRemapPending = health.Yes })
	s.check(1)
	s.setSample(func(v *health.Sample) { v.BankRemapPending = health.No })
	s.checkFor(5 * time.Minute)
	s.expect("still a row", health.Degraded, "ROW_REMAP_PENDING")
}
