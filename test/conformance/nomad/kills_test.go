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

// kills is how often the plugin is killed: a hundred times, or as often as CONFORMANCE_KILLS says.
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

// pid is the process that Nomad has put in its state, as it does once a process has its configuration.
func (a *agent) pid() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == nil || a.state.ReattachConfigs["nvidia-gpu"] == nil {
		return 0
	}
	return a.state.ReattachConfigs["nvidia-gpu"].Pid
}

// disruptions are an agent whose plugin dies again and again, while tasks start.
type disruptions struct {
	*agent
	offered []*structs.NodeDeviceResource // what every fingerprint has to be

	epoch  atomic.Int64 // odd while a process is dead and the next is not there yet
	failed atomic.Int64 // reservations that met a death
	done   atomic.Int64 // reservations
}

// wellIDs are the devices that take work.
func (d *disruptions) wellIDs() (ids []string) {
	for _, i := range instances(d.offered) {
		if i.Healthy {
			ids = append(ids, i.ID)
		}
	}
	return ids
}

// reserveAll is one reservation of all that takes work.
func (d *disruptions) reserveAll() error {
	ids := d.wellIDs()
	r, err := d.reserve(d.offered[0], ids...)
	if err == nil && strings.Count(r.Envs["NVIDIA_VISIBLE_DEVICES"], "GPU-") != len(ids) {
		err = fmt.Errorf("the environment is %v", r.Envs)
	}
	return err
}

// work starts tasks until stop is called. A reservation may fail if the plugin dies meanwhile, and only then.
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

// disrupt sends a signal that ends the plugin, and returns how long it takes until the next one reserves. It
// returns when Nomad has a fingerprint of that one, too: before, a death is the end of the plugin to Nomad
// (client/devicemanager/instance.go: "dispensing plugin failed", "fingerprinting failed"), whatever the plugin.
func (d *disruptions) disrupt(t *testing.T, s syscall.Signal) time.Duration {
	t.Helper()
	old, updates := d.pid(), len(d.Updates())
	d.epoch.Add(1)
	begin := time.Now()
	if err := syscall.Kill(old, s); err != nil {
		t.Fatal(err)
	}
	awaitEvery(t, time.Millisecond, "a reservation by the next process", func() bool { return d.pid() != old && d.reserveAll() == nil })
	took := time.Since(begin)
	awaitEvery(t, time.Millisecond, "a fingerprint of the next process", func() bool { return len(d.Updates()) > updates })
	d.epoch.Add(1)
	return took
}

// disrupted is an agent whose plugin can be ended: one of its eight GPUs is sick, and its history is on disk.
func disrupted(t *testing.T, m machine) *disruptions {
	t.Helper()
	d := &disruptions{agent: startAgent(t, m, nil)}
	d.devices(t, 8, 8)
	m.ctl(t, "xid", "5", "95")
	d.offered = d.devices(t, 8, 7)
	await(t, "the history on disk", func() bool {
		text, err := os.ReadFile(filepath.Join(string(m), "state", "nomad-gpu.json"))
		return err == nil && strings.Contains(string(text), `"Code": 95`)
	})
	return d
}

// intact checks that Nomad has noticed nothing but deaths, and that nothing of the dead is left.
func (d *disruptions) intact(t *testing.T, m machine, before, deaths int) {
	t.Helper()
	for i, groups := range d.Updates()[before:] {
		if !reflect.DeepEqual(groups, d.offered) {
			t.Fatalf("fingerprint %d differs: %v", i, instances(groups))
		}
	}
	logs := d.logs.String()
	for _, trouble := range []string{"fingerprinting failed", "failed fingerprinting", "fingerprinting returned an error", "gracefully shutdown", "dispensing plugin failed"} {
		if strings.Contains(logs, trouble) {
			t.Errorf("Nomad's log says %q", trouble)
		}
	}
	pids := d.launches(t)
	if n := len(pids); n != 3+deaths {
		t.Errorf("%d launches, want 3 and one for each of %d deaths", n, deaths)
	}
	for _, pid := range pids[:len(pids)-1] {
		if alive(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
	d.only(t, "TMPDIR", filepath.Join(d.dir, "tmp"), fmt.Sprintf("nomad-gpu-%d", pids[len(pids)-1]))
	d.only(t, "the state directory", filepath.Join(string(m), "state"), "claims", "nomad-gpu.groups.json", "nomad-gpu.json", "nomad-gpu.sock", "nomad-gpu.sock.lock")
	d.only(t, "the claims", filepath.Join(string(m), "state", "claims"), "nomad-gpu.json", "nomad-gpu.lock")
}

// only waits until a folder has these entries and no others: a history may just be written.
func (d *disruptions) only(t *testing.T, what, dir string, want ...string) {
	t.Helper()
	await(t, fmt.Sprint("only ", want, " in ", what), func() bool {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return slices.EqualFunc(entries, want, func(e os.DirEntry, name string) bool { return e.Name() == name })
	})
}

// size is what of a process grows if it leaks: its threads and descriptors.
func size(t *testing.T, pid int) (threads, fds int) {
	t.Helper()
	for _, of := range []struct {
		list string
		n    *int
	}{{"task", &threads}, {"fd", &fds}} {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, of.list))
		if err != nil {
			t.Fatal(err)
		}
		*of.n = len(entries)
	}
	return threads, fds
}

