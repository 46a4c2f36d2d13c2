package nomadadapter

import (
	"cmp"
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

// with gives a place to the GPUs of inv that have none yet. A GPU that had a place before the machine booted, and shows
// no links (or NUMA node) now, has that place again; it stays among earlier until its links confirm it.
//
//	before a boot   A = B = C in "NVLink A", D in none
//	after it        A = B, C   D    the same: links that are missing move no GPU
//	or              A = B, C = D    D in "NVLink A", too: links that are there do
func (p places) with(inv *core.Inventory, by GroupBy, earlier map[seat]earlierPlace) (places, map[seat]earlierPlace) {
	if by != GroupByNUMA && by != GroupByNVLink {
		return p, earlier
	}
	open := map[core.DeviceID]core.Unit{} // of each GPU one that takes work, if one does
	for u := range inv.Units() {
		s := seat{by, u.Device.At.GPU}
		_, placed := p[s]
		_, unconfirmed := earlier[s]
		if was, ok := open[s.gpu]; (!placed || unconfirmed) && (!ok || !was.Health.Schedulable()) {
			open[s.gpu] = u
		}
	}
	if len(open) == 0 {
		return p, earlier
	}
	found := numaNodes(inv)
	if by == GroupByNVLink {
		found = p.islands(inv, earlier)
	}
	next, unconfirmed := maps.Clone(p), maps.Clone(earlier)
	if next == nil {
		next = places{}
	}
	for gpu, u := range open {
		s := seat{by, gpu}
		where, placed := p[s]
		if !placed {
			if where, placed = found.in[gpu], true; where == "" {
				where, placed = recalled(u, by, earlier[s], inv.Driver())
			}
		}
		if !placed {
			continue
		}
		next[s] = where
		if where == "" || where == found.confirmed[gpu] || where != earlier[s].place {
			delete(unconfirmed, s)
		}
	}
	return next, unconfirmed
}

// recalled is the place of a GPU of which there is nothing to see: the one that it had, or none. It has none for good
// once it takes work; until then its links may come yet. What is cut up has none: its NVLinks do not work.
func recalled(u core.Unit, by GroupBy, before earlierPlace, driver core.Driver) (where place, placed bool) {
	if before.place != "" && (by == GroupByNUMA || u.Device.Profile == "") {
		return before.place, true
	}
	return "", driver.State == core.DriverReady && u.Health.Schedulable()
}

// found are the places of GPUs as a reading gives them.
type found struct {
	in        map[core.DeviceID]place
	confirmed map[core.DeviceID]place // those of in that the reading shows to be true; else they are remembered
}

func numaNodes(inv *core.Inventory) found {
	in := map[core.DeviceID]place{}
	for u := range inv.Units() {
		if n := u.Device.NUMANode; n >= 0 {
			in[u.Device.At.GPU] = place(fmt.Sprintf("NUMA %d", n))
		}
	}
	return found{in, in}
}

// islands are the places of GPUs by their NVLinks: that of a neighbour who has one already, that which most of them had
// earlier, or a new one. What is cut up has none, as its NVLinks do not work. If an island has come apart, its largest
// part shows that the place is true; the others only remember it.
func (p places) islands(inv *core.Inventory, earlier map[seat]earlierPlace) found {
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
	for s, e := range earlier {
		taken[e.place] = taken[e.place] || s.by == GroupByNVLink
	}
	f := found{map[core.DeviceID]place{}, map[core.DeviceID]place{}}
	largest := map[place][]core.DeviceID{}
	for _, gpus := range inv.Islands() {
		gpus = slices.DeleteFunc(gpus, func(gpu core.DeviceID) bool { _, offered := slots[gpu]; return !offered })
		where := cmp.Or(p.shared(gpus), sharedEarlier(gpus, earlier))
		for _, name := range islandNames(gpus, slots) {
			if where == "" && !taken[name] {
				where = name
			}
		}
		taken[where] = true
		for _, gpu := range gpus {
			f.in[gpu] = where
		}
		if len(gpus) > len(largest[where]) {
			largest[where] = gpus
		}
	}
	for where, gpus := range largest {
		for _, gpu := range gpus {
			f.confirmed[gpu] = where
		}
	}
	return f
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

// sharedEarlier is the island in which most of these GPUs were; "" if none was in one.
func sharedEarlier(gpus []core.DeviceID, earlier map[seat]earlierPlace) (most place) {
	were := map[place]int{}
	for _, gpu := range gpus {
		if e := earlier[seat{GroupByNVLink, gpu}]; e.place != "" {
			were[e.place]++
		}
	}
	for _, where := range slices.Sorted(maps.Keys(were)) {
		if were[where] > were[most] {
			most = where
		}
	}
	return most
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
