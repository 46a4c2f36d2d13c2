package usage

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/check"
)

// node is a Monitor, and the procfs and the orchestrator of a node.
type node struct {
	mu        sync.Mutex
	state     core.State
	processes map[gpu.DeviceID][]gpu.Process
	proc      string
	record    holders.Record
	recordErr error
	usageErr  error

	readings int
	occupied []inventory.Occupied
	tasks    *watchdog.Registry
}

func newNode(t *testing.T) *node {
	n := &node{proc: t.TempDir(), processes: map[gpu.DeviceID][]gpu.Process{}, tasks: watchdog.NewRegistry()}
	n.state.Allocatable = core.Build(coretest.GPUs(2), health.Ledger{}, core.DefaultConfig()).WithoutHost()
	n.record = holders.Record{Complete: true, Work: map[string]holders.Work{}}
	return n
}

func (n *node) locked(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *node) State() (s core.State) {
	n.locked(func() { s = n.state })
	return s
}

func (n *node) SetOccupied(o []inventory.Occupied) { n.locked(func() { n.occupied = o }) }

func (n *node) withheld() (o []inventory.Occupied) {
	n.locked(func() { o = n.occupied })
	return o
}

func (n *node) Watchdog() *watchdog.Registry { return n.tasks }

func (n *node) running(p gpu.Process) bool {
	_, err := os.Stat(filepath.Join(n.proc, strconv.Itoa(p.PID)))
	return err == nil
}

func (n *node) holders(context.Context, *inventory.Allocatable) (r holders.Record, err error) {
	n.locked(func() { r, err = n.record, n.recordErr })
	return r, err
}

func (n *node) Usage(context.Context) ([]gpu.Usage, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.readings++
	if n.usageErr != nil {
		return nil, n.usageErr
	}
	var usage []gpu.Usage
	for u := range n.state.Allocatable.Devices() {
		processes := slices.Clone(n.processes[u.Device.ID])
		usage = append(usage, gpu.Usage{Device: u.Device.ID, At: time.Now(), GPU: gpu.OptionalUint64Of(0), Processes: &processes})
	}
	return usage, nil
}

// count is the number of readings.
func (n *node) count() (i int) {
	n.locked(func() { i = n.readings })
	return i
}

// process writes files of a process, which are pairs of name and content: of one that a person started, as the first one of the host, if they
// do not differ.
func (n *node) process(t *testing.T, pid int, files ...string) {
	t.Helper()
	dir := filepath.Join(n.proc, strconv.Itoa(pid))
	check.NoError(t, os.MkdirAll(dir, 0o755))
	for files = slices.Concat([]string{"stat", childOf(1), "loginuid", "1000"}, files); len(files) > 0; files = files[2:] {
		check.NoError(t, os.WriteFile(filepath.Join(dir, files[0]), []byte(files[1]), 0o600))
	}
}

// childOf is the file stat of a process, as far as it is read.
func childOf(parent int) string { return "7 (a) b) S " + strconv.Itoa(parent) + " 7 7 0" }

// start starts a process with memory of GPU i.
func (n *node) start(t *testing.T, i, pid int, files ...string) {
	t.Helper()
	n.process(t, pid, files...)
	id := coretest.GPU(i)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.processes[id] = append(n.processes[id], gpu.Process{At: gpu.WholeGPU(id), PID: pid, Started: uint64(pid)})
}

func (n *node) end(t *testing.T) {
	t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, all := range n.processes {
		for _, p := range all {
			check.NoError(t, os.RemoveAll(filepath.Join(n.proc, strconv.Itoa(p.PID))))
		}
	}
	clear(n.processes)
}

// watched runs f beside a Watcher, which ends after it.
func watched(t *testing.T, n *node, mode inventory.OccupancyMode, orchestrator string, f func(w *Watcher)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := New(Options{Mode: mode, Orchestrator: orchestrator, Holders: n.holders, ProcRoot: n.proc, Running: n.running, Log: slog.New(slog.DiscardHandler)})
		done := make(chan struct{})
		go func() { defer close(done); w.Run(ctx, n) }()
		synctest.Wait()
		f(w)
		cancel()
		<-done
		if len(n.tasks.Tasks()) != 0 {
			t.Error("the task is still registered")
		}
	})
}

