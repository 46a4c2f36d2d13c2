package nomad

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/nomad/structs"
)

// islands replaces the NVLinks of the machine h100x8.
func (m machine) islands(t *testing.T, old, links string) {
	t.Helper()
	m.edit(t, old, links)
	if old == allLinks {
		m.edit(t, "switches = ", "# switches = ")
	}
}

// allLinks are the NVLinks of h100x8, twoIslands those of two islands and a GPU without NVLinks.
const (
	allLinks   = "nvlink = 18 all"
	twoIslands = "nvlink = 4 0-2\nnvlink = 4 3-6"
)

// The GPUs of a job are of one group, so of one NUMA node or NVLink island.
func Test19GroupBy(t *testing.T) {
	for by, tc := range map[string]struct {
		names []string // how they end
		sizes []int
	}{
		"none":   {[]string{"HBM3"}, []int{8}},
		"numa":   {[]string{" NUMA 0", " NUMA 1"}, []int{4, 4}},
		"nvlink": {[]string{"HBM3", " NVLink 0000:1b:00.0", " NVLink 0000:61:00.0"}, []int{1, 3, 4}},
	} {
		t.Run(by, func(t *testing.T) {
			m := install(t, "h100x8")
			m.islands(t, allLinks, twoIslands)
			a := startAgent(t, m, map[string]any{"group_by": by})
			groups := a.devices(t, 8, 8)
			slices.SortFunc(groups, func(x, y *structs.NodeDeviceResource) int { return strings.Compare(x.Name, y.Name) })
			var sizes []int
			for i, g := range groups {
				sizes = append(sizes, len(g.Instances))
				if i >= len(tc.names) || !strings.HasSuffix(g.Name, tc.names[i]) {
					t.Errorf("group %q", g.Name)
				}
			}
			if !slices.Equal(sizes, tc.sizes) {
				t.Fatalf("groups of %v, want %v", sizes, tc.sizes)
			}
			largest := slices.Max(sizes)
			for range 30 { // Nomad chooses at random
				got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu", uint64(min(4, largest)), attr("product", "=", "NVIDIA H100 80GB HBM3")))
				if got == nil {
					t.Fatal("blocked")
				}
				if g := group(t, groups, "gpu", got[0].Name); len(got) != 1 || !within(g, got[0].DeviceIDs) {
					t.Errorf("%v are not in %s", got[0].DeviceIDs, g.Name)
				}
				if _, err := a.dm.Reserve(got[0]); err != nil {
					t.Error(err)
				}
			}
			if newCluster(t, node(groups)).place(t, ask("nvidia/gpu", uint64(largest+1))) != nil { // the device checker counts all groups
				t.Errorf("%d GPUs of groups of %v", largest+1, sizes)
			}
		})
	}
}

// Of one group the scheduler takes any GPUs, whatever their order and their links. Only group_by keeps a request on one board.
// If this fails, docs/placement.md needs another text, and the order of devices in a group may be of use.
func Test19OrderIsNotUsed(t *testing.T) {
	for by, together := range map[string]bool{"none": false, "nvlink": true} {
		_, _, groups := onMachine(t, "a100-islands", map[string]any{"group_by": by}, 8)
		sets, split := map[string]bool{}, 0
		for range 40 {
			c := newCluster(t, node(groups))
			first, second := c.place(t, ask("nvidia/gpu", 1)), c.place(t, ask("nvidia/gpu", 2))
			if first == nil || second == nil {
				t.Fatal("blocked")
			}
			boards := map[bool]bool{}
			for _, id := range second[0].DeviceIDs {
				boards[slices.Index(boardOrder(groups), id) < 4] = true
			}
			if len(boards) > 1 {
				split++
			}
			sets[fmt.Sprint(slices.Sorted(slices.Values(second[0].DeviceIDs)))] = true
		}
		if len(sets) < 4 || together != (split == 0) {
			t.Errorf("group_by %s: %d different pairs, %d of two boards", by, len(sets), split)
		}
	}
}

