package nomad

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/plugins/device"
)

var machines = []string{"a100-mig", "consumer", "gb200", "h100x8", "h200", "none", "t4"}

// first waits for the list that follows from the first reading.
func (a *agent) first(t testing.TB, m machine) []*structs.NodeDeviceResource {
	t.Helper()
	await(t, "a reading", func() bool { return m.readings(t) > 1 })
	all := a.Updates()
	return all[len(all)-1]
}

func Test08GroupsAndIDsAreUniqueAndStable(t *testing.T) {
	for _, name := range machines {
		t.Run(name, func(t *testing.T) {
			m := install(t, name)
			groups := startAgent(t, m, nil).first(t, m)
			names, seen := map[string]bool{}, map[string]bool{}
			for _, g := range groups {
				if n := fmt.Sprint(g.ID()); names[n] {
					t.Errorf("group %s twice", n)
				} else {
					names[n] = true
				}
			}
			for _, id := range ids(groups) {
				if seen[id] {
					t.Errorf("%s twice", id)
				}
				seen[id] = true
			}
			for range 2 {
				m.ctl(t, "sync")
				again := startAgent(t, m, nil).until(t, "the same list", func(g []*structs.NodeDeviceResource) bool { return len(g) == len(groups) })
				if !reflect.DeepEqual(again, groups) {
					t.Error("another process gives another list")
				}
			}
			if name != "none" && len(groups) == 0 {
				t.Error("nothing offered")
			}
		})
	}
}

func Test09NoUpdateWithoutChange(t *testing.T) {
	m := install(t, "a100-mig")
	a := startAgent(t, m, nil)
	a.first(t, m)
	before, seen := len(a.Updates()), m.readings(t)
	m.ctl(t, "set", "0", "temperature", "70")
	m.ctl(t, "set", "1", "memory_used", "1024 MiB")
	await(t, "ten more readings", func() bool { return m.readings(t) >= seen+10 })
	if n := len(a.Updates()) - before; n != 0 {
		t.Errorf("%d updates while nothing changed", n)
	}
	m.ctl(t, "lose", "0")
	await(t, "one update", func() bool { return len(a.Updates()) == before+1 })
}

func classOf(t *testing.T, groups []*structs.NodeDeviceResource) string {
	t.Helper()
	n := node(groups)
	if err := n.ComputeClass(); err != nil {
		t.Fatal(err)
	}
	return n.ComputedClass
}

func Test10HealthFlip(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	well := a.devices(t, 8, 8)
	m.ctl(t, "lose", "3")
	sick := a.devices(t, 8, 7)
	if !slices.Equal(ids(well), ids(sick)) {
		t.Error("IDs changed with health")
	}
	for i, d := range instances(sick) {
		if d.Healthy != (i != 3) || d.Healthy != (d.HealthDescription == "") {
			t.Errorf("%d: %+v", i, d)
		}
	}
	if classOf(t, well) == classOf(t, sick) {
		t.Error("a sick node is of the class of those that are well")
	}
	m.ctl(t, "restore", "3")
	if back := a.devices(t, 8, 8); !reflect.DeepEqual(well, back) {
		t.Errorf("not as before: %v", back)
	}
}

// The stream survives the driver's going and coming; running tasks keep their devices' identity.
func Test11DriverReload(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	well := a.devices(t, 8, 8)
	for range 2 {
		m.ctl(t, "unload")
		gone := a.devices(t, 8, 0)
		for _, d := range instances(gone) {
			if !strings.Contains(d.HealthDescription, "driver is not usable") {
				t.Errorf("%+v", d)
			}
		}
		m.ctl(t, "load")
		if back := a.devices(t, 8, 8); !reflect.DeepEqual(well, back) {
			t.Error("not as before")
		}
	}
	m.ctl(t, "fail", "all", "*", "UNKNOWN")
	a.devices(t, 8, 0)
	m.ctl(t, "heal")
	a.devices(t, 8, 8)
	if n := len(a.launches(t)); n != 3 {
		t.Errorf("%d launches, want none but the first 3", n)
	}
}

func Test11LateDriver(t *testing.T) {
	m := install(t, "h100x8")
	m.ctl(t, "hide")
	a := startAgent(t, m, nil)
	a.devices(t, 0, 0)
	m.ctl(t, "unhide")
	a.devices(t, 8, 8)
}

