package core

import (
	"cmp"
	"iter"
	"slices"
	"strconv"
	"time"
)

// UnitID names a unit to the orchestrators: the device's ID, and "::" with the number of the replica if the
// device is shared (at most 63 characters, the kubelet's limit).
type UnitID string

// replicaID is the ID of the n-th unit of a shared device, in the spelling of NVIDIA's k8s-device-plugin.
func replicaID(id DeviceID, n int) UnitID { return UnitID(string(id) + "::" + strconv.Itoa(n)) }

// Unit is what one request consumes.
type Unit struct {
	ID      UnitID
	Device  Device
	Pool    string  // what a request names; units of a pool are interchangeable
	Sharing Sharing // how the device is shared among its units
	Replica int     // number of the unit among those of its device, from 0
	Health  Health
}

// Inventory is what the machine offers now. It is immutable; a nil *Inventory offers nothing.
type Inventory struct {
	driver           Driver
	units            []Unit // in canonical order
	excluded         []Exclusion
	links            []Link
	nodes            []string
	deviceNodes      bool
	packed           bool
	policyWarnings   []string
	outdatedBindings []string
	binding          Binding
	positionBindings []PositionBinding
	awaitsNumber     bool // a device is not offered yet NewHealth it waits for its number
	overlaps         []Overlap
	byID             map[UnitID]int // index into units
	retiring         map[UnitID]time.Time
}

// BuildInventory returns what a reading and its conditions mean under a configuration, on a machine of which devices are numbered,
// and bound, already. It never fails: what can't be offered is in Excluded, with the reason.
func BuildInventory(s Snapshot, l Ledger, c InventoryConfig, mode HealthMode, was Binding) *Inventory {
	inv := &Inventory{
		driver: s.Driver, excluded: slices.Clone(s.Excluded), links: s.Links, nodes: s.Nodes,
		deviceNodes: c.DeviceNodes, packed: c.Packed,
	}
	lost := l.Lost(s.Devices)
	all := newOfferBuilder(s, c, was, lost)
	l = l.ForMode(mode)
	for i := range s.Devices {
		d := &s.Devices[i]
		switch o := all.decide(d); o.visibility {
		case visible:
			inv.units = appendUnits(inv.units, *d, o, applyMode(mode, l.Health(d.At)))
		case excluded:
			inv.excluded = append(inv.excluded, Exclusion{Index: d.Index, At: d.At, PCI: d.PCI, Reason: o.reason})
		case hidden:
		}
	}
	inv.binding, inv.positionBindings, inv.awaitsNumber = all.binding(), all.positionBindings(), all.awaitsNumber
	if s.Driver.State == DriverReady && len(s.Excluded) == 0 && !all.awaitsNumber { // else a device that is missing may be the one that is meant
		inv.policyWarnings = all.unmatchedRules()
		if len(inv.positionBindings) > 0 {
			inv.outdatedBindings = all.outdatedBindings(presentOrder(s, c, lost))
		}
	}
	inv.policyWarnings = append(inv.policyWarnings, mixedPoolWarnings(inv.units)...)
	slices.SortFunc(inv.excluded, CompareExclusions)
	return inv.withIndex()
}

// presentOrder is what the positions of the policy would mean if the devices that are not lost were seen for the first time.
func presentOrder(s Snapshot, c InventoryConfig, lost map[DeviceID]bool) *offerBuilder {
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d Device) bool { return lost[d.ID] })
	fresh := newOfferBuilder(s, c, Binding{Numbering: Numbering{}.Initial(s)}, nil)
	for i := range s.Devices {
		fresh.decide(&s.Devices[i])
	}
	return fresh
}

// appendUnits adds the units of a device: one, or as many as there are replicas.
func appendUnits(units []Unit, d Device, o offer, h Health) []Unit {
	u := Unit{ID: UnitID(d.ID), Device: d, Pool: o.pool, Sharing: o.sharing, Health: h}
	if o.sharing.Mode == Exclusive {
		return append(units, u)
	}
	for u.Replica = range o.sharing.Replicas {
		u.ID = replicaID(d.ID, u.Replica)
		units = append(units, u)
	}
	return units
}

// compareUnits is the canonical order of units: that of their devices, then by number.
func compareUnits(a, b Unit) int {
	return cmp.Or(CompareDevices(a.Device, b.Device), cmp.Compare(a.Replica, b.Replica), cmp.Compare(a.ID, b.ID))
}

// applyMode is a verdict with what the mode makes of it. Maintenance is none, but an order.
func applyMode(mode HealthMode, h Health) Health {
	h.Advisory = mode == ModeObserve && h.State > Degraded && h.Reason != ReasonMaintenance
	return h
}

