package inventory

import (
	"iter"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// GPUOwner is which API has a GPU, with all its instances.
type GPUOwner struct {
	GPU     gpu.DeviceID
	API     API    // that has it; "" = not known
	Local   bool   // the API is one of this agent, or was and may still have work on the GPU; otherwise the agent does not offer it
	Pending string // why it takes no new work, for operators: "to dra"; "" = it does

	// Taken is why the agent keeps the GPU for itself, so that no API gives it out; "" = it does not. The API has it again after that.
	Taken Purpose

	// Draining means that the API still has the GPU, which moves to another one when nothing holds it. What was placed on it before is
	// given out, and holds it.
	Draining bool
}

// Purpose is what an agent takes a GPU away from every API for.
type Purpose string

// The purposes.
const (
	Proof Purpose = "proof" // a check of the GPU by a program that uses it
	Reset Purpose = "reset" // a reset of the GPU, or of one in its P2P group: nothing may use it
)

// Ownership is which API has each GPU of a node.
type Ownership struct {
	GPUs []GPUOwner // each once

	// Required means that a GPU without an owner takes no work: which API has it is not known so far. Otherwise such a GPU is
	// offered through Config.API.
	Required bool

	// DriverReleased is the GPU for whose reset no agent of the node has the driver open, or is to have it; "" = none. No unit takes work then: nothing
	// of it is checked.
	DriverReleased gpu.DeviceID
}

// Equal reports whether two values have the same owners.
func (o Ownership) Equal(p Ownership) bool {
	return o.Required == p.Required && o.DriverReleased == p.DriverReleased && slices.Equal(o.GPUs, p.GPUs)
}

// Taken returns the GPUs that an agent keeps for itself.
func (o Ownership) Taken() (all []gpu.DeviceID) {
	for i := range o.GPUs {
		if o.GPUs[i].Taken != "" {
			all = append(all, o.GPUs[i].GPU)
		}
	}
	return all
}

// of returns the owner of a GPU. There is none if the GPU has the configured API.
func (o Ownership) of(id gpu.DeviceID) (GPUOwner, bool) {
	if owner, listed := o.listed(id); listed {
		return owner, true
	}
	return GPUOwner{GPU: id, Local: true, Pending: unknownAPI}, o.Required
}

func (o Ownership) listed(id gpu.DeviceID) (GPUOwner, bool) {
	for i := range o.GPUs {
		if o.GPUs[i].GPU == id {
			return o.GPUs[i], true
		}
	}
	return GPUOwner{}, false
}

// Remote reports whether another agent offers a GPU.
func (o Ownership) Remote(id gpu.DeviceID) bool {
	owner, known := o.of(id)
	return known && !owner.Local
}

// unknownAPI is why a GPU takes no work while it is not known which API has it.
const unknownAPI = "nowhere yet: which API has it is not known so far"

// applyOwnership sets the API of each unit, and leaves out the units of GPUs that another agent offers.
func (a *Allocatable) applyOwnership(o Ownership) {
	a.ownership = o
	if len(o.GPUs) == 0 && !o.Required {
		return
	}
	all, units := a.units, make([]Unit, 0, len(a.units))
	a.excluded = slices.Clone(a.excluded)
	for i := range all {
		u := all[i]
		owner, known := o.of(u.Device.At.GPU)
		switch {
		case known && !owner.Local:
			if i == 0 || all[i-1].Device.ID != u.Device.ID {
				a.excluded = append(a.excluded, gpu.Exclusion{Index: u.Device.Index, At: u.Device.At, PCI: u.Device.PCI, Reason: owner.reason()})
			}
			continue
		case known && owner.API != "":
			u.API = owner.API
			if u.API == DRA && u.Injection.CDI != CDIRequired {
				u.Injection, a.needsCDI = claimInjection, true
			}
		}
		units = append(units, u)
	}
	slices.SortFunc(a.excluded, gpu.CompareExclusions)
	a.unitList = newUnitList(units)
}

// claimInjection is how containers get the devices of claims: Kubernetes passes them CDI names, and nothing else.
var claimInjection = Injection{Name: "cdi-cri", CDI: CDIRequired}

// reason is why this agent does not offer a GPU.
func (o GPUOwner) reason() string {
	if o.API == "" {
		return "moves " + o.Pending
	}
	return "offered through " + string(o.API)
}

// pendingHealth returns the health of a unit whose GPU takes no new work until it has come to an API, or is given back to it.
func (a *Allocatable) pendingHealth(u *Unit) (health.Health, bool) {
	owner, known := a.ownership.of(u.Device.At.GPU)
	switch {
	case known && owner.Taken == Reset:
		return health.New(health.ReasonResetting, ""), true
	case known && owner.Taken != "": // for a purpose that only a later version has, too
		return health.New(health.ReasonProving, ""), true
	case known && owner.Pending != "":
		return health.New(health.ReasonMoving, owner.Pending), true
	}
	return health.Health{}, false
}

// ResetOf returns the GPU for whose reset the driver is released; "" = it is not.
func (a *Allocatable) ResetOf() gpu.DeviceID { return a.ownership.DriverReleased }

// ReleasedFor is why the driver is not called for the reset of a GPU, once that has taken long.
func ReleasedFor(id gpu.DeviceID) string { return "driver released for the reset of " + string(id) }

// released returns the health of a unit that would take work, or would again if only the driver were not released; zero if that is not so.
func (a *Allocatable) released(u *Unit) health.Health {
	id := a.ownership.DriverReleased
	switch long := u.Health.Reason == health.ReasonMaintenance && u.Health.Detail == ReleasedFor(id); {
	case id == "" || !u.Health.Schedulable() && !long:
		return health.Health{}
	case id == u.Device.At.GPU:
		return health.New(health.ReasonResetting, "")
	}
	return health.New(health.ReasonResetting, string(id))
}

// isDraining reports whether a condition of a unit is that its GPU leaves its API, which still has it.
func (a *Allocatable) isDraining(u *Unit, h health.Health) bool {
	owner, _ := a.Owner(u.Device.At.GPU)
	return h.Reason == health.ReasonMoving && owner.Draining
}

// Owner returns the owner of a GPU that is applied, and false if it has none.
func (a *Allocatable) Owner(id gpu.DeviceID) (GPUOwner, bool) { return a.ownership.listed(id) }

// GPUs returns the GPUs of which there are units, in canonical order.
func (inv *Inventory) GPUs() (all []gpu.DeviceID) {
	for u := range inv.Units() {
		if id := u.Device.At.GPU; id != "" {
			all = append(all, id)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Placements returns where each device is that the driver lists, or that is being withdrawn, by ID. A GPU that is divided is one, too.
func (a *Allocatable) Placements() map[gpu.DeviceID]gpu.Placement {
	all := map[gpu.DeviceID]gpu.Placement{}
	for d := range a.Hardware() {
		all[d.ID] = d.At
		if _, listed := all[d.At.GPU]; !listed {
			all[d.At.GPU] = gpu.WholeGPU(d.At.GPU)
		}
	}
	return all
}

// Hardware yields the devices that the driver lists, whether they are offered or not, and those that are being withdrawn, each once.
func (a *Allocatable) Hardware() iter.Seq[gpu.Device] {
	listed := a.orEmpty().listed
	return func(yield func(gpu.Device) bool) {
		seen := make(map[gpu.DeviceID]bool, len(listed))
		for i := range listed {
			seen[listed[i].ID] = true
			if !yield(listed[i]) {
				return
			}
		}
		for i := range a.units {
			if d := &a.units[i].Device; !seen[d.ID] {
				if seen[d.ID] = true; !yield(*d) {
					return
				}
			}
		}
	}
}

// Exists reports whether the driver lists hardware with a placement on which work can run: a GPU that is divided is not one.
func (inv *Inventory) Exists(p gpu.Placement) (found bool) {
	for _, d := range inv.orEmpty().listed {
		switch {
		case d.At == p:
			found = true
		case p.Covers(d.At):
			return false
		}
	}
	return found
}
