package core_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// pciSlot returns the PCI address of the n-th GPU of coretest.GPUs.
func pciSlot(n int) gpu.PCIAddress { return gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x10+n)) }

// logLine is a line of the kernel log about a GPU; next is the sequence number after it.
func logLine(n int, code, next uint64) health.Observation {
	return health.Observation{PCI: pciSlot(n), Kind: health.XID, Code: code, FromKernelLog: true, NextSequence: next}
}

// backlogLine is a line that was in the log before the agent started to follow it.
func backlogLine(n int, code, next uint64) health.Observation {
	o := logLine(n, code, next)
	o.Backlog = true
	return o
}

// loggedAgo returns a line that was logged so long before it is reported, as exactly as the clock of the log allows.
func loggedAgo(o health.Observation, ago time.Duration) health.Observation {
	o.Age = health.Age{Least: max(0, ago-2*time.Second), Most: ago + 2*time.Second}
	return o
}

// logPosition is the observation that the log was read up to a number.
func logPosition(next uint64) health.Observation {
	return health.Observation{Kind: health.KernelLogRead, NextSequence: next}
}

// count returns how often a GPU has reported an XID.
func (l *restartFixture) count(n int, code uint64) uint64 {
	history, _ := l.state.Ledger.History(coretest.GPU(n))
	for _, t := range history.FaultCounts {
		if t.Code == code {
			return t.Count
		}
	}
	return 0
}

func (l *restartFixture) expectLog(when string, want uint64, known bool) {
	l.Helper()
	if next, ok := l.state.KernelLog(); next != want || ok != known {
		l.Errorf("%s: the log is read from %d on (known: %t), want %d (%t)", when, next, ok, want, known)
	}
}

func allHealthy(n int) map[gpu.DeviceID]string {
	want := map[gpu.DeviceID]string{}
	for i := range n {
		want[coretest.GPU(i)] = "healthy "
	}
	return want
}

// An XID that a reset cleared is before the position in the checkpoint, so it is not read again.
func TestCheckpointHasLogPosition(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.expectLog("the first start", 0, true)
	l.observe(logPosition(10))
	l.observe(logLine(0, 119, 12))
	if r := l.state.Checkpoint("b"); r.KernelLog != 12 || len(r.Conditions) != 1 {
		t.Errorf("the record has %d and %v", r.KernelLog, r.Conditions)
	}
	l.read(1)
	l.observe(health.Observation{At: gpuAt(0), Kind: health.DriverRebound})
	l.read(60)
	l.expect("cleared by a reset", allHealthy(2))
	l.restart("b", "b")
	l.expectLog("the next agent", 12, true)
	l.restart("b", "c")
	l.expectLog("after a reboot", 0, true)
}

// The line of an XID that NVML reported counts as that XID, however long the agent was not running; the next line
// counts as another one.
func TestLogLineOfReportedEvent(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(logPosition(10))
	l.observe(xidEvent(gpuAt(0), 95))
	cleared, _, err := l.state.Clear(l.cfg, l.now, health.Command{GPU: coretest.GPU(0)})
	if err != nil {
		t.Fatal(err)
	}
	l.state = cleared
	l.restart("b", "b")
	l.now = l.now.Add(10 * time.Minute)
	l.observe(loggedAgo(backlogLine(0, 95, 11), 10*time.Minute))
	l.read(1)
	l.expect("reported again", allHealthy(2))
	if n := l.count(0, 95); n != 1 {
		t.Errorf("counted %d times", n)
	}
	l.restart("b", "b")
	l.now = l.now.Add(10 * time.Minute)
	l.observe(backlogLine(0, 95, 12))
	l.read(1)
	if n := l.count(0, 95); n != 2 || l.state.Allocatable.Len() != 2 {
		t.Errorf("another one: counted %d times", n)
	}
	l.expect("another one", map[gpu.DeviceID]string{coretest.GPU(0): "unhealthy XID_95", coretest.GPU(1): "healthy "})
}

