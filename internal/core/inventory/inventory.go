package inventory

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// UnitID identifies a unit to the orchestrators: the device's ID, followed for a shared device by "::" and the
// number of the replica. It has at most 63 characters, the kubelet's limit.
type UnitID string

// replicaID returns the ID of the n-th unit of a shared device, in the format of NVIDIA's k8s-device-plugin.
func replicaID(id gpu.DeviceID, n int) UnitID { return UnitID(string(id) + "::" + strconv.Itoa(n)) }

// Split returns the device of a unit's ID, and whether the ID is that of a replica of a shared device.
func (id UnitID) Split() (device gpu.DeviceID, shared bool) {
	text, _, shared := strings.Cut(string(id), "::")
	return gpu.DeviceID(text), shared
}

// Unit is what an orchestrator allocates: a device, or one replica of a shared device.
type Unit struct {
	ID        UnitID
	Device    gpu.Device
	Pool      string    // name of the resource in a request; units of a pool are interchangeable
	Sharing   Sharing   // how the device is shared among its units
	Injection Injection // how a container gets it
	Memory    uint64    // bytes to which the driver is to limit a share, a whole number of MiB; 0 = no limit, or it never limits the device. See Sharing.Limit
	Replica   int       // number of the unit among those of its device, from 0
	Health    health.Health
	API       API // through which it is offered
}

// API is one of the APIs through which an agent offers devices. A device is offered through one of them only.
type API string

// The APIs.
const (
	DevicePlugin API = "device-plugin" // the kubelet's device plugins
	DRA          API = "dra"           // Kubernetes' Dynamic Resource Allocation
	Nomad        API = "nomad"         // Nomad's device plugins
)

// Inventory is what the configuration makes of the devices of a node, whatever else the node has: what takes work now is Allocatable. It is
// immutable; a nil *Inventory has no devices.
type Inventory struct {
	unitList
	driver           gpu.Driver
	excluded         []gpu.Exclusion
	links            []gpu.Link
	nodes            []string
	incarnation      int
	indexIDs         bool
	imexChannel      bool // containers get IMEX channel 0
	imexMissing      bool // a required IMEX channel is missing
	injectsNodes     bool // containers get device nodes from this agent
	needsCDI         bool // units need a CDI specification, or would use a valid one
	packed           bool
	limitPolicy      LimitPolicy
	policyWarnings   []string
	outdatedBindings []string
	binding          Binding
	positionBindings []PositionBinding
	awaitsNumber     bool                             // a device is not offered yet, because it waits for its number
	listed           []gpu.Device                     // by the driver, also those that are not offered
	conditions       map[gpu.DeviceID][]health.Health // of the unhealthy devices: see Conditions
}

// unitList has units in canonical order.
type unitList struct {
	units []Unit
	byID  map[UnitID]int // index into units
}

func newUnitList(units []Unit) unitList {
	l := unitList{units, make(map[UnitID]int, len(units))}
	for i := range units {
		l.byID[units[i].ID] = i
	}
	return l
}

// compareUnits is the canonical order of units: that of their devices, then by replica.
func compareUnits(a, b Unit) int {
	return cmp.Or(gpu.CompareDevices(a.Device, b.Device), cmp.Compare(a.Replica, b.Replica), cmp.Compare(a.ID, b.ID))
}

// orEmpty returns inv; an empty inventory if it is nil.
func (inv *Inventory) orEmpty() *Inventory {
	if inv == nil {
		return &Inventory{}
	}
	return inv
}

// withHealth returns l with the health of each unit by a function, which gets whether the unit is the first of its device. It
// copies the units only if the health of one differs.
func (l unitList) withHealth(healthOf func(u *Unit, first bool) health.Health) unitList {
	next, copied := l, false
	for i := range l.units {
		u := &l.units[i]
		h := healthOf(u, i == 0 || u.Device.ID != l.units[i-1].Device.ID)
		if h == u.Health {
			continue
		}
		if !copied {
			next.units, copied = slices.Clone(l.units), true
		}
		next.units[i].Health = h
	}
	return next
}

// Driver returns the state of the driver in the snapshot.
func (inv *Inventory) Driver() gpu.Driver { return inv.orEmpty().driver }

// is reports whether two lists are the same, without a look at their units.
func (l unitList) is(m unitList) bool {
	return len(l.units) == len(m.units) && (len(l.units) == 0 || &l.units[0] == &m.units[0])
}

// Units yields all units in canonical order.
func (l unitList) Units() iter.Seq[Unit] { return slices.Values(l.units) }

// Devices yields one unit for each device, in canonical order: one that is not withdrawn, if there is one. The
// others of a device differ from it only in ID and Replica.
func (l unitList) Devices() iter.Seq[Unit] {
	units := l.units
	return func(yield func(Unit) bool) {
		for i := 0; i < len(units); {
			first := i
			for i++; i < len(units) && units[i].Device.ID == units[first].Device.ID; i++ {
				if units[first].Health.Reason == health.ReasonWithdrawn {
					first = i
				}
			}
			if !yield(units[first]) {
				return
			}
		}
	}
}

// Len returns the number of units.
func (l unitList) Len() int { return len(l.units) }

// Unit returns the unit with an ID.
func (l unitList) Unit(id UnitID) (Unit, bool) {
	i, ok := l.byID[id]
	if !ok {
		return Unit{}, false
	}
	return l.units[i], true
}

// Excluded returns the devices that are not offered, with reasons.
func (inv *Inventory) Excluded() []gpu.Exclusion {
	return slices.Clone(inv.orEmpty().excluded)
}

// PositionBindings returns the positions in the policy (indices, counts, the common MIG profile) and the devices
// that they are bound to until a reboot or State.Rebind.
func (inv *Inventory) PositionBindings() []PositionBinding {
	return slices.Clone(inv.orEmpty().positionBindings)
}

// Binding returns which positions of the policy are bound to which devices.
func (inv *Inventory) Binding() Binding { return inv.orEmpty().binding }

// LimitPolicy is what the limits of the policy have in common.
func (inv *Inventory) LimitPolicy() LimitPolicy { return inv.orEmpty().limitPolicy }

// OutdatedBindings returns a line for each position in the policy that would be bound to other devices by their
// present order. State.Rebind binds it to those.
func (inv *Inventory) OutdatedBindings() []string {
	return slices.Clone(inv.orEmpty().outdatedBindings)
}

// PolicyWarnings returns the problems of the policy on this node: parts that apply to no device, and pools with
// units that are shared, or that containers get, differently. They do not prevent any device from being offered.
func (inv *Inventory) PolicyWarnings() []string {
	return slices.Clone(inv.orEmpty().policyWarnings)
}

// Equal reports whether two inventories have the same devices, offered as the same.
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
		slices.EqualFunc(inv.listed, other.listed, func(a, b gpu.Device) bool { return a.ID == b.ID && a.At == b.At }) &&
		maps.EqualFunc(inv.conditions, other.conditions, slices.Equal) &&
		inv.indexIDs == other.indexIDs && inv.imexChannel == other.imexChannel && inv.packed == other.packed && inv.limitPolicy == other.limitPolicy
}