func (inv *Inventory) withIndex() *Inventory {
	inv.byID = make(map[UnitID]int, len(inv.units))
	for i, u := range inv.units {
		inv.byID[u.ID] = i
	}
	return inv
}

// Driver is the state of the driver behind the inventory.
func (inv *Inventory) Driver() Driver {
	if inv == nil {
		return Driver{}
	}
	return inv.driver
}

// Provisional reports whether devices are missing that are offered as soon as the driver has been read for the first time,
// or, within milliseconds, as soon as the agents of the host have shared their numbers. Who takes it for what the machine
// offers takes those devices from workloads that hold them.
func (inv *Inventory) Provisional() bool {
	return inv == nil || inv.driver.State == DriverPending || inv.awaitsNumber
}

// Units yields every unit in canonical order.
func (inv *Inventory) Units() iter.Seq[Unit] {
	return func(yield func(Unit) bool) {
		if inv == nil {
			return
		}
		for _, u := range inv.units {
			if !yield(u) {
				return
			}
		}
	}
}

// Devices yields a unit for each device, in canonical order: one that is not withdrawn, if there is one. Those of a
// device are equal in all but ID and number.
func (inv *Inventory) Devices() iter.Seq[Unit] {
	return func(yield func(Unit) bool) {
		if inv == nil {
			return
		}
		for i := 0; i < len(inv.units); {
			first := i
			for i++; i < len(inv.units) && inv.units[i].Device.ID == inv.units[first].Device.ID; i++ {
				if inv.units[first].Health.Reason == ReasonWithdrawn {
					first = i
				}
			}
			if !yield(inv.units[first]) {
				return
			}
		}
	}
}

// Len is the number of units.
func (inv *Inventory) Len() int {
	if inv == nil {
		return 0
	}
	return len(inv.units)
}

// Unit looks a unit up.
func (inv *Inventory) Unit(id UnitID) (Unit, bool) {
	if inv == nil {
		return Unit{}, false
	}
	i, ok := inv.byID[id]
	if !ok {
		return Unit{}, false
	}
	return inv.units[i], true
}

// Excluded lists what was seen and is not offered, with reasons.
func (inv *Inventory) Excluded() []Exclusion {
	if inv == nil {
		return nil
	}
	return slices.Clone(inv.excluded)
}

// PositionBindings are the positions of the policy (indices, numbers of devices, the common MIG profile) and the devices that they mean
// until a reboot or State.Rebind.
func (inv *Inventory) PositionBindings() []PositionBinding {
	if inv == nil {
		return nil
	}
	return slices.Clone(inv.positionBindings)
}

// Binding is what of the policy is bound to which devices.
func (inv *Inventory) Binding() Binding { return inv.binding }

// Numbering is the numbers of the devices; of none while those that are known may be another machine's.
func (inv *Inventory) Numbering() Numbering {
	if inv == nil || inv.binding.Unconfirmed {
		return Numbering{}
	}
	return inv.binding.Numbering
}

// Proposed is Numbering with the numbers that new devices are to have when the agents of the host have shared them.
func (inv *Inventory) Proposed() Numbering {
	if inv == nil || inv.binding.Unconfirmed {
		return Numbering{}
	}
	return inv.binding.Proposed
}

// OutdatedBindings is a line for each position of the policy that would mean other devices by their present order, which State.Rebind
// applies.
func (inv *Inventory) OutdatedBindings() []string {
	if inv == nil {
		return nil
	}
	return slices.Clone(inv.outdatedBindings)
}

// PolicyWarnings are what is wrong with the policy on this machine: parts of it that concern no device, and pools
// whose units a request can't tell apart. Nothing is held back NewHealth of them.
func (inv *Inventory) PolicyWarnings() []string {
	if inv == nil {
		return nil
	}
	return slices.Clone(inv.policyWarnings)
}

// Equal reports whether two inventories offer the same, so that publishing the other would be noise.
func (inv *Inventory) Equal(other *Inventory) bool {
	if inv == nil || other == nil {
		return inv == other
	}
	return inv.driver == other.driver &&
		slices.Equal(inv.units, other.units) &&
		slices.Equal(inv.excluded, other.excluded) &&
		slices.Equal(inv.links, other.links) &&
		slices.Equal(inv.nodes, other.nodes) &&
		slices.Equal(inv.policyWarnings, other.policyWarnings) &&
		slices.Equal(inv.outdatedBindings, other.outdatedBindings) &&
		slices.Equal(inv.overlaps, other.overlaps) &&
		inv.deviceNodes == other.deviceNodes && inv.packed == other.packed
}
