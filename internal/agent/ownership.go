package agent

import (
	"cmp"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// ownershipFacts are those for the command migrate.
func (a *Agent) ownershipFacts() ownership.Facts {
	inv := a.Current()
	f := ownership.Facts{Agent: a.opts.Name, APIs: a.adapter.APIs, GPUs: []ownership.GPUFacts{}, Unread: map[inventory.API]string{}}
	status, records := a.Ownership(), a.adapter.Readers.Read()
	for api, record := range records {
		if r := record(); r.Never {
			f.Unread[api] = r.Missing
		}
	}
	can := inv.GPUs()
	ids := slices.Clone(can)
	for _, st := range status {
		ids = append(ids, st.GPU)
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		g := ownership.GPUFacts{GPU: id, Offerable: slices.Contains(can, id), Local: offers(inv, id), Index: -1, Holders: append([]string{}, records.Named(id)...)}
		for d := range inv.Hardware() {
			if d.At.GPU == id {
				g.PCI, g.Index, g.Product = string(d.PCI), d.Index, d.Product()
				break
			}
		}
		if len(f.APIs) > 0 {
			g.API = f.APIs[0]
		}
		if i := slices.IndexFunc(status, func(st ownership.Status) bool { return st.GPU == id }); i >= 0 {
			st := status[i]
			g.API, g.Local, g.Pending, g.Waits = st.API, st.Local && g.Offerable, st.Pending, st.Waits
			if st.Taken != "" {
				g.Pending, g.Waits = cmp.Or(g.Pending, "taken for a "+string(st.Taken)), cmp.Or(g.Waits, "the end of its "+string(st.Taken))
			}
			if st.Entry {
				g.Target = st.Target
			}
		}
		f.GPUs = append(f.GPUs, g)
	}
	return f
}

// offers reports whether an inventory has a unit of a GPU that is not being withdrawn, and that no other agent has recorded before.
func offers(inv *inventory.Allocatable, id gpu.DeviceID) bool {
	for u := range inv.Units() {
		if u.Device.At.GPU == id && u.Health.Reason != health.ReasonWithdrawn && u.Health.Reason != health.ReasonOverlap {
			return true
		}
	}
	return false
}