func device(w *Watcher, i int) use.Device {
	d, _ := w.Table().Device(coretest.GPU(i))
	return d
}

func TestOff(t *testing.T) {
	n := newNode(t)
	watched(t, n, inventory.OccupancyOff, holders.Nomad, func(w *Watcher) {
		w.Wake()
		time.Sleep(time.Hour)
		if n.count() > 0 || !w.Table().At.IsZero() {
			t.Errorf("%d readings", n.count())
		}
	})
}

// The interval is short while anything is held or has processes, or was announced; any number of calls of Wake are one reading.
func TestIntervals(t *testing.T) {
	n := newNode(t)
	watched(t, n, inventory.OccupancyReport, holders.Nomad, func(w *Watcher) {
		per := func(d time.Duration) int {
			was := n.count()
			time.Sleep(d)
			return n.count() - was
		}
		time.Sleep(time.Minute)
		if got := per(10 * time.Minute); got < 39 || got > 41 {
			t.Errorf("idle: %d readings in 10 minutes", got)
		}
		n.locked(func() {
			n.record.Holders = []holders.Holder{{Work: holders.Work{Orchestrator: holders.Nomad, ID: allocID}, Device: coretest.GPU(0)}}
		})
		w.Wake()
		if time.Sleep(1600 * time.Millisecond); len(device(w, 0).Owners()) != 1 {
			t.Error("not read after Wake")
		}
		if got := per(10 * time.Minute); got < 190 || got > 200 {
			t.Errorf("held: %d readings in 10 minutes", got)
		}
		was := n.count()
		for range 1000 {
			w.Wake()
			time.Sleep(time.Millisecond)
		}
		if got := n.count() - was; got > 1 {
			t.Errorf("%d readings in a second", got)
		}
		n.start(t, 0, 7, "cgroup", "0::/nomad.slice/share.slice/"+allocID+".main.scope\n")
		time.Sleep(3 * time.Second)
		n.end(t)
		if time.Sleep(3 * time.Second); per(5*time.Second) != 5 {
			t.Error("a process has ended, and readings are not more frequent")
		}
		n.locked(func() { n.record.Holders = nil })
		if time.Sleep(3 * time.Second); len(device(w, 0).Owners()) != 0 {
			t.Error("still held")
		}
		if late := n.tasks.Late(time.Now()); len(late) > 0 {
			t.Error(late)
		}
	})
}

// A device with a process of no work is withheld after two readings, over a failure of the driver, and free when the process has ended.
func TestWithhold(t *testing.T) {
	for mode, withheld := range map[inventory.OccupancyMode]bool{inventory.OccupancyWithhold: true, inventory.OccupancyReport: false} {
		n := newNode(t)
		n.start(t, 1, 7, "cgroup", "0::/user.slice\n", "comm", "python\n")
		watched(t, n, mode, holders.Kubernetes, func(w *Watcher) {
			if n.withheld() != nil {
				t.Error("withheld at once")
			}
			time.Sleep(7 * time.Second)
			want := []inventory.Occupied{{Device: coretest.GPU(1), Detail: "pid 7 (python)"}}
			if withheld != slices.Equal(n.withheld(), want) || len(device(w, 1).Unreserved()) != 1 {
				t.Errorf("%s: %v", mode, n.withheld())
			}
			inv := n.State().Allocatable.WithHost(inventory.Host{Occupied: n.withheld()}, inventory.OverlapWarn)
			if u, _ := inv.Unit(inventory.UnitID(coretest.GPU(1))); u.Health.Schedulable() == withheld {
				t.Errorf("%s: %s", mode, u.Health)
			}
			n.end(t)
			time.Sleep(3 * time.Second)
			if n.withheld() != nil || len(device(w, 1).Processes) != 0 {
				t.Errorf("%s: after its end: %v", mode, n.withheld())
			}
		})
	}
}
