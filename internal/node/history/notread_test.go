package history_test

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// notRead returns the problem HISTORY_NOT_READ of a file; "" if it has none.
func notRead(f *history.File) string {
	for _, p := range f.Problems() {
		if p.Code == problem.HistoryLoad {
			return p.String()
		}
	}
	return ""
}

// A history that can't be read, or not completely, puts no faulty GPU back to work: not at the next start, and not at
// those after it. The problem stays until an operator has removed the file that was kept aside.
func TestDamagedHistoryPutsNoFaultyGPUBackToWork(t *testing.T) {
	later := func(text []byte) []byte {
		return bytes.Replace(text, []byte(`"Version": 2`), []byte(`"Version": 3`), 1)
	}
	for name, c := range map[string]struct {
		damage func(d *disk, text []byte)
		faulty string // cause of GPU 1 afterwards
		other  string // and of GPU 0
	}{
		"empty":    {func(d *disk, _ []byte) { d.write(nil) }, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
		"cut":      {func(d *disk, text []byte) { d.write(text[:len(text)/2]) }, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
		"zeroed":   {func(d *disk, text []byte) { d.write(make([]byte, len(text))) }, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
		"a folder": {func(d *disk, _ []byte) { d.replace(func() error { return os.Mkdir(d.path(), 0o700) }) }, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
		"no access": {func(d *disk, _ []byte) {
			d.replace(func() error { return os.Symlink("k8s-gpu.json", d.path()) }) // ELOOP, for root, too
		}, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
		"earlier format": {func(d *disk, text []byte) {
			d.write(bytes.Replace(text, []byte(`"Version": 2`), []byte(`"Version": 1`), 1))
		}, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
		"later format": {func(d *disk, text []byte) { d.write(later(text)) }, "XID_119", ""},
		"later format with a new part": {func(d *disk, text []byte) {
			d.write(bytes.Replace(later(text), []byte(`"Links"`), []byte(`"Chains"`), 1))
		}, "XID_119", "FAULTS_UNKNOWN"},
		"an unknown condition": {func(d *disk, text []byte) {
			d.write(bytes.Replace(text, []byte(`"Reason": "XID"`), []byte(`"Reason": "BAD_LUCK"`), 1))
		}, "FAULTS_UNKNOWN", ""},
		"no conditions": {func(d *disk, text []byte) {
			d.write(bytes.Replace(text, []byte(`"Conditions": [`), []byte(`"Condition": [`), 1))
		}, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
		"set aside by an agent that wrote no other": {func(d *disk, text []byte) {
			d.write(text[:len(text)/2])
			d.open().Load()
		}, "FAULTS_UNKNOWN", "FAULTS_UNKNOWN"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDisk(t)
				machine := coretest.NewMachine(linked(2))
				d.run(machine, func(*monitor.Monitor) {
					machine.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 119})
					time.Sleep(time.Minute)
				})
				c.damage(d, d.read(d.path()))
				causes := func(when string) {
					d.run(machine, func(m *monitor.Monitor) { d.causes(when, m, c.other, c.faulty) })
				}
				causes("after the damage")
				causes("after another restart")
				if p := notRead(d.loaded()); !strings.Contains(p, d.path()+".") || !strings.Contains(p, "clear") {
					t.Errorf("problem %q", p)
				}
				d.run(machine, func(m *monitor.Monitor) {
					for n := range 2 {
						_, err := m.Clear(t.Context(), health.Command{GPU: coretest.GPU(n)})
						if want := n == 1 || c.other != ""; (err == nil) != want {
							t.Errorf("GPU %d cleared: %v", n, err)
						}
					}
				})
				d.run(machine, func(m *monitor.Monitor) { d.causes("cleared", m, "", "") })
				f := d.loaded()
				if p := notRead(f); p == "" {
					t.Error("the problem ends before an operator has seen it")
				}
				for _, suffix := range []string{".broken", ".unread"} {
					check.NoError(t, os.RemoveAll(d.path()+suffix))
				}
				d.save(f, full())
				if p := notRead(f); p != "" {
					t.Errorf("afterwards: %q", p)
				}
			})
		})
	}
}

// linked is a machine with NVLinks, so that its history has each part.
func linked(n int) gpu.Snapshot {
	s := coretest.GPUs(n)
	s.Links = []gpu.Link{{A: coretest.GPU(0), B: coretest.GPU(1), NVLinks: 4}}
	return gpu.NewSnapshot(s)
}

// replace puts something else in the place of the file.
func (d *disk) replace(with func() error) {
	d.Helper()
	check.NoError(d, os.Remove(d.path()))
	check.NoError(d, with())
}

// loaded is the file after it was loaded.
func (d *disk) loaded() *history.File {
	f := d.open()
	f.Load()
	return f
}

// causes compares the causes of the GPUs; those with one take no work.
func (d *disk) causes(when string, m *monitor.Monitor, want ...string) {
	d.Helper()
	for n, cause := range want {
		u, _ := m.Current().Unit(inventory.UnitID(coretest.GPU(n)))
		if u.Health.Cause() != cause || u.Health.Schedulable() != (cause == "") {
			d.Errorf("%s: GPU %d is %s, want %q", when, n, u.Health, cause)
		}
	}
}

// A history that was cut before the node was rebooted, as by a loss of power, hides no fault: the reboot has ended it.
func TestHistoryThatWasCutBeforeARebootIsNoReasonToWithholdAGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		machine := coretest.NewMachine(coretest.GPUs(2))
		d.run(machine, func(*monitor.Monitor) {})
		text := d.read(d.path())
		d.write(text[:len(text)/2])
		d.boot("another")
		d.run(machine, func(m *monitor.Monitor) { d.causes("after the reboot", m, "", "") })
		if p := notRead(d.loaded()); p == "" {
			t.Error("no problem is reported")
		}
	})
}