// One GPU that answers nothing leaves the others alone; it is named in the log.
func Test11OneBadGPU(t *testing.T) {
	m := install(t, "h100x8")
	m.ctl(t, "fail", "3", "*", "UNKNOWN")
	a := startAgent(t, m, nil)
	a.devices(t, 7, 7)
	await(t, "its name in the log", func() bool {
		for line := range strings.Lines(a.logs.String()) { // go-plugin gives the keys in any order
			if strings.Contains(line, "[WARN]") && strings.Contains(line, "device excluded") &&
				strings.Contains(line, "index=3") && strings.Contains(line, "Unknown Error") {
				return true
			}
		}
		return false
	})
	m.ctl(t, "heal")
	a.devices(t, 8, 8)
}

func Test12KilledAndBack(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	groups := a.devices(t, 8, 8)
	for i := range 3 {
		pids := a.launches(t)
		if err := syscall.Kill(pids[len(pids)-1], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		await(t, "a new process", func() bool { return len(a.launches(t)) == 4+i })
		await(t, "a reservation", func() bool { // the client has to notice the death first
			_, err := a.reserve(groups[0], ids(groups)...)
			return err == nil
		})
		if got := a.devices(t, 8, 8); !reflect.DeepEqual(groups, got) {
			t.Error("not as before")
		}
	}
}

func Test14Reserve(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	g := a.devices(t, 8, 8)[0]
	all := ids([]*structs.NodeDeviceResource{g})
	visible := func(r *device.ContainerReservation) string { return r.Envs["NVIDIA_VISIBLE_DEVICES"] }
	for name, tc := range map[string]struct {
		ids  []string
		want string // of the environment
	}{
		"one":      {all[:1], all[0]},
		"some":     {[]string{all[5], all[1]}, all[1] + "," + all[5]},
		"all":      {all, strings.Join(all, ",")},
		"repeated": {[]string{all[2], all[2]}, all[2]},
		"none":     {nil, ""},
	} {
		r, err := a.reserve(g, tc.ids...)
		if err != nil || r == nil {
			t.Errorf("%s: %v, %v", name, r, err)
			continue
		}
		if got := visible(r); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
		backwards := slices.Clone(tc.ids)
		slices.Reverse(backwards)
		if s, err := a.reserve(g, backwards...); err != nil || !reflect.DeepEqual(r, s) {
			t.Errorf("%s: the order of the IDs matters: %v, %v", name, s, err)
		}
	}

	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			if r, err := a.reserve(g, all[i%8], all[(i+1)%8]); err != nil || strings.Count(visible(r), "GPU-") != 2 {
				t.Errorf("%d: %v, %v", i, r, err)
			}
		})
	}
	wg.Wait()

	m.ctl(t, "lose", "4")
	a.devices(t, 8, 7)
	if _, err := a.reserve(g, all[3], all[4]); err == nil || !strings.Contains(err.Error(), "unhealthy devices: "+all[4]) {
		t.Errorf("unhealthy: %v", err)
	}
	m.ctl(t, "hang", "all", "nvmlDeviceGetUUID")
	begin := time.Now()
	if _, err := a.reserve(g, all[0]); err != nil {
		t.Errorf("while the driver hangs: %v", err)
	}
	if d := time.Since(begin); d > time.Second {
		t.Errorf("while the driver hangs: after %s", d)
	}
}

