package nomad

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/nomad/nomad/structs"
)

// kills is how often the plugin is killed: a hundred times, or CONFORMANCE_KILLS times.
func kills(t *testing.T) int {
	t.Helper()
	text := os.Getenv("CONFORMANCE_KILLS")
	if text == "" {
		return 100
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("CONFORMANCE_KILLS = %q: want a number", text)
	}
	return n
}

// pid returns the process in Nomad's state, which has its configuration; 0 = none.
func (a *agent) pid() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == nil || a.state.ReattachConfigs["nvidia-gpu"] == nil {
		return 0
	}
	return a.state.ReattachConfigs["nvidia-gpu"].Pid
}

// signal sends a signal to the plugin.
func (a *agent) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	must(t, syscall.Kill(a.pid(), s))
}

// disruptions is an agent whose plugin is ended several times, while tasks start.
type disruptions struct {
	*agent
	machine machine
	offered []*structs.NodeDeviceResource // every fingerprint must be equal to it
	before  int                           // updates of the node before the first end

	epoch  atomic.Int64 // odd from the end of a process to the first fingerprint of the next one
	failed atomic.Int64 // reservations that failed
	done   atomic.Int64 // reservations
}

// reserveAll reserves all healthy devices.
func (d *disruptions) reserveAll() error {
	var ids []string
	for _, i := range instances(d.offered) {
		if i.Healthy {
			ids = append(ids, i.ID)
		}
	}
	r, err := d.reserve(d.offered[0], ids...)
	if err == nil && strings.Count(r.Envs["NVIDIA_VISIBLE_DEVICES"], "GPU-") != len(ids) {
		err = fmt.Errorf("the environment is %v", r.Envs)
	}
	return err
}

// work starts tasks until stop is called. A reservation may fail if the plugin ends meanwhile, and only then.
func (d *disruptions) work(t *testing.T) (stop func()) {
	var over atomic.Bool
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for !over.Load() {
				before := d.epoch.Load()
				err := d.reserveAll()
				d.done.Add(1)
				if err == nil {
					continue
				}
				d.failed.Add(1)
				if before%2 == 0 && d.epoch.Load() == before {
					t.Errorf("a reservation failed while the plugin lived: %v", err)
					return
				}
			}
		})
	}
	return func() {
		over.Store(true)
		workers.Wait()
	}
}

// disrupt sends a signal that ends the plugin, and returns how long it takes until the next one reserves. It returns when
// Nomad has a fingerprint of that one, too: until then Nomad does not start another plugin if this one ends
// (client/devicemanager/instance.go: "dispensing plugin failed", "fingerprinting failed").
func (d *disruptions) disrupt(t *testing.T, s syscall.Signal) time.Duration {
	t.Helper()
	old, updates := d.pid(), len(d.Updates())
	d.epoch.Add(1)
	begin := time.Now()
	d.signal(t, s)
	awaitEvery(t, time.Millisecond, "a reservation by the next process", func() bool { return d.pid() != old && d.reserveAll() == nil })
	took := time.Since(begin)
	awaitEvery(t, time.Millisecond, "a fingerprint of the next process", func() bool { return len(d.Updates()) > updates })
	d.epoch.Add(1)
	return took
}

// newDisruptions returns an agent of eight GPUs of which one is unhealthy, by the history on disk.
func newDisruptions(t *testing.T) *disruptions {
	t.Helper()
	m, a, _ := onMachine(t, "h100x8", nil, 8)
	d := &disruptions{agent: a, machine: m}
	m.ctl(t, "xid", "5", "95")
	d.offered = d.devices(t, 8, 7)
	await(t, "the history on disk", func() bool {
		text, err := os.ReadFile(filepath.Join(string(m), "state", "nomad-gpu.json"))
		return err == nil && strings.Contains(string(text), `"Code": 95`)
	})
	d.before = len(d.Updates())
	return d
}