// Killed at any moment, several times in a row and while tasks start: each time the plugin is back with the
// same groups, devices and health, and nothing is left of the dead.
func Test12KilledAtAnyMoment(t *testing.T) {
	n := kills(t)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	m := install(t, "h100x8")
	d := disrupted(t, m)
	before, goroutines := len(d.Updates()), runtime.NumGoroutine()
	_, fdsBefore := size(t, d.pid())
	stop := d.work(t)
	var took []time.Duration
	for len(took) < n && !t.Failed() {
		time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond) // the moment is anybody's guess
		for range min(1+random.IntN(4), n-len(took)) {                 // and the next comes at once
			took = append(took, d.disrupt(t, syscall.SIGKILL))
		}
	}
	stop()
	d.intact(t, m, before, n)
	if _, fds := size(t, d.pid()); fds > fdsBefore+8 {
		t.Errorf("the last process has %d descriptors, the first had %d", fds, fdsBefore)
	}
	slices.Sort(took)
	t.Logf("%d kills, back after p50 %s, p99 %s, max %s; %d of %d reservations met a death; %d goroutines of Nomad's before, %d after",
		n, took[n/2], took[n*99/100], took[n-1], d.failed.Load(), d.done.Load(), goroutines, runtime.NumGoroutine())
}

// An operator's kill is an end in order; Nomad starts the plugin again all the same.
func Test12Terminated(t *testing.T) {
	m := install(t, "h100x8")
	d := disrupted(t, m)
	before := len(d.Updates())
	stop := d.work(t)
	for range 3 {
		d.disrupt(t, syscall.SIGTERM)
	}
	stop()
	d.intact(t, m, before, 3)
}

// After a death Nomad goes on with the devices that it knows. A driver that takes its time to answer the next
// process does not take them away, also if that is killed before it has an answer.
func Test12KilledBeforeTheFirstReading(t *testing.T) {
	m := install(t, "h100x8")
	d := disrupted(t, m)
	before := len(d.Updates())
	m.ctl(t, "slow", "all", "nvmlDeviceGetName", "150ms")
	for range 3 {
		old := d.pid()
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		await(t, "the next process in the driver", func() bool {
			pid := d.pid()
			files, _ := filepath.Glob(filepath.Join(string(m), "calls", strconv.Itoa(pid)+".*"))
			return pid != old && len(files) > 0
		})
	}
	if err := d.reserveAll(); err != nil {
		t.Errorf("a reservation during the first reading: %v", err)
	}
	await(t, "a fingerprint", func() bool { return len(d.Updates()) > before })
	d.intact(t, m, before, 3)
}

// A driver upgrade under the plugin: it ends, because only a new process can load the new library, and Nomad
// has the devices again at once.
func Test12UpgradedDriver(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	well := a.devices(t, 8, 8)
	await(t, "an age at which nobody fears a loop", func() bool { return a.age(t) > 5*time.Second })
	m.ctl(t, "unload")
	a.devices(t, 8, 0)
	m.ctl(t, "library", "590.44.01")
	m.ctl(t, "module", "590.44.01")
	begin := time.Now()
	m.ctl(t, "load")
	back := a.devices(t, 8, 8)
	t.Logf("back after %s", time.Since(begin))
	if !slices.Equal(ids(back), ids(well)) || back[0].Name != well[0].Name {
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

// age is how long the plugin's process has lived.
func (a *agent) age(t *testing.T) time.Duration {
	t.Helper()
	info, err := os.Stat(fmt.Sprintf("/proc/%d", a.pid()))
	if err != nil {
		t.Fatal(err)
	}
	return time.Since(info.ModTime())
}
