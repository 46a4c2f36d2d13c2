package core_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// slot is the PCI address of the n-th GPU of coretest.GPUs.
func slot(n int) core.PCIAddress { return core.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x10+n)) }

// logged is a line of the kernel log about a GPU, with the number of the next one.
func logged(n int, code, next uint64) core.Observation {
	return core.Observation{PCI: slot(n), Kind: core.XID, Code: code, FromKernelLog: true, NextSequence: next}
}

// past is one that the log had before the agent followed it.
func past(n int, code, next uint64) core.Observation {
	o := logged(n, code, next)
	o.Backlog = true
	return o
}

// logRead says that the log was read up to a number.
func logRead(next uint64) core.Observation {
	return core.Observation{Kind: core.KernelLogRead, NextSequence: next}
}

// count is how often a GPU has reported an XID.
func (l *life) count(n int, code uint64) uint64 {
	chart, _ := l.state.Ledger.History(coretest.GPU(n))
	for _, t := range chart.FaultCounts {
		if t.Code == code {
			return t.Count
		}
	}
	return 0
}

func (l *life) expectLog(when string, want uint64, known bool) {
	l.Helper()
	if next, ok := l.state.KernelLog(); next != want || ok != known {
		l.Errorf("%s: the log is news from %d on (known: %t), want %d (%t)", when, next, ok, want, known)
	}
}

func well(n int) map[core.DeviceID]string {
	want := map[core.DeviceID]string{}
	for i := range n {
		want[coretest.GPU(i)] = "healthy "
	}
	return want
}

// An XID that a reset healed is before the number that the record has, so that it is not read again.
func TestTheRecordKnowsWhichLinesHadTheirEffect(t *testing.T) {
	l := live(t, coretest.GPUs(2))
	l.expectLog("the first start", 0, false)
	l.see(logRead(10))
	l.see(logged(0, 119, 12))
	if r := l.state.Checkpoint("b"); r.KernelLog != 12 || len(r.Conditions) != 1 {
		t.Errorf("the record has %d and %v", r.KernelLog, r.Conditions)
	}
	l.read(1)
	l.see(core.Observation{At: gpu(0), Kind: core.DriverRebound})
	l.read(60)
	l.expect("a reset healed it", well(2))
	l.restart("b", "b")
	l.expectLog("the next agent", 12, true)
	l.restart("b", "c")
	l.expectLog("after a reboot", 0, true)
}

// The line of an XID that NVML told of is that XID, however long the agent was away; the next line is another one.
func TestALineOfAnEventBeforeTheRestart(t *testing.T) {
	l := live(t, coretest.GPUs(2))
	l.see(logRead(10))
	l.see(xidEvent(gpu(0), 95))
	cleared, _, err := l.state.Clear(l.cfg, l.now, core.Command{GPU: coretest.GPU(0)})
	if err != nil {
		t.Fatal(err)
	}
	l.state = cleared
	l.restart("b", "b")
	l.now = l.now.Add(10 * time.Minute)
	l.see(past(0, 95, 11))
	l.read(1)
	l.expect("told again", well(2))
	if n := l.count(0, 95); n != 1 {
		t.Errorf("counted %d times", n)
	}
	l.restart("b", "b")
	l.now = l.now.Add(10 * time.Minute)
	l.see(past(0, 95, 12))
	l.read(1)
	if n := l.count(0, 95); n != 2 || l.state.Inventory.Len() != 2 {
		t.Errorf("another one: counted %d times", n)
	}
	l.expect("another one", map[core.DeviceID]string{coretest.GPU(0): "unhealthy XID_95", coretest.GPU(1): "healthy "})
}

// A line that came to the agent before it ended is not taken for an event that NVML told of after that.
func TestALineThatWasToldByBothBeforeTheRestart(t *testing.T) {
	l := live(t, coretest.GPUs(1))
	l.see(xidEvent(gpu(0), 95))
	l.now = l.now.Add(2 * time.Second)
	l.see(logged(0, 95, 11))
	l.restart("b", "b")
	l.now = l.now.Add(10 * time.Minute)
	l.see(past(0, 95, 12))
	if n := l.count(0, 95); n != 2 {
		t.Errorf("counted %d times", n)
	}
}