// A line that was read before the agent ended is not a duplicate of an event after it.
func TestLogLineReportedByBothSources(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(1))
	l.observe(xidEvent(gpuAt(0), 95))
	l.now = l.now.Add(2 * time.Second)
	l.observe(logLine(0, 95, 11))
	l.restart("b", "b")
	l.now = l.now.Add(10 * time.Minute)
	l.observe(backlogLine(0, 95, 12))
	if n := l.count(0, 95); n != 2 {
		t.Errorf("counted %d times", n)
	}
}

// Lines from the time when no agent was running count before anything is offered, because the GPU is known.
func TestLogLineOfKnownGPU(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(logPosition(10))
	l.restart("b", "b")
	l.observe(backlogLine(1, 119, 11), logPosition(15))
	if r := l.state.Checkpoint("b"); r.KernelLog != 15 || len(r.Conditions) != 1 {
		t.Errorf("the record has %d and %v", r.KernelLog, r.Conditions)
	}
	l.noDriver(gpu.DriverFailed)
	l.read(1)
	l.expect("immediately", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
}

// After a reboot all lines of the log are new: they wait for the first snapshot, and the checkpoint has no
// position until then.
func TestLogLinesAfterReboot(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(logPosition(500))
	l.observe(xidEvent(gpuAt(1), 119)) // no agent read its line, because the node was rebooted
	l.restart("a", "b")
	l.observe(backlogLine(1, 119, 31), logPosition(40))
	l.noDriver(gpu.DriverAbsent)
	if r := l.state.Checkpoint("b"); !r.NotReadSinceBoot || r.KernelLog != 0 {
		t.Errorf("before the driver was read: unread %t, %d", r.NotReadSinceBoot, r.KernelLog)
	}
	l.expectLog("nothing had an effect", 0, true)
	l.read(1)
	l.expect("immediately", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
	if n := l.count(1, 119); n != 2 {
		t.Errorf("counted %d times", n)
	}
	if r := l.state.Checkpoint("b"); r.BootID != "b" || r.NotReadSinceBoot || r.KernelLog != 40 {
		t.Errorf("the record is of boot %s, %d", r.BootID, r.KernelLog)
	}
}

// Without a checkpoint, a line waits for the first snapshot, and its GPU is not offered as healthy before.
func TestLogLinesBeforeFirstSnapshot(t *testing.T) {
	l := &restartFixture{TB: t, cfg: core.DefaultConfig(), now: testStart, host: coretest.GPUs(2), samples: map[gpu.DeviceID]*health.Sample{}}
	for _, o := range healthyChecks(l.host) {
		l.samples[o.At.GPU] = &o.Sample
	}
	l.state = core.NewState(l.cfg)
	l.observe(logPosition(10))
	l.noDriver(gpu.DriverFailed)
	l.observe(logLine(1, 79, 12), logLine(7, 31, 13))
	for next := range uint64(5000) { // more than the bound
		l.observe(logLine(6, next, 14+next))
	}
	l.expectLog("they have had no effect", 10, true)
	if each, n := l.state.UnlistedXIDs(); len(each) != 0 || n != 0 {
		t.Errorf("unlisted: %v", each)
	}
	l.read(1)
	l.expect("with the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost XID_79"})
	if next, _ := l.state.KernelLog(); next < 1000 || next > 14+5000 {
		t.Errorf("the log is read from %d on", next)
	}
	each, n := l.state.UnlistedXIDs()
	if len(each) != 64 || n < 100 || each[0] != (core.UnlistedXID{PCI: pciSlot(7), Code: 31}) {
		t.Errorf("unlisted: %d, %v", n, each)
	}
}

// An XID at a PCI address without a listed GPU is recorded once; an XID of an excluded GPU counts for that GPU.
func TestLogLinesOfUnlistedGPUs(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(logLine(5, 79, 1), logLine(5, 79, 2), logLine(5, 119, 3))
	each, n := l.state.UnlistedXIDs()
	if want := []core.UnlistedXID{{PCI: pciSlot(5), Code: 79}, {PCI: pciSlot(5), Code: 119}}; !slices.Equal(each, want) || n != 3 {
		t.Errorf("unlisted: %d, %v", n, each)
	}
	l.host.Excluded = []gpu.Exclusion{
		{Index: 2, At: gpu.WholeGPU("GPU-x"), PCI: pciSlot(6), Failure: gpu.FailureError, Reason: "no"},
		{Index: 3, PCI: pciSlot(7), Failure: gpu.FailureLost, Reason: "no"},
	}
	l.read(1)
	l.observe(logLine(6, 79, 4), logLine(7, 79, 5))
	if c := l.state.Ledger.Conditions(); len(c) != 1 || c[0].At.GPU != "GPU-x" || c[0].Cause() != "XID_79" {
		t.Errorf("conditions: %v", c)
	}
	if each, n := l.state.UnlistedXIDs(); len(each) != 3 || n != 4 {
		t.Errorf("unlisted: %d, %v", n, each)
	}
	l.read(3)
	found := coretest.GPUs(8).Devices
	l.host.Devices, l.host.Excluded = append(slices.Clone(l.host.Devices), found[5], found[7]), nil
	l.samples[coretest.GPU(5)], l.samples[coretest.GPU(7)] = l.samples[coretest.GPU(0)], l.samples[coretest.GPU(0)]
	l.read(1)
	want := allHealthy(2)
	want[coretest.GPU(5)] = "healthy " // it was not listed, and is reset
	want[coretest.GPU(7)] = "lost XID_79"
	l.expect("the one that was excluded all the time has its XID", want)
	if each, _ := l.state.UnlistedXIDs(); len(each) != 2 {
		t.Errorf("unlisted: %v", each)
	}
}

// The kernel log and NVML report the same XID, in any order: it counts once.
func TestEcho(t *testing.T) {
	logged := xidEvent(a, 109)
	logged.FromKernelLog, logged.Detail = true, "Ch 00000008"
	event := xidEvent(gi(1), 109)
	late := event
	late.Age.Most = time.Minute
	for _, tc := range []struct {
		name   string
		first  health.Observation
		apart  time.Duration
		second health.Observation
		count  uint64
	}{
		{"the log after NVML", event, 9 * time.Second, logged, 1},
		{"NVML after the log", logged, 9 * time.Second, event, 1},
		{"too late", event, 10 * time.Second, logged, 2},
		{"NVML after the log, from a set that was not read meanwhile", logged, time.Minute, late, 1},
		{"NVML twice", event, time.Second, event, 2},
		{"the log twice", logged, time.Second, logged, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := guest(t)
			s.observe(tc.first)
			s.wait(tc.apart)
			s.observe(tc.second)
			if counts := s.history().FaultCounts; len(counts) != 1 || counts[0].Count != tc.count {
				t.Errorf("counted %+v, want %d", counts, tc.count)
			}
			if cs := s.ledger.Conditions(); tc.count == 1 && (len(cs) != 1 || cs[0].Count != 1 || cs[0].Repeated) {
				t.Errorf("conditions: %+v", cs)
			}
		})
	}
	t.Run("pairs", func(t *testing.T) {
		s := guest(t)
		for range 5 {
			s.observe(event, logged)
			s.wait(time.Second)
		}
		if n := s.history().FaultCounts[0].Count; n != 5 {
			t.Errorf("counted %d", n)
		}
	})
	t.Run("another XID, another GPU", func(t *testing.T) {
		s := guest(t)
		other, neighbour := logged, logged
		other.Code, neighbour.At = 110, b
		s.observe(event, other, neighbour)
		if n := len(s.ledger.Conditions()); n != 3 {
			t.Errorf("%d conditions", n)
		}
	})
}

