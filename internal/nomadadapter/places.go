package nomadadapter

import (
	"fmt"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core"
)

// GroupBy says where a job's devices may come from: Nomad takes them from one group, and all of it is near.
type GroupBy string

// The ways to group. Those that split say in a group's name which part it is.
const (
	GroupByNone   GroupBy = "none"
	GroupByNUMA   GroupBy = "numa"   // "<name> NUMA 0"; a GPU without a node stays where it is
	GroupByNVLink GroupBy = "nvlink" // "<name> NVLink 0000:17:00.0", after the first GPU of an island; a GPU without NVLinks stays
)

// place is the part of the machine that a GPU belongs to, as a group's name ends; "" is none.
type place string

// seat is a GPU as one way to group knows it.
type seat struct {
	by  GroupBy
	gpu core.DeviceID
}

// places are the parts of the machine in which GPUs were first seen. It is immutable; nil has seen none. A GPU
// stays where it was first seen, whatever becomes of its links: allocations are booked under its group's name.
//
//	reading 1   A = B, C = D          A, B in "NVLink A", C, D in "NVLink C"
//	reading 2   A, B lost, C   D      the same
//	reading 3   A = B = E             E in "NVLink A"
type places map[seat]place

// with seats the GPUs of inv that have no place yet.
func (p places) with(inv *core.Inventory, by GroupBy) places {
	if by != GroupByNUMA && by != GroupByNVLink {
		return p
	}
	var strangers []core.Unit
	for u := range inv.Units() {
		if _, known := p[seat{by, u.Device.At.GPU}]; !known {
			strangers = append(strangers, u)
		}
	}
	if strangers == nil {
		return p
	}
	next := places{}
	maps.Copy(next, p)
	found := numaNodes
	if by == GroupByNVLink {
		found = p.islands
	}
	in := found(inv)
	for _, u := range strangers {
		where := in[u.Device.At.GPU]
		if where != "" || inv.Driver().State == core.DriverReady && u.Health.Schedulable() { // else its links may come yet
			next[seat{by, u.Device.At.GPU}] = where
		}
	}
	return next
}

func numaNodes(inv *core.Inventory) map[core.DeviceID]place {
	in := map[core.DeviceID]place{}
	for u := range inv.Units() {
		if n := u.Device.NUMANode; n >= 0 {
			in[u.Device.At.GPU] = place(fmt.Sprintf("NUMA %d", n))
		}
	}
	return in
}

// islands are the places of GPUs by their NVLinks: that of a neighbour who has one already, or a new one. What is
// cut up has none, as its NVLinks do not work.
func (p places) islands(inv *core.Inventory) map[core.DeviceID]place {
	slots := map[core.DeviceID]core.PCIAddress{}
	for u := range inv.Units() {
		if u.Device.Profile == "" {
			slots[u.Device.ID] = u.Device.PCI
		}
	}
	taken := map[place]bool{"": true}
	for s, where := range p {
		taken[where] = taken[where] || s.by == GroupByNVLink
	}
	in := map[core.DeviceID]place{}
	for _, gpus := range inv.Islands() {
		gpus = slices.DeleteFunc(gpus, func(gpu core.DeviceID) bool { _, offered := slots[gpu]; return !offered })
		where := p.shared(gpus)
		for _, name := range islandNames(gpus, slots) {
			if where == "" && !taken[name] {
				where = name
			}
		}
		taken[where] = true
		for _, gpu := range gpus {
			in[gpu] = where
		}
	}
	return in
}

// shared is the place of the first of these GPUs that has an island; "" if none has.
func (p places) shared(gpus []core.DeviceID) place {
	for _, gpu := range gpus {
		if where := p[seat{GroupByNVLink, gpu}]; where != "" {
			return where
		}
	}
	return ""
}

// islandNames are the names that an island may have, the best first: slots are the same on every machine of a
// make, and outlast their GPUs.
func islandNames(gpus []core.DeviceID, slots map[core.DeviceID]core.PCIAddress) (names []place) {
	for _, gpu := range gpus {
		if slots[gpu] != "" {
			names = append(names, place("NVLink "+slots[gpu]))
		}
	}
	slices.Sort(names)
	for _, gpu := range gpus {
		names = append(names, place("NVLink "+gpu))
	}
	return names
}
