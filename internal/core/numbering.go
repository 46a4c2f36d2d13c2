package core

import (
	"cmp"
	"maps"
	"slices"
)

// Numbering is the numbers of devices, which rules by index go by. The agents of a host share one: see Host. What one of them
// has written down there first counts, for itself in a later process, too.
type Numbering struct {
	Generation int      // orders to number anew since the boot; of two numberings the one with more of them counts
	Numbers    []Number `json:",omitempty"` // by ID
}

// NewNumbering returns a numbering in which each device has one number and each number one device: of several the first.
func NewNumbering(generation int, of []Number) Numbering {
	return newNumbers(Numbering{Numbers: of}).numbering(generation)
}

// SharedNumbering returns what several agents have numbered: each device has one number, of several the first. Two
// devices have the same number if one agent has forgotten the one and numbered the other, and another agent has not yet.
func SharedNumbering(generation int, of []Number) Numbering {
	n := Numbering{generation, slices.SortedStableFunc(slices.Values(of), func(a, b Number) int { return cmp.Compare(a.ID, b.ID) })}
	n.Numbers = slices.CompactFunc(n.Numbers, func(a, b Number) bool { return a.ID == b.ID })
	return n
}

// Number is a GPU's, or a MIG instance's, number.
type Number struct {
	ID    DeviceID
	Index DeviceIndex `json:"At"` // Instance is -1 for a GPU
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
	return n.Numbers[i].Index, true
}

// numberTable is a numbering in the making.
type numberTable struct {
	byID  map[DeviceID]DeviceIndex
	taken map[DeviceIndex]bool
}

func newNumbers(n Numbering) numberTable {
	m := numberTable{map[DeviceID]DeviceIndex{}, map[DeviceIndex]bool{}}
	for _, each := range n.Numbers {
		m.assign(each.ID, each.Index)
	}
	return m
}

// assign numbers a device, unless it has a number or another device has this one.
func (m numberTable) assign(id DeviceID, at DeviceIndex) {
	if _, ok := m.byID[id]; !ok && !m.taken[at] {
		m.byID[id], m.taken[at] = at, true
	}
}

func (m numberTable) drop(id DeviceID) {
	if at, ok := m.byID[id]; ok {
		delete(m.byID, id)
		delete(m.taken, at)
	}
}

// dropUnlisted drops the numbers of devices that a reading does not have, unless one of them may be a GPU that is listed without its
// UUID.
func (m numberTable) dropUnlisted(s Snapshot) {
	if s.HasUnidentified() {
		return
	}
	known := map[DeviceID]bool{}
	for _, d := range s.Devices {
		known[d.ID] = true
	}
	for _, e := range s.Excluded {
		known[e.At.GPU] = true
	}
	for id := range m.byID {
		if !known[id] {
			m.drop(id)
		}
	}
}

func (m numberTable) numbering(generation int) Numbering {
	n := Numbering{Generation: generation}
	for _, id := range slices.Sorted(maps.Keys(m.byID)) {
		n.Numbers = append(n.Numbers, Number{id, m.byID[id]})
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

// agrees reports whether n has no other numbers than shared for devices that both have, and all of its are shared if they
// have to be.
func (n Numbering) agrees(shared Numbering, all bool) bool {
	for _, each := range n.Numbers {
		if at, ok := shared.Of(each.ID); ok && at != each.Index || !ok && all {
			return false
		}
	}
	return true
}

// Update numbers the devices that are new, and drops the numbers of those that are gone for good. A new device has the
// driver's number, unless that is another device's. What the agents of the host have shared counts more than what is known
// here, whose numbers may be older; and replaces it if it was ordered later.
//
// Two agents may see a new device at different indices, as others come and go meanwhile. So where numbers are shared, one that is
// not yet shared is only proposed.
//
//	nomad-gpu  sees a as 3, proposes a=3 -> written ................. told a=3
//	k8s-gpu      (another GPU goes) sees a as 2, proposes a=2 -> is told a=3
func (n Numbering) Update(s Snapshot, h Host) (next, proposed Numbering) {
	shared := h.Numbering
	switch {
	case shared.Generation > n.Generation:
		n = NewNumbering(shared.Generation, shared.Numbers)
	case shared.Generation < n.Generation:
		shared = Numbering{}
	}
	if n.complete(s) && n.agrees(shared, h.SharesNumbers) {
		return n, n
	}
	m := newNumbers(n)
	if s.Driver.State == DriverReady {
		m.dropUnlisted(s)
	}
	others := map[DeviceIndex]bool{}
	for _, o := range shared.Numbers {
		others[o.Index] = true
	}
	for id, at := range m.byID {
		number, ok := shared.Of(id)
		if ok && number != at || !ok && h.SharesNumbers && others[at] {
			m.drop(id)
		}
	}
	for _, o := range shared.Numbers {
		if s.HasUnidentified() { // it may be that one
			m.assign(o.ID, o.Index)
		}
	}
	m.numberDevices(s, func(id DeviceID, _ DeviceIndex) {
		if number, ok := shared.Of(id); ok {
			m.assign(id, number)
		}
	})
	if h.SharesNumbers {
		next = m.numbering(n.Generation)
	}
	m.numberDevices(s, func(id DeviceID, at DeviceIndex) {
		if !others[at] {
			m.assign(id, at)
		}
	})
	if proposed = m.numbering(n.Generation); !h.SharesNumbers {
		next = proposed
	}
	return next, proposed
}

// Initial numbers the devices of a machine that is seen for the first time.
func (n Numbering) Initial(s Snapshot) Numbering {
	n, _ = n.Update(s, Host{})
	return n
}

// numberDevices gives each device that a reading names the number that the driver has for it: GPUs first, as the numbers of instances
// begin with theirs.
func (m numberTable) numberDevices(s Snapshot, give func(DeviceID, DeviceIndex)) {
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
		if parent, ok := m.byID[d.At.GPU]; ok && d.Profile != "" {
			give(d.ID, DeviceIndex{parent.GPU, d.Instance})
		}
	}
}

// number is that of a device; {-1, -1} if it has none.
func (o *offerBuilder) number(d *Device) DeviceIndex {
	if !o.indexed {
		return DeviceIndex{-1, -1}
	}
	at, ok := o.numbering.Of(d.ID)
	if !ok {
		return DeviceIndex{-1, -1}
	}
	return at
}

// hasProposedNumber reports whether a device has a number as soon as the agents of the host have shared it.
func (o *offerBuilder) hasProposedNumber(d *Device) bool {
	_, proposed := o.proposed.Of(d.ID)
	return o.indexed && proposed && o.number(d).GPU < 0
}