// boardOrder returns the IDs of all devices by PCI address, so those of one board after another.
func boardOrder(groups []*structs.NodeDeviceResource) (ids []string) {
	var all []*structs.NodeDevice
	for _, g := range groups {
		all = append(all, g.Instances...)
	}
	slices.SortFunc(all, func(a, b *structs.NodeDevice) int { return strings.Compare(a.Locality.PciBusID, b.Locality.PciBusID) })
	for _, d := range all {
		ids = append(ids, d.ID)
	}
	return ids
}

// A GPU that is lost, or that lost its NVLinks, stays in the group in which Nomad recorded its allocation, also in a plugin
// that starts after that: the allocation still holds it, and no other gets it.
func Test12GroupsStay(t *testing.T) {
	m := install(t, "h100x8")
	m.islands(t, allLinks, twoIslands)
	start := func() *agent { return startAgent(t, m, map[string]any{"group_by": "nvlink"}) }
	a := start()
	groups := a.devices(t, 8, 8)
	before := names(groups)
	held := newCluster(t, node(groups)).place(t, ask("nvidia/gpu/NVIDIA H100 80GB HBM3 NVLink 0000:1b:00.0", 3))
	if held == nil {
		t.Fatal("blocked")
	}
	check := func(what string, a *agent, healthy int) {
		t.Helper()
		if now := names(a.devices(t, 8, healthy)); !maps.Equal(now, before) {
			t.Errorf("%s: %v, was %v", what, now, before)
		}
	}
	m.ctl(t, "lose", "0")
	check("lost", a, 7)
	a.dm.Shutdown()
	a = start() // which has the island's first GPU from the history only
	check("lost before the start", a, 7)
	m.ctl(t, "restore", "0")
	check("restored", a, 8)
	a.dm.Shutdown()
	last := twoIslands
	for _, links := range []string{"nvlink = 4 0-1\nnvlink = 4 3-6", "nvlink = 4 3-4\nnvlink = 4 5-6", "# no NVLinks", twoIslands} {
		m.islands(t, last, links)
		last = links
		a := start()
		check(links, a, 8)
		if _, err := a.dm.Reserve(held[0]); err != nil { // Nomad looks up the group and its devices
			t.Errorf("%s: %v", links, err)
		}
		a.dm.Shutdown()
	}
}

// A pool with a name is one group, whatever the models.
func Test19PoolsWithNames(t *testing.T) {
	m := install(t, "h100x8")
	m.ctl(t, "set", "3", "name", "NVIDIA H100 NVL")
	m.ctl(t, "set", "3", "memory", "95830 MiB")
	n := node(startAgent(t, m, m.policy(t, `resources: {gpus: [{pattern: "*H100*", name: h100}]}
policy: {rules: [{select: {index: 7}, name: mine}]}
`)).devices(t, 8, 8))
	c := newCluster(t, n)
	for name, want := range map[string]int{"h100": 7, "mine": 1} {
		if got := c.place(t, ask("nvidia/gpu/"+name, uint64(want))); got == nil || len(got[0].DeviceIDs) != want {
			t.Errorf("%s: %v, %s", name, got, c.exhausted())
		}
	}
	joined := group(t, n.NodeResources.Devices, "gpu", "h100")
	for key, shared := range map[string]bool{"memory": false, "product": false, "architecture": true, "compute_capability": true} {
		if _, ok := joined.Attributes[key]; ok != shared {
			t.Errorf("%s: published %t, want %t", key, ok, shared)
		}
	}
}

// A job can request a share of a certain GPU by its ID.
func Test19ShareByID(t *testing.T) {
	m, _, groups := underPolicy(t, "h100x8", "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 2}]}\n", 16)
	gpu := m.uuid(t, 5)
	request := ask("nvidia/gpu-shared", 1, attr("device.ids", "set_contains_any", fmt.Sprintf("%[1]s::0,%[1]s::1", gpu)))
	c := newCluster(t, node(groups))
	for range 2 {
		got := c.place(t, request)
		if got == nil || gpus(got[0].DeviceIDs)[gpu] != 1 {
			t.Fatalf("%v, %s", got, c.exhausted())
		}
	}
	got := c.place(t, request)
	if got != nil && (!placesWithoutDevices || len(got[0].DeviceIDs) > 0) {
		t.Errorf("a third share of two: %v", got[0])
	}
}
