package inventory

import (
	"iter"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Assignment is through which API a GPU is offered, with all its instances.
type Assignment struct {
	GPU    gpu.DeviceID
	API    API    // that has it; "" = not known
	Here   bool   // the API is one of this agent, or was and may still have work on the GPU; otherwise the agent does not offer it
	Moving string // why it takes no new work, for operators: "to dra"; "" = it does

	// Leaving means that the API still has the GPU, which moves to another one when nothing holds it. What was placed on it before is
	// given out, and holds it.
	Leaving bool
}

// Assignments are those of a host.
type Assignments struct {
	All []Assignment // by GPU, each once

	// Required means that a GPU without an assignment takes no work: which API has it is not known so far. Otherwise such a GPU is
	// offered through Config.API.
	Required bool
}

// Equal reports whether two values assign the same.
func (a Assignments) Equal(b Assignments) bool {
	return a.Required == b.Required && slices.Equal(a.All, b.All)
}

// of returns the assignment of a GPU. There is none if the GPU has the configured API.
func (a Assignments) of(id gpu.DeviceID) (Assignment, bool) {
	for i := range a.All {
		if a.All[i].GPU == id {
			return a.All[i], true
		}
	}
	return Assignment{GPU: id, Here: true, Moving: unknownAPI}, a.Required
}

// Elsewhere reports whether another agent offers a GPU.
func (a Assignments) Elsewhere(id gpu.DeviceID) bool {
	one, assigned := a.of(id)
	return assigned && !one.Here
}

// unknownAPI is why a GPU takes no work while it is not known which API has it.
const unknownAPI = "nowhere yet: which API has it is not known so far"

// assign sets the API of each unit, and leaves out the units of GPUs that another agent offers.
func (a *Allocatable) assign(to Assignments) {
	if len(to.All) == 0 && !to.Required {
		return
	}
	all, units := a.units, make([]Unit, 0, len(a.units))
	a.assignments, a.excluded = to, slices.Clone(a.excluded)
	for i := range all {
		u := all[i]
		one, assigned := to.of(u.Device.At.GPU)
		switch {
		case assigned && !one.Here:
			if i == 0 || all[i-1].Device.ID != u.Device.ID {
				a.excluded = append(a.excluded, gpu.Exclusion{Index: u.Device.Index, At: u.Device.At, PCI: u.Device.PCI, Reason: one.reason()})
			}
			continue
		case assigned && one.API != "":
			u.API = one.API
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
func (a Assignment) reason() string {
	if a.API == "" {
		return "moves " + a.Moving
	}
	return "offered through " + string(a.API)
}

// movingHealth returns the health of a unit whose GPU takes no new work because it moves to another API.
func (a *Allocatable) movingHealth(u *Unit) (health.Health, bool) {
	one, assigned := a.assignments.of(u.Device.At.GPU)
	if !assigned || one.Moving == "" {
		return health.Health{}, false
	}
	return health.New(health.ReasonMoving, one.Moving), true
}

// leaves reports whether a condition of a unit is that its GPU leaves its API, which still has it.
func (a *Allocatable) leaves(u *Unit, h health.Health) bool {
	one, ok := a.Assignment(u.Device.At.GPU)
	return h.Reason == health.ReasonMoving && ok && one.Leaving
}

// Assignment returns the assignment of a GPU that is applied, and false if it has none.
func (a *Allocatable) Assignment(id gpu.DeviceID) (Assignment, bool) {
	for _, one := range a.assignments.All {
		if one.GPU == id {
			return one, true
		}
	}
	return Assignment{}, false
}

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