// What was logged while no agent ran counts before anything is offered, as the GPU is known.
func TestALineOfAKnownGPUCountsBeforeTheFirstReading(t *testing.T) {
	l := live(t, coretest.GPUs(2))
	l.see(logRead(10))
	l.restart("b", "b")
	l.see(past(1, 119, 11), logRead(15))
	if r := l.state.Checkpoint("b"); r.KernelLog != 15 || len(r.Conditions) != 1 {
		t.Errorf("the record has %d and %v", r.KernelLog, r.Conditions)
	}
	l.noDriver(core.DriverFailed)
	l.read(1)
	l.expect("at once", map[core.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
}

// After a reboot everything in the log is news: it waits until the machine was read, and the record says so until then.
func TestLinesAfterAReboot(t *testing.T) {
	l := live(t, coretest.GPUs(2))
	l.see(logRead(500))
	l.see(xidEvent(gpu(1), 119)) // whose line no agent saw: there was a reboot
	l.restart("a", "b")
	l.see(past(1, 119, 31), logRead(40))
	l.noDriver(core.DriverAbsent)
	if r := l.state.Checkpoint("b"); !r.NotReadSinceBoot || r.KernelLog != 0 {
		t.Errorf("before the driver was read: unread %t, %d", r.NotReadSinceBoot, r.KernelLog)
	}
	l.expectLog("nothing had an effect", 0, true)
	l.read(1)
	l.expect("at once", map[core.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
	if n := l.count(1, 119); n != 2 {
		t.Errorf("counted %d times", n)
	}
	if r := l.state.Checkpoint("b"); r.BootID != "b" || r.KernelLog != 40 {
		t.Errorf("the record is of boot %s, %d", r.BootID, r.KernelLog)
	}
}

// Without a history a line waits for the first reading, and is offered to no GPU in between.
func TestLinesBeforeTheFirstReading(t *testing.T) {
	l := &life{TB: t, cfg: core.DefaultConfig(), now: dawn, machine: coretest.GPUs(2), says: map[core.DeviceID]*core.HealthSample{}}
	for _, o := range checked(l.machine) {
		l.says[o.At.GPU] = &o.Sample
	}
	l.state = core.NewState(l.cfg)
	l.see(logRead(10))
	l.noDriver(core.DriverFailed)
	l.see(logged(1, 79, 12), logged(7, 31, 13))
	for next := range uint64(5000) { // more than can wait
		l.see(logged(6, next, 14+next))
	}
	l.expectLog("they have had no effect", 10, true)
	if each, n := l.state.UnlistedXIDs(); len(each) != 0 || n != 0 {
		t.Errorf("unlisted: %v", each)
	}
	l.read(1)
	l.expect("with the first reading", map[core.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost XID_79"})
	if next, _ := l.state.KernelLog(); next < 1000 || next > 14+5000 {
		t.Errorf("the log is news from %d on", next)
	}
	each, n := l.state.UnlistedXIDs()
	if len(each) != 64 || n < 100 || each[0] != (core.UnlistedXID{PCI: slot(7), Code: 31}) {
		t.Errorf("unlisted: %d, %v", n, each)
	}
}

// An XID of a PCI address where no GPU is listed is noted once; that of a GPU that is excluded is its own.
func TestLinesOfGPUsThatAreNotListed(t *testing.T) {
	l := live(t, coretest.GPUs(2))
	l.see(logged(5, 79, 1), logged(5, 79, 2), logged(5, 119, 3))
	each, n := l.state.UnlistedXIDs()
	if want := []core.UnlistedXID{{PCI: slot(5), Code: 79}, {PCI: slot(5), Code: 119}}; !slices.Equal(each, want) || n != 3 {
		t.Errorf("unlisted: %d, %v", n, each)
	}
	l.machine.Excluded = []core.Exclusion{
		{Index: 2, At: core.WholeGPU("GPU-x"), PCI: slot(6), Failure: core.FailureError, Reason: "no"},
		{Index: 3, PCI: slot(7), Failure: core.FailureLost, Reason: "no"},
	}
	l.read(1)
	l.see(logged(6, 79, 4), logged(7, 79, 5))
	if c := l.state.Ledger.Conditions(); len(c) != 1 || c[0].At.GPU != "GPU-x" || c[0].Cause() != "XID_79" {
		t.Errorf("conditions: %v", c)
	}
	if each, n := l.state.UnlistedXIDs(); len(each) != 3 || n != 4 {
		t.Errorf("unlisted: %d, %v", n, each)
	}
	l.read(3)
	found := coretest.GPUs(8).Devices
	l.machine.Devices, l.machine.Excluded = append(slices.Clone(l.machine.Devices), found[5], found[7]), nil
	l.says[coretest.GPU(5)], l.says[coretest.GPU(7)] = l.says[coretest.GPU(0)], l.says[coretest.GPU(0)]
	l.read(1)
	want := well(2)
	want[coretest.GPU(5)] = "healthy " // it was away, and is initialised anew
	want[coretest.GPU(7)] = "lost XID_79"
	l.expect("the one that was excluded all the time has its XID", want)
	if each, _ := l.state.UnlistedXIDs(); len(each) != 2 {
		t.Errorf("unlisted: %v", each)
	}
}
