package inventory

import (
	"cmp"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Islands returns the sets of GPUs that are connected by NVLinks, directly or over other GPUs. The sets and their
// members are sorted. A GPU without NVLinks is in none.
func (inv *Inventory) Islands() [][]gpu.DeviceID {
	least := map[gpu.DeviceID]gpu.DeviceID{} // by GPU: the first GPU of its island, as far as known
	for _, l := range inv.orEmpty().links {
		if l.NVLinks == 0 {
			continue
		}
		a, b := cmp.Or(least[l.A], l.A), cmp.Or(least[l.B], l.B)
		least[l.A], least[l.B] = a, b
		for id, first := range least {
			if first == a || first == b {
				least[id] = min(a, b)
			}
		}
	}
	members := map[gpu.DeviceID][]gpu.DeviceID{}
	for _, id := range slices.Sorted(maps.Keys(least)) {
		members[least[id]] = append(members[least[id]], id)
	}
	var islands [][]gpu.DeviceID
	for _, first := range slices.Sorted(maps.Keys(members)) {
		islands = append(islands, members[first])
	}
	return islands
}
