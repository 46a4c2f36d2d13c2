package inventory

import (
	"cmp"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Numbering holds the numbers of devices, which policies select by. All agents of a node use one numbering: see
// Host.
type Numbering struct {
	Generation int      // number of Rebind commands since the boot; of two numberings the one with the higher generation counts
	Numbers    []Number `json:",omitempty"` // sorted by ID
}

// NewNumbering returns a numbering in which each device has one number and each number one device. Of several, the
// first one counts.
func NewNumbering(generation int, of []Number) Numbering {
	return newNumbers(Numbering{Numbers: of}).numbering(generation)
}

// SharedNumbering returns the numbering of several agents, in which each device has one number: of several, the
// first one. Two devices can have the same number for a moment: one agent has dropped the first and numbered the
// second, and another agent has not yet.
func SharedNumbering(generation int, of []Number) Numbering {
	n := Numbering{generation, slices.SortedStableFunc(slices.Values(of), func(a, b Number) int { return cmp.Compare(a.ID, b.ID) })}
	n.Numbers = slices.CompactFunc(n.Numbers, func(a, b Number) bool { return a.ID == b.ID })
	return n
}

// Number is the number of a GPU or MIG instance.
type Number struct {
	ID    gpu.DeviceID
	Index gpu.DeviceIndex // Instance is -1 for a GPU
}

// Equal reports whether two numberings have the same generation and numbers.
func (n Numbering) Equal(o Numbering) bool {
	return n.Generation == o.Generation && slices.Equal(n.Numbers, o.Numbers)
}

// Of returns the number of a device.
func (n Numbering) Of(id gpu.DeviceID) (gpu.DeviceIndex, bool) {
	i, ok := slices.BinarySearchFunc(n.Numbers, id, func(m Number, id gpu.DeviceID) int { return cmp.Compare(m.ID, id) })
	if !ok {
		return gpu.DeviceIndex{}, false
	}
	return n.Numbers[i].Index, true
}

// In returns the numbers of n that are also in o. If the generations differ there are none.
func (n Numbering) In(o Numbering) Numbering {
	both := Numbering{Generation: n.Generation}
	for _, each := range n.Numbers {
		if at, ok := o.Of(each.ID); ok && at == each.Index && n.Generation == o.Generation {
			both.Numbers = append(both.Numbers, each)
		}
	}
	return both
}

// numberTable is a mutable Numbering.
type numberTable struct {
	byID  map[gpu.DeviceID]gpu.DeviceIndex
	taken map[gpu.DeviceIndex]bool
}

func newNumbers(n Numbering) numberTable {
	m := numberTable{map[gpu.DeviceID]gpu.DeviceIndex{}, map[gpu.DeviceIndex]bool{}}
	for _, each := range n.Numbers {
		m.assign(each.ID, each.Index)
	}
	return m
}

// assign gives a device a number, unless the device has one or the number is in use.
func (m numberTable) assign(id gpu.DeviceID, at gpu.DeviceIndex) {
	if _, ok := m.byID[id]; !ok && !m.taken[at] {
		m.byID[id], m.taken[at] = at, true
	}
}

func (m numberTable) drop(id gpu.DeviceID) {
	if at, ok := m.byID[id]; ok {
		delete(m.byID, id)
		delete(m.taken, at)
	}
}

// dropUnlisted drops the numbers of devices that are not in a snapshot, unless one of them may be a GPU without a
// known UUID.
func (m numberTable) dropUnlisted(s gpu.Snapshot) {
	if s.HasUnidentified() {
		return
	}
	known := map[gpu.DeviceID]bool{}
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

// complete reports whether n has a number for each device of a complete snapshot, and no others.
func (n Numbering) complete(s gpu.Snapshot) bool {
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

// agrees reports whether n and shared have the same number for each device that is in both. With all, each device
// of n must be in shared.
func (n Numbering) agrees(shared Numbering, all bool) bool {
	for _, each := range n.Numbers {
		if at, ok := shared.Of(each.ID); ok && at != each.Index || !ok && all {
			return false
		}
	}
	return true
}

// Update gives numbers to new devices and drops those of removed devices. A new device gets its NVML index, unless
// another device has that number. A number that the agents of the node share overrides the number in n, which may
// be older; a shared numbering of a higher generation replaces n.
//
// Two agents may find a new device at different indices, if other devices are added or removed meanwhile. So where
// numbers are shared, a number that is not shared yet is only proposed.
//
//	nomad-gpu  finds a at index 3, proposes a=3 -> written ............ reads a=3
//	k8s-gpu    (another GPU is removed) finds a at index 2, proposes a=2 -> reads a=3
func (n Numbering) Update(s gpu.Snapshot, h Host) (next, proposed Numbering) {
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
	if s.Driver.State == gpu.DriverReady {
		m.dropUnlisted(s)
	}
	others := map[gpu.DeviceIndex]bool{}
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
		if s.HasUnidentified() { // a shared number may be that GPU's
			m.assign(o.ID, o.Index)
		}
	}
	m.numberDevices(s, func(id gpu.DeviceID, _ gpu.DeviceIndex) {
		if number, ok := shared.Of(id); ok {
			m.assign(id, number)
		}
	})
	if h.SharesNumbers {
		next = m.numbering(n.Generation)
	}
	m.numberDevices(s, func(id gpu.DeviceID, at gpu.DeviceIndex) {
		if !others[at] {
			m.assign(id, at)
		}
	})
	if proposed = m.numbering(n.Generation); !h.SharesNumbers {
		next = proposed
	}
	return next, proposed
}

// Initial gives numbers to the devices of a node that is read for the first time.
func (n Numbering) Initial(s gpu.Snapshot) Numbering {
	n, _ = n.Update(s, Host{})
	return n
}

// numberDevices calls give with the NVML index of each device of a snapshot: GPUs first, because the number of an
// instance contains that of its GPU.
func (m numberTable) numberDevices(s gpu.Snapshot, give func(gpu.DeviceID, gpu.DeviceIndex)) {
	for _, d := range s.Devices {
		if d.Profile == "" {
			give(d.ID, gpu.DeviceIndex{GPU: d.Index, Instance: -1})
		}
	}
	for _, e := range s.Excluded {
		if e.At.GPU != "" && e.At.GI == gpu.Whole {
			give(e.At.GPU, gpu.DeviceIndex{GPU: e.Index, Instance: -1})
		}
	}
	for _, d := range s.Devices {
		if parent, ok := m.byID[d.At.GPU]; ok && d.Profile != "" {
			give(d.ID, gpu.DeviceIndex{GPU: parent.GPU, Instance: d.Instance})
		}
	}
}

// number returns the number of a device; {-1, -1} if it has none.
func (o *offerBuilder) number(d *gpu.Device) gpu.DeviceIndex {
	if at, ok := o.bound.Numbering.Of(d.ID); ok && o.indexed {
		return at
	}
	return gpu.DeviceIndex{GPU: -1, Instance: -1}
}

// hasProposedNumber reports whether a device will have a number when the agents of the node have shared it.
func (o *offerBuilder) hasProposedNumber(d *gpu.Device) bool {
	_, proposed := o.bound.Proposed.Of(d.ID)
	return o.indexed && proposed && o.number(d).GPU < 0
}
