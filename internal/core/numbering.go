package core

import (
	"cmp"
	"maps"
	"slices"
)

// Numbering is the numbers of devices, which rules by index go by. The agents of a host share one: see Host.
type Numbering struct {
	Generation int      // orders to number anew since the boot; of two numberings the one with more of them counts
	Numbers    []Number `json:",omitempty"` // by ID
}

// NewNumbering returns a numbering in which each device has one number and each number one device: of several the first.
func NewNumbering(generation int, of []Number) Numbering {
	return newNumbers(Numbering{Numbers: of}).numbering(generation)
}

// Number is a GPU's, or a MIG instance's, number.
type Number struct {
	ID DeviceID
	At DeviceIndex // Instance is -1 for a GPU
}

// Equal reports whether two numberings give the same numbers by the same order.
func (n Numbering) Equal(o Numbering) bool {
	return n.Generation == o.Generation && slices.Equal(n.Numbers, o.Numbers)
}

// Of is the number of a device.
func (n Numbering) Of(id DeviceID) (DeviceIndex, bool) {
	i, ok := slices.BinarySearchFunc(n.Numbers, id, func(m Number, id DeviceID) int { return cmp.Compare(m.ID, id) })
	if !ok {
		return DeviceIndex{}, false
	}
	return n.Numbers[i].At, true
}

// numbers is a numbering in the making.
type numbers struct {
	of    map[DeviceID]DeviceIndex
	taken map[DeviceIndex]bool
	peer  map[DeviceIndex]DeviceID // taken in another agent's numbering
}

func newNumbers(n Numbering) numbers {
	m := numbers{map[DeviceID]DeviceIndex{}, map[DeviceIndex]bool{}, map[DeviceIndex]DeviceID{}}
	for _, each := range n.Numbers {
		m.give(each.ID, each.At)
	}
	return m
}

// give numbers a device, unless it has a number or another device has this one.
func (m numbers) give(id DeviceID, at DeviceIndex) {
	if _, ok := m.of[id]; !ok && !m.taken[at] && cmp.Or(m.peer[at], id) == id {
		m.of[id], m.taken[at] = at, true
	}
}

// keep drops the numbers of devices that a reading does not have.
func (m numbers) keep(s Snapshot) {
	known := map[DeviceID]bool{}
	for _, d := range s.Devices {
		known[d.ID] = true
	}
	for _, e := range s.Excluded {
		known[e.At.GPU] = true
	}
	for id, at := range m.of {
		if !known[id] {
			delete(m.of, id)
			delete(m.taken, at)
		}
	}
}

func (m numbers) numbering(generation int) Numbering {
	n := Numbering{Generation: generation}
	for _, id := range slices.Sorted(maps.Keys(m.of)) {
		n.Numbers = append(n.Numbers, Number{id, m.of[id]})
	}
	return n
}

// complete reports whether n numbers the devices of a complete reading, and no others.
func (n Numbering) complete(s Snapshot) bool {
	if len(s.Excluded) > 0 || len(n.Numbers) != len(s.Devices) {
		return false
	}
	for i := range s.Devices {
		if _, ok := n.Of(s.Devices[i].ID); !ok {
			return false
		}
	}
	return true
}

// see numbers the devices that are new, and drops the numbers of those that are gone for good. A new device has the
// driver's number, unless that is another device's, here or in the numbering of a peer, another agent of the host. If the
// peer numbers the device itself, that number counts. A peer's numbering that was ordered later replaces n.
func (n Numbering) see(s Snapshot, peer Numbering) Numbering {
	switch {
	case peer.Generation > n.Generation:
		n = peer
	case peer.Generation < n.Generation:
		peer = Numbering{}
	}
	if n.complete(s) {
		return n
	}
	m := newNumbers(n)
	if s.Driver.State == DriverReady {
		m.keep(s)
	}
	for _, p := range peer.Numbers {
		m.peer[p.At] = p.ID
	}
	give := func(id DeviceID, at DeviceIndex) {
		if number, ok := peer.Of(id); ok {
			at = number
		}
		m.give(id, at)
	}
	for _, d := range s.Devices {
		if d.Profile == "" {
			give(d.ID, DeviceIndex{d.Index, -1})
		}
	}
	for _, e := range s.Excluded {
		if e.At.GPU != "" && e.At.GI == Whole {
			give(e.At.GPU, DeviceIndex{e.Index, -1})
		}
	}
	for _, d := range s.Devices {
		if gpu, ok := m.of[d.At.GPU]; ok && d.Profile != "" {
			give(d.ID, DeviceIndex{gpu.GPU, d.Instance})
		}
	}
	return m.numbering(n.Generation)
}

// number is that of a device; {-1, -1} if it has none.
func (o *offers) number(d *Device) DeviceIndex {
	if !o.indexed {
		return DeviceIndex{-1, -1}
	}
	at, ok := o.numbering.Of(d.ID)
	if !ok {
		return DeviceIndex{-1, -1}
	}
	return at
}
