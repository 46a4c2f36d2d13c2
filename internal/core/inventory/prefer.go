package inventory

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Prefer chooses n of the available units for one container, the required ones first. Of shared devices it prefers
// those with the fewest units in use, or, with Config.Packed, those with the most (see chooseShared), and where NVIDIA's
// hook limits their memory the same number of units of each device, if that is possible (see chooseEqual). Otherwise it
// chooses units of as few GPUs as possible, and of the sets of that many GPUs
//
//  1. the one that has the fewest available units, so that MIG instances of partly used GPUs come first;
//  2. of these the best connected one: the largest sum of the connections of all pairs;
//  3. of these the one that leaves the best connected GPUs for the next request;
//  4. of these the first in canonical order.
//
// The result is the best set by this measure if there are at most maxExact sets, which is so for up to 16 GPUs;
// otherwise a good one (see selection). Prefer never fails: it leaves out unknown IDs, so the result may have fewer than
// n units. The order of the arguments does not matter, and two equal requests get equal results.
//
// The cost is O(u·log u) for u units, plus O(maxExact·k) for k chosen GPUs, or O(g²·k) for more than 16 GPUs g.
func (a *Allocatable) Prefer(available, required []UnitID, n int) []UnitID {
	chosen, _ := a.choose(available, required, n)
	return a.ids(chosen)
}

// choose returns the units (by index) that Prefer chooses, and how.
func (a *Allocatable) choose(available, required []UnitID, n int) ([]int, Method) {
	chosen, pool := a.candidates(available, required)
	switch {
	case n <= len(chosen):
		return chosen[:max(n, 0)], MethodRequired
	case a.anyShared(chosen) || a.anyShared(pool):
		method := MethodShared
		if a.packed {
			method = MethodPacked
		}
		set := a.chooseShared(chosen, pool, n)
		if !a.refusedLimits(set) {
			return set, method
		}
		if equal := a.chooseEqual(chosen, pool, n); equal != nil {
			return equal, MethodEqual
		}
		return set, method
	case n >= len(chosen)+len(pool):
		return append(chosen, pool...), MethodAll
	}
	return a.chooseConnected(chosen, pool, n), MethodConnected
}

// candidates returns the required units (by index), and those that are available beside them.
func (a *Allocatable) candidates(available, required []UnitID) (chosen, pool []int) {
	chosen = a.indices(required)
	pool = slices.DeleteFunc(a.indices(available), func(i int) bool {
		_, ok := slices.BinarySearch(chosen, i)
		return ok
	})
	return chosen, pool
}

// ids returns the IDs of units (by index), in canonical order.
func (a *Allocatable) ids(units []int) []UnitID {
	slices.Sort(units)
	ids := make([]UnitID, len(units))
	for i, u := range units {
		ids[i] = a.units[u].ID
	}
	return ids
}

// indices returns the indices of the known units among ids, each once, in canonical order.
func (a *Allocatable) indices(ids []UnitID) []int {
	var units []int
	for _, id := range ids {
		if i, ok := a.byID[id]; ok {
			units = append(units, i)
		}
	}
	slices.Sort(units)
	return slices.Compact(units)
}

func (a *Allocatable) anyShared(units []int) bool {
	return slices.ContainsFunc(units, func(i int) bool { return a.units[i].Sharing.Mode != Exclusive })
}

// candidate is a GPU of which units can be chosen.
type candidate struct {
	free     []int // available units (by index): the GPU itself, or MIG instances
	required bool  // some of its units are required
}

// chooseConnected adds units from pool to the chosen ones until there are n. There must be more than enough.
func (a *Allocatable) chooseConnected(chosen, pool []int, n int) []int {
	s := a.newSearch(chosen, pool, n)
	for _, g := range slices.Sorted(slices.Values(s.run())) { // of the last one some units may be left
		for _, u := range s.gpus[g].free {
			if len(chosen) < n {
				chosen = append(chosen, u)
			}
		}
	}
	return chosen
}

// newSearch returns a search over the GPUs of these units, in canonical order, for a request of n units.
func (a *Allocatable) newSearch(chosen, pool []int, n int) *search {
	units := slices.Concat(chosen, pool)
	slices.Sort(units)
	s, number, nodes := &search{need: n - len(chosen)}, map[gpu.DeviceID]int{}, []int(nil)
	for _, i := range units {
		d := &a.units[i].Device
		g, ok := number[d.At.GPU]
		if !ok {
			g = len(s.gpus)
			number[d.At.GPU] = g
			s.gpus, nodes = append(s.gpus, candidate{}), append(nodes, d.NUMANode)
		}
		if _, isRequired := slices.BinarySearch(chosen, i); isRequired {
			s.gpus[g].required = true
		} else {
			s.gpus[g].free = append(s.gpus[g].free, i)
		}
	}
	s.connect(connectionsOf(a.links, number, nodes))
	return s
}