// A GPU that the driver lists late may have had a fault, too.
func TestGPUThatIsListedAfterADamagedHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		d.write([]byte("damaged"))
		both := coretest.GPUs(2)
		one := coretest.GPUs(1)
		one.Excluded = []gpu.Exclusion{{Index: 1, Failure: gpu.FailureError, Reason: "nvmlDeviceGetHandleByIndex: UNKNOWN"}}
		d.run(coretest.NewMachine(gpu.NewSnapshot(one)), func(m *monitor.Monitor) {
			d.causes("the first", m, "FAULTS_UNKNOWN")
			_, err := m.Clear(t.Context(), health.Command{GPU: coretest.GPU(0)})
			check.NoError(t, err)
		})
		d.run(coretest.NewMachine(both), func(m *monitor.Monitor) { d.causes("both", m, "", "FAULTS_UNKNOWN") })
		d.run(coretest.NewMachine(coretest.GPUs(3)), func(m *monitor.Monitor) {
			d.causes("a new one", m, "", "FAULTS_UNKNOWN", "")
		})
	})
}

// A node without a file is one on which the agent starts for the first time.
func TestMissingHistoryIsAFirstStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		d.run(coretest.NewMachine(coretest.GPUs(1)), func(m *monitor.Monitor) { d.causes("the first start", m, "") })
		if p := notRead(d.loaded()); p != "" {
			t.Errorf("problem %q", p)
		}
	})
}

// A process that is not the agent reports the same, and changes nothing.
func TestDamagedHistoryIsReportedWithoutAnAgent(t *testing.T) {
	d := newDisk(t)
	d.write([]byte("damaged"))
	f := history.OpenReadOnly(d.dir, agent, d.proc)
	r, boot := f.Load()
	cfg := core.DefaultConfig()
	s := core.Restore(cfg, r, boot).Read(cfg, time.Now(), coretest.GPUs(1))
	u, _ := s.Allocatable.Unit(inventory.UnitID(coretest.GPU(0)))
	if u.Health.Cause() != "FAULTS_UNKNOWN" || notRead(f) == "" || f.Problem() != "" {
		t.Errorf("%s, problem %q, %q", u.Health, notRead(f), f.Problem())
	}
	if got := d.names(); len(got) != 1 {
		t.Errorf("left %v", got)
	}
}

// Files that were set aside are not taken for gone while the folder can't be read.
func TestFilesAsideOfAFolderThatCannotBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(t)
		d.write([]byte("damaged"))
		f := d.loaded()
		d.save(f, full())
		check.NoError(t, os.Rename(d.dir, d.dir+".moved"))
		check.NoError(t, os.Symlink(d.dir, d.dir))
		another := full()
		another.Driver = "another"
		d.fails(f, another, "file exists")
		if p := notRead(f); !strings.Contains(p, ".broken") {
			t.Errorf("problem %q", p)
		}
	})
}
