package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// firstStart is a node whose agent has not read the driver yet.
func firstStart(t *testing.T, record core.Checkpoint) *restartFixture {
	l := newRestartFixture(t, coretest.GPUs(2))
	for _, v := range l.samples {
		v.RecoveryAction = health.RecoveryUnknown
	}
	l.state = core.Restore(l.cfg, record, "a")
	return l
}

// wholeLog is the observation that the log was read up to a number, with every XID since the load of the driver.
func wholeLog(next uint64) health.Observation {
	o := logPosition(next)
	o.Complete = true
	return o
}

// At the first start the XIDs of this boot count with the first reading, and once.
func TestXIDsOfThisBootCountAtTheFirstStart(t *testing.T) {
	l := firstStart(t, core.Checkpoint{BootID: "a"})
	l.expectLog("the first start", 0, true)
	l.observe(backlogLine(1, 119, 12), logPosition(12))
	l.read(1)
	faulty := map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"}
	l.expect("the first reading", faulty)
	if n := l.count(1, 119); n != 1 {
		t.Errorf("counted %d times", n)
	}
	l.restart("a", "a")
	l.expectLog("the next start", 12, true)
	l.read(1)
	l.expect("the next start", faulty)
}

// More lines of a program that fails than can wait for the first reading do not hide the fault of a GPU after them.
func TestManyLinesBeforeTheFirstReadingHideNoFault(t *testing.T) {
	l := firstStart(t, core.Checkpoint{BootID: "a"})
	for next := range uint64(3000) {
		l.observe(backlogLine(0, 31, next+1))
	}
	l.observe(backlogLine(1, 119, 3001), logPosition(3001))
	l.read(1)
	l.expect("the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
	if n := l.count(0, 31); n == 0 {
		t.Error("the application's are not counted")
	}
	if next, _ := l.state.KernelLog(); next != 3001 {
		t.Errorf("the log is read from %d on", next)
	}
}

// Harmless faults of NVLink before the first reading do not hide a fatal one with the same XID.
func TestManyNonfatalLinesBeforeTheFirstReadingHideNoFatalOne(t *testing.T) {
	l := firstStart(t, core.Checkpoint{BootID: "a"})
	for next := range uint64(3000) {
		o := backlogLine(1, 149, next+1)
		if o.Detail = bitErrors; next == 100 {
			o.Detail = linkFatal
		}
		l.observe(o)
	}
	l.read(1)
	faulty := map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_149"}
	l.expect("the first reading", faulty)
}

// A log that is read from its beginning again, because the position is not known, counts what no earlier process has counted.
func TestLogThatIsReadAgainCountsOnlyWhatIsNew(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	logged := func(n int, code uint64, at time.Time, next uint64) health.Observation {
		o := backlogLine(n, code, next)
		o.Again, o.Age = true, health.Age{Least: l.now.Sub(at), Most: l.now.Sub(at) + 4*time.Second}
		return o
	}
	first := l.now
	l.observe(logged(0, 119, first, 5))
	l.read(1)
	cleared, _, err := l.state.Clear(l.cfg, l.now, health.Command{GPU: coretest.GPU(0)})
	if l.state = cleared; err != nil {
		t.Fatal(err)
	}
	l.observe(logPosition(0)) // the log is not read any more
	l.restart("a", "a")
	l.now = l.now.Add(time.Hour)
	l.observe(logged(0, 119, first, 5), logged(1, 119, first, 6), logPosition(7))
	l.read(1)
	l.expect("of the time before", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
	l.observe(logPosition(0))
	l.restart("a", "a")
	again := l.now.Add(-10 * time.Minute)
	l.observe(logged(0, 119, first, 5), logged(1, 119, first, 6), logged(0, 119, again, 8), logPosition(9))
	l.read(1)
	l.expect("of the time without a log", map[gpu.DeviceID]string{coretest.GPU(0): "unhealthy XID_119", coretest.GPU(1): "unhealthy XID_119"})
	if a, b := l.count(0, 119), l.count(1, 119); a != 2 || b != 1 {
		t.Errorf("counted %d and %d times", a, b)
	}
}

// An XID of an early hour of this boot has the time of its line: two of them that are a day apart are no repetition, and an
// unknown one has been quiet for long enough.
func TestOldXIDsAtTheFirstStart(t *testing.T) {
	l := firstStart(t, core.Checkpoint{BootID: "a"})
	old := func(n int, code uint64, hours, next uint64) health.Observation {
		o := backlogLine(n, code, next)
		age := time.Duration(hours) * time.Hour
		o.Again, o.Age = true, health.Age{Least: age, Most: age + 4*time.Second}
		return o
	}
	l.observe(old(0, 109, 72, 1), old(1, 500, 71, 2), old(0, 109, 48, 3), logPosition(4))
	l.read(1)
	l.expect("at first", map[gpu.DeviceID]string{coretest.GPU(0): "degraded XID_109", coretest.GPU(1): "degraded XID_500"})
	l.read(9)
	l.expect("a minute and a half later", map[gpu.DeviceID]string{coretest.GPU(0): "degraded XID_109", coretest.GPU(1): "healthy "})
}

// A position of another source of the log is not kept: the next one counts, although it is lower.
func TestPositionOfAnotherLogIsForgotten(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(logPosition(1 << 63))
	l.restart("a", "a")
	l.observe(health.Observation{Kind: health.KernelLogReplaced})
	l.expectLog("before it is read", 0, true)
	l.observe(backlogLine(1, 119, 12), logPosition(12))
	l.expectLog("then", 12, true)
	l.read(1)
	l.expect("the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
}

// A log that has every XID since the load of the driver shows which GPUs had no fault, whenever it is read. It shows nothing
// about a fault of a kind that this version does not know, and nothing where an operator has to decide.
func TestCompleteLogEndsUnknownFaults(t *testing.T) {
	lost := core.Checkpoint{BootID: "a"}.WithUnknownFaults(testStart)
	later := core.Checkpoint{BootID: "a"}.WithUnknownFault(testStart, coretest.GPU(0), "a condition that can't be read")
	for name, c := range map[string]struct {
		record core.Checkpoint
		manual bool
		late   bool // the log is read after the driver
		log    []health.Observation
		want   [2]string
	}{
		"in time":             {lost, false, false, []health.Observation{backlogLine(1, 119, 12), wholeLog(12)}, [2]string{"healthy ", "unhealthy XID_119"}},
		"late":                {lost, false, true, []health.Observation{backlogLine(1, 119, 12), wholeLog(12)}, [2]string{"healthy ", "unhealthy XID_119"}},
		"not complete":        {lost, false, false, []health.Observation{logPosition(12)}, [2]string{"unknown FAULTS_UNKNOWN", "unknown FAULTS_UNKNOWN"}},
		"not read":            {lost, false, false, []health.Observation{logPosition(0)}, [2]string{"unknown FAULTS_UNKNOWN", "unknown FAULTS_UNKNOWN"}},
		"manual recovery":     {lost, true, false, []health.Observation{wholeLog(12)}, [2]string{"unknown FAULTS_UNKNOWN", "unknown FAULTS_UNKNOWN"}},
		"of an unknown kind":  {later, false, false, []health.Observation{wholeLog(12)}, [2]string{"unknown FAULTS_UNKNOWN", "healthy "}},
		"no history was lost": {core.Checkpoint{BootID: "a"}, false, false, []health.Observation{wholeLog(12)}, [2]string{"healthy ", "healthy "}},
	} {
		t.Run(name, func(t *testing.T) {
			l := firstStart(t, c.record)
			l.cfg.Health.ManualRecovery = c.manual
			l.state = core.Restore(l.cfg, c.record, "a")
			if c.late {
				l.read(1)
				l.expect("before", map[gpu.DeviceID]string{
					coretest.GPU(0): "unknown FAULTS_UNKNOWN", coretest.GPU(1): "unknown FAULTS_UNKNOWN",
				})
			}
			l.observe(c.log...)
			l.read(2)
			l.expect("then", map[gpu.DeviceID]string{coretest.GPU(0): c.want[0], coretest.GPU(1): c.want[1]})
		})
	}
}

// A complete log ends unknown faults together with the XIDs in it, which wait for the first reading. The agent may end
// before that, and the next one may not be able to read the log.
func TestCompleteLogThatWaitsEndsNothing(t *testing.T) {
	l := firstStart(t, core.Checkpoint{BootID: "a"}.WithUnknownFaults(testStart))
	l.observe(backlogLine(1, 119, 12), wholeLog(12))
	l.restart("a", "a")
	l.observe(logPosition(0))
	l.read(2)
	l.expect("the next agent", map[gpu.DeviceID]string{
		coretest.GPU(0): "unknown FAULTS_UNKNOWN", coretest.GPU(1): "unknown FAULTS_UNKNOWN",
	})
}

// Where the conditions of a history are lost, but not its counts, a complete log shows the faults that were counted.
func TestCompleteLogShowsCountedFaults(t *testing.T) {
	for _, recent := range []bool{false, true} { // whether the agent ended before it read the line of the fault
		l := newRestartFixture(t, coretest.GPUs(2))
		fault := l.now
		l.observe(xidEvent(gpuAt(1), 119))
		if !recent {
			l.observe(logLine(1, 119, 12))
		}
		record := l.state.Checkpoint("a")
		record.Conditions, record.KernelLog = nil, 0
		for _, v := range l.samples {
			v.RecoveryAction = health.RecoveryUnknown
		}
		l.state = core.Restore(l.cfg, record.WithUnknownFaults(l.now), "a")
		l.now = l.now.Add(time.Minute)
		line := loggedAgo(backlogLine(1, 119, 12), l.now.Sub(fault))
		line.Again = true
		l.observe(line, wholeLog(12))
		l.read(2)
		l.expect("then", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
	}
}