// intact checks that Nomad got equal fingerprints, and that nothing is left of the processes that ended.
func (d *disruptions) intact(t *testing.T, ends int) {
	t.Helper()
	for i, groups := range d.Updates()[d.before:] {
		if !reflect.DeepEqual(groups, d.offered) {
			t.Fatalf("fingerprint %d differs: %v", i, instances(groups))
		}
	}
	logs := d.logs.String()
	for _, trouble := range []string{"fingerprinting failed", "failed fingerprinting", "fingerprinting returned an error", "gracefully shutdown", "dispensing plugin failed"} {
		if strings.Contains(logs, trouble) {
			t.Errorf("Nomad's log has %q", trouble)
		}
	}
	pids := d.launches(t)
	if n := len(pids); n != 3+ends {
		t.Errorf("%d launches, want 3 and one for each of %d ends", n, ends)
	}
	for _, pid := range pids[:len(pids)-1] {
		if alive(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
	d.only(t, "TMPDIR", filepath.Join(d.dir, "tmp"), fmt.Sprintf("nomad-gpu-%d", pids[len(pids)-1]))
	d.only(t, "the state directory", filepath.Join(string(d.machine), "state"), "agents", "nomad-gpu.groups.json", "nomad-gpu.json", "nomad-gpu.sock", "nomad-gpu.sock.lock")
	d.only(t, "the folder of the agents", filepath.Join(string(d.machine), "state", "agents"), "nomad-gpu.json", "nomad-gpu.lock")
}

// only waits until a folder has these entries and no others: a temporary file may just be written.
func (d *disruptions) only(t *testing.T, what, dir string, want ...string) {
	t.Helper()
	await(t, fmt.Sprint("only ", want, " in ", what), func() bool {
		entries, err := os.ReadDir(dir)
		must(t, err)
		return slices.EqualFunc(entries, want, func(e os.DirEntry, name string) bool { return e.Name() == name })
	})
}

// descriptors returns the number of open files of a process.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	return len(entries)
}

// A plugin is killed at random times, several times in a row and while tasks start: each next one has the same groups,
// devices and health, and nothing is left of the previous ones.
func Test12KilledAtAnyTime(t *testing.T) {
	n := kills(t)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	d := newDisruptions(t)
	goroutines, files := runtime.NumGoroutine(), descriptors(t, d.pid())
	stop := d.work(t)
	var took []time.Duration
	for len(took) < n && !t.Failed() {
		time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond)
		for range min(1+random.IntN(4), n-len(took)) { // the next ones immediately
			took = append(took, d.disrupt(t, syscall.SIGKILL))
		}
	}
	stop()
	d.intact(t, n)
	if now := descriptors(t, d.pid()); now > files+8 {
		t.Errorf("the last process has %d descriptors, the first had %d", now, files)
	}
	slices.Sort(took)
	t.Logf("%d kills, back after p50 %s, p99 %s, max %s; %d of %d reservations failed meanwhile; %d goroutines of Nomad's before, %d after",
		n, took[n/2], took[n*99/100], took[n-1], d.failed.Load(), d.done.Load(), goroutines, runtime.NumGoroutine())
}

// After SIGTERM the plugin ends with its cleanup; Nomad starts another one.
func Test12Terminated(t *testing.T) {
	d := newDisruptions(t)
	stop := d.work(t)
	for range 3 {
		d.disrupt(t, syscall.SIGTERM)
	}
	stop()
	d.intact(t, 3)
}

// When a plugin has ended, Nomad continues with the devices of its last fingerprint. A slow driver does not remove them, also
// if the next plugin is killed before the first reading.
func Test12KilledBeforeTheFirstReading(t *testing.T) {
	d := newDisruptions(t)
	d.machine.ctl(t, "slow", "all", "nvmlDeviceGetName", "150ms")
	for range 3 {
		old := d.pid()
		d.signal(t, syscall.SIGKILL)
		await(t, "the next process in the driver", func() bool {
			pid := d.pid()
			files, _ := filepath.Glob(filepath.Join(string(d.machine), "calls", strconv.Itoa(pid)+".*"))
			return pid != old && len(files) > 0
		})
	}
	if err := d.reserveAll(); err != nil {
		t.Errorf("a reservation during the first reading: %v", err)
	}
	await(t, "a fingerprint", func() bool { return len(d.Updates()) > d.before })
	d.intact(t, 3)
}

// When the driver is upgraded, the plugin exits, because only a new process can load the new library, and Nomad starts
// another one. A process exits at an age of 5 s or more.
func Test12UpgradedDriver(t *testing.T) {
	m, a, before := onMachine(t, "h100x8", nil, 8)
	await(t, "an age of 5 s", func() bool {
		info, err := os.Stat(fmt.Sprintf("/proc/%d", a.pid()))
		must(t, err)
		return time.Since(info.ModTime()) > 5*time.Second
	})
	m.ctl(t, "unload")
	a.devices(t, 8, 0)
	m.ctl(t, "library", "590.44.01")
	m.ctl(t, "module", "590.44.01")
	begin := time.Now()
	m.ctl(t, "load")
	back := a.devices(t, 8, 8)
	t.Logf("back after %s", time.Since(begin))
	if !slices.Equal(ids(back), ids(before)) || back[0].Name != before[0].Name {
		t.Errorf("not the same devices: %v", back)
	}
	if v := back[0].Attributes["driver_version"]; v == nil || v.String == nil || *v.String != "590.44.01" {
		t.Errorf("the driver's version is %v", v)
	}
	if n := len(a.launches(t)); n != 4 {
		t.Errorf("%d launches, want the first 3 and one more", n)
	}
	if _, err := a.reserve(back[0], ids(back)...); err != nil {
		t.Error(err)
	}
}
