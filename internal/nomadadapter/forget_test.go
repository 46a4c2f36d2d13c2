package nomadadapter

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// What is gone for good leaves the file.
func TestWhatIsGoneLeavesTheFile(t *testing.T) {
	given := assignment{by: GroupByNVLink}.with(nodeInventory(linked(2, [2]int{0, 1})))
	for n := range forgetAfter + 1 {
		if n == forgetAfter-1 && (len(given.names) < 2 || len(given.topology)+len(given.previous.topology) < 3) {
			t.Errorf("forgotten after %d boots: %v", n, given)
		}
		given = afterRestart(t, given, fmt.Sprint(n), fmt.Sprint(n+1))
		s := onlyGPUs(withDevice(coretest.GPUs(3), 2, func(d *core.Device) { d.Model = "NVIDIA A2" }), 2)
		given = given.with(nodeInventory(s))
	}
	if len(given.topology) != 1 || len(given.previous.topology) != 0 || len(given.names) != 1 {
		t.Errorf("remembered: %+v", given)
	}
	for n := range 3 * maxNames {
		p := core.Policy{Rules: []core.Rule{{Select: selectGPUs(0), Pool: fmt.Sprint("pool", n)}}}
		given = given.with(inventoryUnder(p, coretest.GPUs(1)))
		if len(given.names) > maxNames+1 || given.names[given.keyOf(first(inventoryUnder(p, coretest.GPUs(1))))] != fmt.Sprint("pool", n) {
			t.Fatalf("%d names", len(given.names))
		}
	}
	text, err := encodeGroups(given, "")
	if err != nil || len(text) > maxGroupFile {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

func first(inv *core.Inventory) (u core.Unit) {
	for u = range inv.Units() {
		break
	}
	return u
}

// On any machine, whatever comes and goes: within a boot no restart moves a unit whose kind is known to another group, no
// name is of two groups, and what is kept is understood.
func TestGroupsOnAnyMachineOverRestarts(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	for range 200 {
		given := assignment{by: []GroupBy{GroupByNone, GroupByNUMA, GroupByNVLink}[random.IntN(3)]}
		type held struct {
			gpu    core.DeviceID
			model  string
			memory uint64
		}
		booked, boots := map[held]string{}, 0
		for range 20 {
			switch random.IntN(6) {
			case 0:
				given = afterRestart(t, given, fmt.Sprint(boots), fmt.Sprint(boots+1))
				boots++
				booked = map[held]string{}
			case 1, 2, 3:
				given = afterRestart(t, given, fmt.Sprint(boots), fmt.Sprint(boots))
			}
			s := onlyGPUs(coretest.GPUs(6), random.Perm(6)[:1+random.IntN(5)]...)
			s.Links = slices.DeleteFunc(slices.Clone(s.Links), func(core.Link) bool { return random.IntN(4) > 0 })
			for i := range s.Devices {
				d := &s.Devices[i]
				d.Model = []string{"A", "B"}[random.IntN(2)]
				d.Memory = []uint64{40 << 30, 80 << 30}[random.IntN(2)]
				d.NUMANode = random.IntN(3) - 1
			}
			inv := nodeInventory(s)
			given = given.with(inv)
			of := groupByDevice(t, groups(inv, given))
			if len(of) != inv.Len() {
				t.Errorf("%d of %d units are in a group", len(of), inv.Len())
			}
			for u := range inv.Units() {
				k := held{u.Device.ID, u.Device.Model, u.Device.Memory}
				name := of[string(u.ID)]
				if was, ok := booked[k]; ok && was != name {
					// A kind that no process has seen since a restart may have lost the model's name to another.
					if !nameReassigned(given, was, given.keyOf(u)) {
						t.Errorf("%v was in %s and is in %s", k, was, name)
					}
				}
				booked[k] = name
			}
		}
		if t.Failed() {
			t.Log(slices.Sorted(maps.Values(given.names)))
			return
		}
	}
}

// nameReassigned reports whether a group's name is another kind's by now.
func nameReassigned(n assignment, name string, k groupKey) bool {
	for other, given := range n.names {
		if given == name && other != k && other.conflicts(k) {
			return true
		}
	}
	return false
}
