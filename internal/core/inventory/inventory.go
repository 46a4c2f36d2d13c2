package inventory

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

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

// Inventory is what a host offers now. It is immutable; a nil *Inventory offers nothing.
type Inventory struct {
	driver           gpu.Driver
	units            []Unit // in canonical order
	excluded         []gpu.Exclusion
	links            []gpu.Link
	nodes            []string
	incarnation      int
	cdi              *CDI // nil = not known, or not needed
	indexIDs         bool
	imexChannel      bool // containers get IMEX channel 0
	imexMissing      bool // a required IMEX channel is missing
	injectsNodes     bool // containers get device nodes from this agent
	needsCDI         bool // see NeedsCDI
	packed           bool
	policyWarnings   []string
	outdatedBindings []string
	binding          Binding
	positionBindings []PositionBinding
	awaitsNumber     bool // a device is not offered yet, because it waits for its number
	awaitsClaim      bool // a device takes no work yet, because this agent has not claimed it so far
	overlaps         []Overlap
	assignments      Assignments                      // as applied
	elsewhere        []Unit                           // that another agent offers
	listed           []gpu.Device                     // by the driver, also those that are not offered
	byID             map[UnitID]int                   // index into units
	retiring         map[UnitID]time.Time             // since when
	conditions       map[gpu.DeviceID][]health.Health // of the unhealthy devices: see Conditions
	withheld         map[gpu.DeviceID]health.Health   // why a device with a fault takes no work that tolerates that: it is not this agent's
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

// withHealth returns inv with the health of each unit by a function, which gets whether the unit is the first of its device. It
// copies the units only if the health of one differs.
func (inv *Inventory) withHealth(healthOf func(u *Unit, first bool) health.Health) *Inventory {
	next, copied := *inv, false
	for i := range inv.units {
		u := &inv.units[i]
		h := healthOf(u, i == 0 || u.Device.ID != inv.units[i-1].Device.ID)
		if h == u.Health {
			continue
		}
		if !copied {
			next.units, copied = slices.Clone(inv.units), true
		}
		next.units[i].Health = h
	}
	return &next
}

func (inv *Inventory) withIndex() *Inventory {
	inv.byID = make(map[UnitID]int, len(inv.units))
	for i := range inv.units {
		inv.byID[inv.units[i].ID] = i
	}
	return inv
}

// Driver returns the state of the driver in the snapshot.
func (inv *Inventory) Driver() gpu.Driver { return inv.orEmpty().driver }

// Provisional reports whether devices may be missing that will be offered, or unhealthy only because the agent has just started:
// until the first snapshot, or (for milliseconds) until the agents of the host have shared the numbers of devices, or while AwaitsHost.
// An adapter must not treat such an inventory as complete, because a missing device may be in use by a workload.
func (inv *Inventory) Provisional() bool {
	return inv.Driver().State == gpu.DriverPending || inv.awaitsNumber || inv.AwaitsHost()
}

// AwaitsHost reports whether devices are unhealthy only because this agent has not written for the first time what they need: a CDI
// specification for the present driver, or a claim. It has done so, or has failed, within milliseconds, unless the disk is slow.
func (inv *Inventory) AwaitsHost() bool { return inv.AwaitsCDI() || inv.orEmpty().awaitsClaim }

// Units yields all units in canonical order.
func (inv *Inventory) Units() iter.Seq[Unit] { return slices.Values(inv.orEmpty().units) }

// Devices yields one unit for each device, in canonical order: one that is not withdrawn, if there is one. The
// others of a device differ from it only in ID and Replica.
func (inv *Inventory) Devices() iter.Seq[Unit] {
	units := inv.orEmpty().units
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
func (inv *Inventory) Len() int { return len(inv.orEmpty().units) }

// Unit returns the unit with an ID.
func (inv *Inventory) Unit(id UnitID) (Unit, bool) {
	i, ok := inv.orEmpty().byID[id]
	if !ok {
		return Unit{}, false
	}
	return inv.units[i], true
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
func (inv *Inventory) Binding() Binding { return inv.binding }

// Numbering returns the numbers of the devices. It is empty while they may be those of another host.
func (inv *Inventory) Numbering() Numbering { return inv.confirmedBinding().Numbering }

// Proposed returns Numbering with the numbers that new devices will have when the agents of the host have shared
// them.
func (inv *Inventory) Proposed() Numbering { return inv.confirmedBinding().Proposed }

func (inv *Inventory) confirmedBinding() Binding {
	if b := inv.orEmpty().binding; !b.Unconfirmed {
		return b
	}
	return Binding{}
}

// OutdatedBindings returns a line for each position in the policy that would be bound to other devices by their
// present order. State.Rebind binds it to those.
func (inv *Inventory) OutdatedBindings() []string {
	return slices.Clone(inv.orEmpty().outdatedBindings)
}

// PolicyWarnings returns the problems of the policy on this host: parts that apply to no device, and pools with
// units that are shared, or that containers get, differently. They do not prevent any device from being offered.
func (inv *Inventory) PolicyWarnings() []string {
	return slices.Clone(inv.orEmpty().policyWarnings)
}

// Equal reports whether two inventories offer the same, so that the second one need not be published.
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
		slices.Equal(inv.overlaps, other.overlaps) && inv.awaitsClaim == other.awaitsClaim &&
		inv.assignments.Equal(other.assignments) &&
		slices.EqualFunc(inv.listed, other.listed, func(a, b gpu.Device) bool { return a.ID == b.ID && a.At == b.At }) &&
		maps.EqualFunc(inv.conditions, other.conditions, slices.Equal) && maps.Equal(inv.withheld, other.withheld) &&
		inv.cdi.Equal(other.cdi) && inv.indexIDs == other.indexIDs && inv.imexChannel == other.imexChannel && inv.packed == other.packed
}