// An XID of the time without an agent is no repetition of one from days before, whether a reset was between them or
// not, and also if the line of the older one was never read. With a log without times it is unknown which fault a line
// is of: after a reset it is another one.
func TestXIDOfTheAbsenceIsAnotherOne(t *testing.T) {
	for name, c := range map[string]struct {
		reset bool
		ago   health.Age
		want  uint64
	}{
		"after three days":                {false, health.Age{Least: time.Hour, Most: time.Hour}, 2},
		"after three days and a reset":    {true, health.Age{Least: time.Hour, Most: time.Hour}, 2},
		"its own line":                    {false, health.Age{Least: 72 * time.Hour, Most: 72 * time.Hour}, 1},
		"its own line, and then a reset":  {true, health.Age{Least: 72*time.Hour + 10*time.Minute, Most: 72*time.Hour + 10*time.Minute}, 1},
		"a log without times":             {false, health.UnknownAge, 1},
		"a log without times and a reset": {true, health.UnknownAge, 2},
	} {
		t.Run(name, func(t *testing.T) {
			l := newRestartFixture(t, coretest.GPUs(1))
			l.observe(logPosition(10))
			l.observe(xidEvent(gpuAt(0), 95))
			if c.reset {
				l.observe(health.Observation{At: gpuAt(0), Kind: health.DriverRebound})
				l.read(60)
				l.expect("after the reset", allHealthy(1))
			}
			l.restart("b", "b")
			l.now = l.now.Add(72 * time.Hour)
			line := backlogLine(0, 95, 11)
			line.Age = c.ago
			l.observe(line)
			if n := l.count(0, 95); n != c.want {
				t.Errorf("counted %d times, want %d", n, c.want)
			}
			l.read(1)
			if c.want == 2 {
				l.expect("at last", map[gpu.DeviceID]string{coretest.GPU(0): "unhealthy XID_95"})
			}
		})
	}
}

