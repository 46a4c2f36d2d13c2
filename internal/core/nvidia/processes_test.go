package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// processesOf checks all GPUs and returns the processes of one, without their start times; nil = unknown.
func processesOf(t *testing.T, m *simdriver.Machine, s *Session, slot int) []gpu.Process {
	t.Helper()
	o := probe(t, s)[gpu.DeviceID(m.UUID(slot))]
	if o.Kind != health.Checked {
		t.Fatalf("the check failed: %+v", o)
	}
	if o.Processes == nil {
		return nil
	}
	found := make([]gpu.Process, len(*o.Processes))
	for i, p := range *o.Processes {
		if p.Started == 0 {
			t.Errorf("%s has no start time", p)
		}
		p.Started = 0
		found[i] = p
	}
	return found
}

func TestProcesses(t *testing.T) {
	m := simdriver.Start(t, "a100-mig") // GPU 5 is in MIG mode
	s := openWith(t, m, Options{Processes: true})
	snapshot(t, s)
	must(t, m.StartProcess(0, 900, 512), m.StartProcess(0, 31, simdriver.NoMemory), m.StartProcess(0, 32, 16),
		m.StartProcess(5, 900, 1, simdriver.At{GI: 9, CI: 0}), m.StartProcess(5, 40, 2, simdriver.At{GI: 1, CI: 0}))
	must(t, os.RemoveAll(filepath.Join(m.Root, "proc", "32"))) // in a PID namespace that this process does not see
	whole, cut := gpu.WholeGPU(gpu.DeviceID(m.UUID(0))), gpu.DeviceID(m.UUID(5))
	for slot, want := range map[int][]gpu.Process{
		0: {{At: whole, PID: 31}, {At: whole, PID: 900, Memory: gpu.OptionalUint64Of(512 << 20)}},
		1: {},
		5: {{At: gpu.Placement{GPU: cut, GI: 1}, PID: 40, Memory: gpu.OptionalUint64Of(2 << 20)}, {At: gpu.Placement{GPU: cut, GI: 9}, PID: 900, Memory: gpu.OptionalUint64Of(1 << 20)}},
	} {
		if diff := gocmp.Diff(want, processesOf(t, m, s, slot)); diff != "" {
			t.Errorf("GPU %d: %s", slot, diff)
		}
	}
	must(t, m.EndProcess(900))
	if diff := gocmp.Diff([]gpu.Process{{At: whole, PID: 31}}, processesOf(t, m, s, 0)); diff != "" {
		t.Error("after one has ended:", diff)
	}

	// Processes that can't be read are unknown, and the check is complete.
	for _, code := range []string{"NOT_SUPPORTED", "NO_PERMISSION", "UNKNOWN"} {
		must(t, m.Fail(simdriver.GPU(0), processesCall, code, simdriver.Always))
		if found := processesOf(t, m, s, 0); found != nil {
			t.Errorf("%s: %v", code, found)
		}
		if o := probe(t, s)[whole.GPU]; o.Sample.Partial {
			t.Errorf("%s: the check is partial", code)
		}
		must(t, m.Heal())
		s.worker(whole.GPU).record.lastFailed = true // the next check reads everything
	}
	if found := processesOf(t, m, s, 0); len(found) != 1 {
		t.Errorf("readable again: %v", found)
	}
	must(t, m.Fail(simdriver.GPU(0), processesCall, "GPU_IS_LOST", simdriver.Always))
	if o := probe(t, s)[whole.GPU]; o.Kind != health.Lost || o.Processes != nil {
		t.Errorf("lost: %+v", o)
	}
}

// A reading of usage has the processes of each GPU and MIG instance, if the session reads them, by one call for each GPU.
func TestUsedBy(t *testing.T) {
	m := simdriver.Start(t, "a100-mig") // GPU 5 is in MIG mode
	must(t, m.StartProcess(0, 900, 512), m.StartProcess(5, 900, 1, simdriver.At{GI: 9, CI: 0}))
	for name, o := range map[string]Options{"on": {UsedBy: true}, "off": {}} {
		s := openWith(t, m, o)
		snapshot(t, s)
		usage, err := s.Usage()
		must(t, err)
		users := map[gpu.DeviceID]int{} // that have the process
		for _, u := range usage {
			if u.Processes == nil != (name == "off") {
				t.Fatalf("%s: %s: %v", name, u.Device, u.Processes)
			}
			for _, p := range read(u.Processes) {
				if p.PID != 900 || p.Started == 0 {
					t.Errorf("%s: %+v", u.Device, p)
				}
				users[u.Device]++
			}
		}
		if name == "on" && (users[gpu.DeviceID(m.UUID(0))] != 1 || users[gpu.DeviceID(m.UUID(5))] != 1 || len(users) != 3) {
			t.Errorf("users: %v", users)
		}
		must(t, m.Fail(simdriver.GPU(0), processesCall, "NOT_SUPPORTED", simdriver.Always))
		if usage, err = s.Usage(); err != nil || usage[0].Processes != nil || !usage[0].Power.OK {
			t.Errorf("not supported: %+v, %v", usage[0], err)
		}
		must(t, m.Heal(), s.Close())
	}
}

