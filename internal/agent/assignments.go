package agent

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// assignmentFacts are those for the command migrate.
func (a *Agent) assignmentFacts() assignment.Facts {
	inv := a.Current()
	f := assignment.Facts{Agent: a.opts.Name, APIs: a.adapter.APIs, GPUs: []assignment.GPUFacts{}, Unread: map[inventory.API]string{}}
	status := a.Assignments()
	can := inv.Assignable()
	ids := slices.Clone(can)
	for _, st := range status {
		ids = append(ids, st.GPU)
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		g := assignment.GPUFacts{GPU: id, Can: slices.Contains(can, id), Here: offers(inv, id), Index: -1, Holders: a.holdersOf(id, f.Unread)}
		for d := range inv.Hardware() {
			if d.At.GPU == id {
				g.PCI, g.Index, g.Product = string(d.PCI), d.Index, d.Product()
				break
			}
		}
		if len(f.APIs) > 0 {
			g.API = f.APIs[0]
		}
		if i := slices.IndexFunc(status, func(st assignment.Status) bool { return st.GPU == id }); i >= 0 {
			st := status[i]
			g.API, g.Here, g.Moving, g.Waits = st.API, st.Here && g.Can, st.Moving, st.Waits
			if st.Entry {
				g.Target = st.Target
			}
		}
		f.GPUs = append(f.GPUs, g)
	}
	return f
}

// offers reports whether an inventory has a unit of a GPU that is not being withdrawn, and that no other agent has claimed before.
func offers(inv *inventory.Inventory, id gpu.DeviceID) bool {
	for u := range inv.Units() {
		if u.Device.At.GPU == id && u.Health.Reason != health.ReasonWithdrawn && u.Health.Reason != health.ReasonClaimed {
			return true
		}
	}
	return false
}

// holdersOf returns the holders of a GPU by all records of this agent. It adds to unread why one is not read by the settings.
func (a *Agent) holdersOf(id gpu.DeviceID, unread map[inventory.API]string) []string {
	all := []string{}
	for _, api := range assignment.APIs() {
		if book := a.adapter.Books[api]; book != nil {
			h := book(id)
			if all = append(all, h.By...); h.Never {
				unread[api] = h.Why
			}
		}
	}
	return all
}