// Nomad knows the ID from the former list, the plugin not any more: the last one to check is the plugin.
func Test14ReserveUnknown(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	g := a.devices(t, 8, 8)[0]
	i, err := a.cat.Dispense("nvidia-gpu", "device", nil, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	defer i.Kill()
	p := i.Plugin().(device.DevicePlugin)
	_, err = p.Reserve([]string{"GPU-y", g.Instances[0].ID, "GPU-x"})
	if err == nil || !strings.Contains(err.Error(), "unknown device IDs: GPU-x,GPU-y") {
		t.Errorf("got %v", err)
	}
}

func Test15ReservedPaths(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: without root the simulated machine has no device nodes")
	}
	m := install(t, "a100-mig")
	a := startAgent(t, m, nil)
	for _, g := range a.first(t, m) {
		r, err := a.reserve(g, g.Instances[0].ID)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Mounts) != 0 {
			t.Errorf("%s: mounts: %v", g.Name, r.Mounts)
		}
		var paths []string
		for _, d := range r.Devices {
			paths = append(paths, d.TaskPath)
			info, err := os.Lstat(d.HostPath)
			if err != nil || info.Mode()&os.ModeCharDevice == 0 {
				t.Errorf("%s: %s is no device node: %v", g.Name, d.HostPath, err)
			}
			if d.HostPath != filepath.Join(string(m), d.TaskPath) || !regexp.MustCompile(`^[rwm]+$`).MatchString(d.CgroupPerms) {
				t.Errorf("%s: %+v", g.Name, d)
			}
		}
		caps := len(slices.DeleteFunc(slices.Clone(paths), func(p string) bool { return !strings.HasPrefix(p, "/dev/nvidia-caps/") }))
		if mig := strings.HasPrefix(g.Instances[0].ID, "MIG-"); mig && caps != 2 || !mig && caps != 0 {
			t.Errorf("%s: paths: %v", g.Name, paths)
		}
		if !slices.Contains(paths, "/dev/nvidiactl") || !slices.Contains(paths, "/dev/nvidia-uvm") {
			t.Errorf("%s: paths: %v", g.Name, paths)
		}
		for k, v := range r.Envs {
			if strings.Contains(v, "${") {
				t.Errorf("%s=%s would be interpolated", k, v)
			}
		}
	}
}

// stats waits for statistics that are as wanted.
func (a *agent) stats(t testing.TB, what string, holds func(map[string]*device.DeviceStats) bool) map[string]*device.DeviceStats {
	t.Helper()
	var all map[string]*device.DeviceStats
	await(t, what, func() bool {
		all = map[string]*device.DeviceStats{}
		for _, g := range a.dm.AllStats() {
			for id, s := range g.InstanceStats {
				all[id] = s
			}
		}
		return holds(all)
	})
	return all
}

func Test16Stats(t *testing.T) {
	m := install(t, "a100-mig")
	begin := time.Now()
	a := startAgent(t, m, nil)
	offered := ids(a.first(t, m))
	some := func(s map[string]*device.DeviceStats) bool { return len(s) > 0 }
	stats := a.stats(t, "the first sample", some)
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("the first sample came after %s", d)
	}
	if len(stats) != len(offered) {
		t.Errorf("%d statistics of %d devices", len(stats), len(offered))
	}
	if _, err := json.Marshal(a.dm.AllStats()); err != nil {
		t.Error(err)
	}
	for _, id := range offered {
		s := stats[id]
		if s == nil || s.Stats == nil || s.Summary == nil || math.Abs(time.Since(s.Timestamp).Seconds()) > 60 {
			t.Errorf("%s: %+v", id, s)
			continue
		}
		if len(s.Stats.Attributes) != 12 || s.Stats.Attributes["Memory state"].IntDenominatorVal == nil ||
			!strings.HasPrefix(*s.Stats.Attributes["Health"].StringVal, "healthy") {
			t.Errorf("%s: %+v", id, s.Stats.Attributes)
		}
	}

	gpu0 := offered[0]
	m.ctl(t, "set", "0", "power_usage", "321 W")
	power := func(s *device.DeviceStats) int64 {
		if s == nil || s.Stats.Attributes["Power usage"].IntNumeratorVal == nil {
			return -1
		}
		return *s.Stats.Attributes["Power usage"].IntNumeratorVal
	}
	a.stats(t, "321 W", func(s map[string]*device.DeviceStats) bool { return power(s[gpu0]) == 321 })
	m.ctl(t, "unload")
	a.stats(t, "N/A", func(s map[string]*device.DeviceStats) bool { return len(s) == len(offered) && power(s[gpu0]) == -1 })
	m.ctl(t, "load")
	a.stats(t, "321 W again", func(s map[string]*device.DeviceStats) bool { return power(s[gpu0]) == 321 })
}

func Test18PCIAddressesAreSysfsNames(t *testing.T) {
	for _, name := range machines {
		m := install(t, name)
		for _, d := range instances(startAgent(t, m, nil).first(t, m)) {
			if d.Locality == nil {
				t.Errorf("%s: %s has no locality", name, d.ID)
				continue
			}
			if _, err := os.Stat(filepath.Join(string(m), "sys/bus/pci/devices", d.Locality.PciBusID)); err != nil || d.Locality.PciBusID == "" {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
