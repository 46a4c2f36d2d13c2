package nomad

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/nomad/structs"
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
