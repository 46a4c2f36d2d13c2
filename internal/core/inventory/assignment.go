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

// withAssignments returns inv with the API of each unit, and without the units of GPUs that another agent offers.
func (inv *Inventory) withAssignments(a Assignments) *Inventory {
	if len(a.All) == 0 && !a.Required {
		return inv
	}
	next := *inv
	next.units, next.assignments, next.elsewhere = nil, a, nil
	next.excluded = slices.Clone(inv.excluded)
	for i := range inv.units {
		u := inv.units[i]
		one, assigned := a.of(u.Device.At.GPU)
		switch {
		case assigned && !one.Here:
			if i == 0 || inv.units[i-1].Device.ID != u.Device.ID {
				next.excluded = append(next.excluded, gpu.Exclusion{Index: u.Device.Index, At: u.Device.At, PCI: u.Device.PCI, Reason: one.reason()})
			}
			next.elsewhere = append(next.elsewhere, u)
			continue
		case assigned && one.API != "":
			u.API = one.API
			if u.API == DRA && u.Injection.CDI != CDIRequired {
				u.Injection, next.needsCDI = claimInjection, true
			}
		}
		next.units = append(next.units, u)
	}
	slices.SortFunc(next.excluded, gpu.CompareExclusions)
	return next.withIndex()
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
func (inv *Inventory) movingHealth(u *Unit) (health.Health, bool) {
	one, assigned := inv.assignments.of(u.Device.At.GPU)
	if !assigned || one.Moving == "" {
		return health.Health{}, false
	}
	return health.New(health.ReasonMoving, one.Moving), true
}

// leaves reports whether a condition of a unit is that its GPU leaves its API, which still has it.
func (inv *Inventory) leaves(u *Unit, h health.Health) bool {
	one, ok := inv.Assignment(u.Device.At.GPU)
	return h.Reason == health.ReasonMoving && ok && one.Leaving
}

// Assignment returns the assignment of a GPU that is applied to the inventory, and false if it has none.
func (inv *Inventory) Assignment(id gpu.DeviceID) (Assignment, bool) {
	for _, a := range inv.orEmpty().assignments.All {
		if a.GPU == id {
			return a, true
		}
	}
	return Assignment{}, false
}

// Assignable returns the GPUs that this agent can offer by its configuration, with those that another agent offers now, in canonical
// order.
func (inv *Inventory) Assignable() []gpu.DeviceID {
	var all []gpu.DeviceID
	for _, units := range [][]Unit{inv.orEmpty().units, inv.orEmpty().elsewhere} {
		for i := range units {
			if id := units[i].Device.At.GPU; id != "" && units[i].Health.Reason != health.ReasonWithdrawn {
				all = append(all, id)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Placements returns where each device is that the driver lists, or that the inventory still has, by ID. A GPU that is divided is one, too.
func (inv *Inventory) Placements() map[gpu.DeviceID]gpu.Placement {
	all := map[gpu.DeviceID]gpu.Placement{}
	for d := range inv.Hardware() {
		all[d.ID] = d.At
		if _, listed := all[d.At.GPU]; !listed {
			all[d.At.GPU] = gpu.WholeGPU(d.At.GPU)
		}
	}
	return all
}

// Hardware yields the devices that the driver lists, whether they are offered or not, and those that are being withdrawn, each once.
func (inv *Inventory) Hardware() iter.Seq[gpu.Device] {
	inv = inv.orEmpty()
	return func(yield func(gpu.Device) bool) {
		seen := make(map[gpu.DeviceID]bool, len(inv.listed))
		for i := range inv.listed {
			seen[inv.listed[i].ID] = true
			if !yield(inv.listed[i]) {
				return
			}
		}
		for _, units := range [][]Unit{inv.units, inv.elsewhere} {
			for i := range units {
				if d := &units[i].Device; !seen[d.ID] {
					if seen[d.ID] = true; !yield(*d) {
						return
					}
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
