package nomad

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/plugins/device"
)

var machines = []string{"a100-mig", "consumer", "gb200", "h100x8", "h200", "none", "t4"}

// first waits for the device groups of the first reading.
func (a *agent) first(t testing.TB, m machine) []*structs.NodeDeviceResource {
	t.Helper()
	await(t, "a reading", func() bool { return m.readings(t) > 1 })
	all := a.Updates()
	return all[len(all)-1]
}

// Groups and IDs are unique, the same in each process, and PCI addresses are names in sysfs.
func Test08GroupsAndIDs(t *testing.T) {
	for _, name := range machines {
		t.Run(name, func(t *testing.T) {
			m := install(t, name)
			groups := startAgent(t, m, nil).first(t, m)
			if (len(groups) == 0) != (name == "none") {
				t.Errorf("%d groups", len(groups))
			}
			seen := map[string]bool{}
			for _, g := range groups {
				if n := fmt.Sprint(g.ID()); seen[n] {
					t.Errorf("group %s twice", n)
				} else {
					seen[n] = true
				}
			}
			for _, d := range instances(groups) {
				if seen[d.ID] {
					t.Errorf("%s twice", d.ID)
				}
				seen[d.ID] = true
				if d.Locality == nil || d.Locality.PciBusID == "" {
					t.Errorf("%s has no locality", d.ID)
				} else if _, err := os.Stat(filepath.Join(string(m), "sys/bus/pci/devices", d.Locality.PciBusID)); err != nil {
					t.Error(err)
				}
			}
			for range 2 {
				m.ctl(t, "sync")
				again := startAgent(t, m, nil).until(t, "the same groups", func(g []*structs.NodeDeviceResource) bool { return len(g) == len(groups) })
				if !reflect.DeepEqual(again, groups) {
					t.Error("another process has other groups")
				}
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

// The health of a GPU changes one device and the computed class of the node. Only healthy devices are allocated.
func Test10HealthFlip(t *testing.T) {
	m, a, before := onMachine(t, "h100x8", nil, 8)
	m.ctl(t, "lose", "3")
	unhealthy := a.devices(t, 8, 7)
	if !slices.Equal(ids(before), ids(unhealthy)) {
		t.Error("IDs changed with health")
	}
	for i, d := range instances(unhealthy) {
		if d.Healthy != (i != 3) || d.Healthy != (d.HealthDescription == "") {
			t.Errorf("%d: %+v", i, d)
		}
	}
	if classOf(t, before) == classOf(t, unhealthy) {
		t.Error("the node's class is the same")
	}
	got := newCluster(t, node(unhealthy)).place(t, ask("nvidia/gpu", 7))
	if got == nil || slices.Contains(got[0].DeviceIDs, ids(unhealthy)[3]) || fits(t, node(unhealthy), ask("nvidia/gpu", 8)) {
		t.Errorf("of seven healthy GPUs a job gets %+v, or eight are placed", got)
	}
	m.ctl(t, "restore", "3")
	if after := a.devices(t, 8, 8); !reflect.DeepEqual(before, after) {
		t.Errorf("not as before: %v", after)
	}
}

// The xids of the config block replace the effects of XIDs.
func Test10XIDOverrides(t *testing.T) {
	m, a, _ := onMachine(t, "h100x8", block(t, `xids = { "95" = "ignore", "999" = "unhealthy" }`), 8)
	m.ctl(t, "xid", "1", "95")
	m.ctl(t, "xid", "2", "999")
	for i, d := range instances(a.devices(t, 8, 7)) {
		if d.Healthy != (i != 2) {
			t.Errorf("%d: %+v", i, d)
		}
	}
}

// The stream continues when the driver is unloaded, loaded and fails, with the same devices.
func Test11DriverReload(t *testing.T) {
	m, a, before := onMachine(t, "h100x8", nil, 8)
	for range 2 {
		m.ctl(t, "unload")
		for _, d := range instances(a.devices(t, 8, 0)) {
			if !strings.Contains(d.HealthDescription, "driver is not usable") {
				t.Errorf("%+v", d)
			}
		}
		m.ctl(t, "load")
		if after := a.devices(t, 8, 8); !reflect.DeepEqual(before, after) {
			t.Error("not as before")
		}
	}
	m.ctl(t, "fail", "all", "*", "UNKNOWN")
	a.devices(t, 8, 0)
	m.ctl(t, "heal")
	a.devices(t, 8, 8)
	if n := len(a.launches(t)); n != 3 {
		t.Errorf("%d launches, want the first 3 only", n)
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

// A GPU that does not answer has no effect on the others; it is named in the log.
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

// stats waits until a condition holds for the statistics of the devices, and returns them.
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