// A call that a GPU does not support is made again with the values that change slowly.
func TestUsedByIsTriedAgain(t *testing.T) {
	m := simdriver.Start(t, "t4")
	must(t, m.StartProcess(0, 900, 512))
	now := time.Unix(0, 0)
	s := openWith(t, m, Options{UsedBy: true, Now: func() time.Time { return now }})
	snapshot(t, s)
	must(t, m.Fail(simdriver.GPU(0), processesCall, "NOT_SUPPORTED", simdriver.Always))
	for i, want := range []uint64{1, 0, 1, 0} {
		if i == 2 {
			now = now.Add(slowUsageEvery)
		}
		var usage []gpu.Usage
		made := counted(t, m, func() {
			var err error
			usage, err = s.Usage()
			must(t, err)
		})
		if n := made[processesCall+"_v3"]; n != want || usage[0].Processes != nil || !usage[0].Power.OK {
			t.Errorf("reading %d: %d calls, want %d: %+v", i, n, want, usage)
		}
	}
	must(t, m.Heal())
	now = now.Add(slowUsageEvery)
	if usage, err := s.Usage(); err != nil || len(read(usage[0].Processes)) != 1 {
		t.Errorf("supported: %+v, %v", usage, err)
	}
}

func read(processes *[]gpu.Process) []gpu.Process {
	if processes == nil {
		return nil
	}
	return *processes
}

// Without the option no call is made.
func TestProcessesAreNotReadByDefault(t *testing.T) {
	m, s := start(t, "h100x8", open)
	snapshot(t, s)
	must(t, m.StartProcess(0, 900, 512))
	if found := processesOf(t, m, s, 0); found != nil {
		t.Errorf("read: %v", found)
	}
	for _, name := range functionsOf(processesCall) {
		if n := calls(t, m)[name]; n > 0 {
			t.Errorf("%d calls of %s", n, name)
		}
	}
}

// A process is running until it has ended, even if its parent does not wait for it, or another one has its PID.
func TestProcessRunning(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Processes: true})
	snapshot(t, s)
	read := func(pid int) gpu.Process {
		must(t, m.StartProcess(0, pid, 1))
		all := *probe(t, s)[gpu.DeviceID(m.UUID(0))].Processes
		return all[len(all)-1]
	}
	for i, end := range []func(pid int) error{
		m.EndProcess,
		m.Zombie,
		func(pid int) error { // another one has the PID
			must(t, m.EndProcess(pid))
			return m.StartProcess(0, pid, 1)
		},
	} {
		p := read(900 + i)
		if !ProcessRunning(roots(m), p) {
			t.Errorf("%d: %+v is not running", i, p)
		}
		must(t, end(p.PID))
		if ProcessRunning(roots(m), p) {
			t.Errorf("%d: %+v is still running", i, p)
		}
	}
	// The main thread of a process can end before others (pthread_exit), which stat shows as here.
	p := gpu.Process{PID: 10018, Started: 400318}
	dir := filepath.Join(m.Root, "proc", "10018")
	const threads = "10018 (z) Z 1 9946 29243 0 -1 4227084 133 0 4 0 0 0 0 0 20 0 %d 0 400318 0 0 18446744073709551615 0 0 0 0 0 0 0 6 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 0"
	for n, want := range map[int]bool{0: false, 1: false, 2: true} {
		must(t, os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "stat"), fmt.Appendf(nil, threads, n), 0o600))
		if ProcessRunning(roots(m), p) != want {
			t.Errorf("a zombie whose process has %d threads: running %t", n, !want)
		}
	}
	for name, stat := range map[string]string{"empty": "", "no name": "1 2 3", "short": "950 (x) S 1 2", "no number": "950 (x) S 1 1 1 0 0 0 0 0 0 0 0 0 0 0 20 0 1 0 x 0"} {
		dir := filepath.Join(m.Root, "proc", "950")
		must(t, os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o600))
		if ProcessRunning(roots(m), gpu.Process{PID: 950}) {
			t.Errorf("%s: it is running", name)
		}
	}
	self, running := processStart(os.DirFS("/proc"), os.Getpid())
	if !running || self == 0 {
		t.Errorf("this process: %d, %t", self, running)
	}
}