// A line that waits for the first snapshot gets no newer while it waits, also if the wall clock is set meanwhile.
func TestLineThatWaitsKeepsItsTime(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(1))
	l.restart("a", "b")
	logged := l.now
	l.observe(logLine(0, 95, 11))
	l.now = l.now.Add(10 * time.Minute)
	l.state = l.state.Shift(time.Hour)
	l.now = l.now.Add(time.Hour)
	l.read(1)
	history, _ := l.state.Ledger.History(coretest.GPU(0))
	if want := logged.Add(time.Hour); len(history.FaultCounts) != 1 || !history.FaultCounts[0].Last.Equal(want) {
		t.Errorf("%+v, want at %v", history.FaultCounts, want)
	}
}

// What a fault results in follows from when it happened, and not from when its line was read.
func TestEffectsOfALateLine(t *testing.T) {
	late := func(code uint64, ago time.Duration) health.Observation {
		o := xidEvent(a, code)
		o.FromKernelLog, o.Age = true, health.Age{Least: ago, Most: ago}
		return o
	}
	t.Run("an XID from before a reset is no relapse, and the reset clears it", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.reportXIDs(119)
		s.reset()
		s.checkFor(10 * time.Minute)
		s.expect("after the first one", health.Healthy, "")
		s.wait(time.Minute)
		s.reset()
		s.observe(late(119, time.Minute))
		s.checkFor(10 * time.Minute)
		s.expect("after a line of the time before the second reset", health.Healthy, "")
	})
	t.Run("an XID from after a reset is a relapse", func(t *testing.T) {
		s := newLedgerFixture(t)
		s.reportXIDs(119)
		s.reset()
		s.checkFor(10 * time.Minute)
		s.observe(late(119, time.Minute))
		s.expect("a minute after it", health.Unhealthy, "NEEDS_SERVICE")
	})
	t.Run("two XIDs 109 ten minutes apart are no repetition, whenever they are read", func(t *testing.T) {
		s := guest(t)
		s.observe(late(109, 30*time.Minute), late(109, 15*time.Minute))
		s.expect("15 minutes apart", health.Degraded, "XID_109")
		s.observe(late(109, 10*time.Minute))
		s.expect("5 minutes apart", health.Unhealthy, "XID_109")
	})
	t.Run("a workload that began later did not cause it", func(t *testing.T) {
		s := newLedgerFixture(t)
		for range 3 {
			s.wait(10 * time.Minute)
			s.allocate(a)
			s.observe(late(31, 5*time.Minute))
		}
		s.expect("three workloads", health.Healthy, "")
	})
}

// The checkpoint has the occurrences whose lines the next agent may read, and few others.
func TestOldOccurrencesAreNotKept(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(1))
	occurrences := func() (n int) {
		for _, t := range l.state.Checkpoint("b").GPUs[coretest.GPU(0)].FaultCounts {
			n += len(t.Recent)
		}
		return n
	}
	for range 100 {
		l.observe(xidEvent(gpuAt(0), 31))
	}
	l.read(6)
	if n := occurrences(); n != 64 {
		t.Errorf("after a minute %d are kept", n)
	}
	l.read(9)
	if n := occurrences(); n != 1 {
		t.Errorf("%d are kept", n)
	}
}
