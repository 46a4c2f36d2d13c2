package nomadadapter

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// topologyGroup is the NUMA node or NVLink island of a GPU, as the group's name ends; "" = none.
type topologyGroup string

// topologyKey is a GPU under one value of group_by.
type topologyKey struct {
	by     config.GroupBy
	device gpu.DeviceID
}

// topologyGroups are the NUMA nodes and islands in which GPUs were first found. It is immutable; nil has none. A GPU stays
// in the one where it was first found, whatever its links are later: allocations are recorded under its group's name.
//
//	reading 1   A = B, C = D          A, B in "NVLink A", C, D in "NVLink C"
//	reading 2   A, B lost, C   D      the same
//	reading 3   A = B = E             E in "NVLink A"
type topologyGroups map[topologyKey]topologyGroup

// previousTopology is the topology group in which an earlier process announced a GPU, and the number of boots since its
// links (or NUMA node) last confirmed it; 0 = confirmed in this boot.
type previousTopology struct {
	group topologyGroup
	boots int
}

// with assigns a topology group to the GPUs of inv that have none. A GPU that had one before the node booted, and has no
// links (or NUMA node) now, gets the same again; it stays in previous until its links confirm it.
//
//	before a boot   A = B = C in "NVLink A", D in none
//	after it        A = B, C   D    the same: missing links move no GPU
//	or              A = B, C = D    D in "NVLink A", too: present links do
func (t topologyGroups) with(inv *inventory.Allocatable, by config.GroupBy, previous map[topologyKey]previousTopology) (topologyGroups, map[topologyKey]previousTopology) {
	if by != config.GroupByNUMA && by != config.GroupByNVLink {
		return t, previous
	}
	open := map[gpu.DeviceID]inventory.Unit{} // a unit of each GPU that is not assigned or not confirmed: a schedulable one if there is one
	for u := range inv.Units() {
		k := topologyKey{by, u.Device.At.GPU}
		_, assigned := t[k]
		_, unconfirmed := previous[k]
		if other, ok := open[k.device]; (!assigned || unconfirmed) && (!ok || !other.Health.Schedulable()) {
			open[k.device] = u
		}
	}
	if len(open) == 0 {
		return t, previous
	}
	present := numaNodes(inv)
	if by == config.GroupByNVLink {
		present = t.islands(inv, previous)
	}
	next, unconfirmed := copyOf(t), maps.Clone(previous)
	for id, u := range open {
		k := topologyKey{by, id}
		group, assigned := t[k]
		if !assigned {
			if group, assigned = present.groups[id], true; group == "" {
				group, assigned = previous[k].assign(u, by, inv.Driver())
			}
		}
		if !assigned {
			continue
		}
		next[k] = group
		if group == "" || group == present.confirmed[id] || group != previous[k].group {
			delete(unconfirmed, k)
		}
	}
	return next, unconfirmed
}

// assign returns the topology group of a GPU without links (or NUMA node): the previous one, or none. None is final once
// the GPU accepts work; until then its links may still appear. A GPU in MIG mode has no island: its NVLinks are disabled.
func (p previousTopology) assign(u inventory.Unit, by config.GroupBy, driver gpu.Driver) (group topologyGroup, assigned bool) {
	if p.group != "" && (by == config.GroupByNUMA || u.Device.Profile == "") {
		return p.group, true
	}
	return "", driver.State == gpu.DriverReady && u.Health.Schedulable()
}

// presentTopology is the topology groups of GPUs by one inventory.
type presentTopology struct {
	groups    map[gpu.DeviceID]topologyGroup
	confirmed map[gpu.DeviceID]topologyGroup // those of groups that the links (or NUMA nodes) of this inventory show
}

func numaNodes(inv *inventory.Allocatable) presentTopology {
	nodes := map[gpu.DeviceID]topologyGroup{}
	for u := range inv.Units() {
		if n := u.Device.NUMANode; n >= 0 {
			nodes[u.Device.At.GPU] = topologyGroup(fmt.Sprintf("NUMA %d", n))
		}
	}
	return presentTopology{nodes, nodes}
}

// islands returns the islands of GPUs by their NVLinks: the island that a linked GPU has, the one in which most of them
// were previously, or a new one. GPUs in MIG mode have none. If an island was split, its largest part confirms the name;
// the other parts keep it unconfirmed.
func (t topologyGroups) islands(inv *inventory.Allocatable, previous map[topologyKey]previousTopology) presentTopology {
	slots := map[gpu.DeviceID]gpu.PCIAddress{}
	for u := range inv.Units() {
		if u.Device.Profile == "" {
			slots[u.Device.ID] = u.Device.PCI
		}
	}
	taken := map[topologyGroup]bool{"": true}
	for k, group := range t {
		taken[group] = taken[group] || k.by == config.GroupByNVLink
	}
	for k, p := range previous {
		taken[p.group] = taken[p.group] || k.by == config.GroupByNVLink
	}
	present := presentTopology{map[gpu.DeviceID]topologyGroup{}, map[gpu.DeviceID]topologyGroup{}}
	largest := map[topologyGroup][]gpu.DeviceID{}
	for _, ids := range inv.Islands() {
		ids = slices.DeleteFunc(ids, func(id gpu.DeviceID) bool { _, offered := slots[id]; return !offered })
		group := cmp.Or(t.islandOf(ids), previousIsland(ids, previous))
		for _, name := range islandNames(ids, slots) {
			if group == "" && !taken[name] {
				group = name
			}
		}
		taken[group] = true
		for _, id := range ids {
			present.groups[id] = group
		}
		if len(ids) > len(largest[group]) {
			largest[group] = ids
		}
	}
	for group, ids := range largest {
		for _, id := range ids {
			present.confirmed[id] = group
		}
	}
	return present
}

// islandOf returns the island of the first of these GPUs that has one; "" if none has.
func (t topologyGroups) islandOf(ids []gpu.DeviceID) topologyGroup {
	for _, id := range ids {
		if group := t[topologyKey{config.GroupByNVLink, id}]; group != "" {
			return group
		}
	}
	return ""
}

// previousIsland returns the island in which most of these GPUs were; "" if none was in one.
func previousIsland(ids []gpu.DeviceID, previous map[topologyKey]previousTopology) (most topologyGroup) {
	count := map[topologyGroup]int{}
	for _, id := range ids {
		if p := previous[topologyKey{config.GroupByNVLink, id}]; p.group != "" {
			count[p.group]++
		}
	}
	for _, group := range slices.Sorted(maps.Keys(count)) {
		if count[group] > count[most] {
			most = group
		}
	}
	return most
}

// islandNames returns the possible names of an island, the preferred first: PCI addresses are the same on all nodes of a
// model, and stay when a GPU is replaced.
func islandNames(ids []gpu.DeviceID, slots map[gpu.DeviceID]gpu.PCIAddress) (names []topologyGroup) {
	for _, id := range ids {
		if slots[id] != "" {
			names = append(names, topologyGroup("NVLink "+slots[id]))
		}
	}
	slices.Sort(names)
	for _, id := range ids {
		names = append(names, topologyGroup("NVLink "+id))
	}
	return names
}
