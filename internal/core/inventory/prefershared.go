package inventory

import (
	"cmp"
	"maps"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// deviceLoad is the use of one shared device.
type deviceLoad struct {
	free  []int // available units
	taken int   // units that are not available, or were chosen
	here  int   // units chosen for this request
}

// chooseShared adds units from pool to the chosen ones, each from the device with the fewest units in use, so that
// the load is even; with Packed, from the device with the most, so that whole devices stay free. Of equal devices
// it takes the one that has the fewest units in this request, then the first one. NVIDIA's k8s-device-plugin does
// the same (greedyAlloc), except for the last step, which is random there.
func (a *Allocatable) chooseShared(chosen, pool []int, n int) []int {
	loads := a.loads(chosen, pool)
	set := slices.Clone(chosen)
	for len(set) < n && len(loads) > 0 {
		best := slices.MinFunc(loads, a.compareLoads)
		set, best.free = append(set, best.free[0]), best.free[1:]
		best.taken, best.here = best.taken+1, best.here+1
		if len(best.free) == 0 {
			loads = slices.DeleteFunc(loads, func(l *deviceLoad) bool { return l == best })
		}
	}
	return set
}

// loads is the use of the devices of a pool, in canonical order.
func (a *Allocatable) loads(chosen, pool []int) (loads []*deviceLoad) {
	of := map[gpu.DeviceID]*deviceLoad{}
	for _, i := range pool {
		u := &a.units[i]
		l := of[u.Device.ID]
		if l == nil {
			l = &deviceLoad{taken: max(u.Sharing.Replicas, 1)}
			loads, of[u.Device.ID] = append(loads, l), l
		}
		l.free, l.taken = append(l.free, i), l.taken-1
	}
	for _, i := range chosen {
		if l := of[a.units[i].Device.ID]; l != nil {
			l.here++
		}
	}
	return loads
}

// refusedLimits reports whether a request of these units would fail with *UnequalLimitsError.
func (a *Allocatable) refusedLimits(set []int) bool {
	if len(set) == 0 || !a.limitedByHook(&a.units[set[0]]) {
		return false
	}
	units := make([]Unit, len(set))
	for i, u := range set {
		units[i] = a.units[u]
	}
	limits, byHook := a.hookLimit(units)
	return byHook && !equal(limits)
}

// chooseEqual adds units from pool to the chosen ones, the same number of each device: many of few devices with Packed, else few of many. nil = there are no n units
// that have one limit of memory. Devices whose shares have different limits are not chosen together.
func (a *Allocatable) chooseEqual(chosen, pool []int, n int) []int {
	loads := a.loads(chosen, pool)
	slices.SortStableFunc(loads, func(x, y *deviceLoad) int { return cmp.Or(cmp.Compare(y.here, x.here), a.compareLoads(x, y)) })
	memory := map[uint64]bool{}
	for _, l := range loads {
		memory[a.units[l.free[0]].Memory] = true
	}
	for i := range n {
		each := i + 1
		if a.packed {
			each = n - i
		}
		for _, m := range slices.Sorted(maps.Keys(memory)) {
			set := slices.Clone(chosen)
			for _, l := range loads {
				if k := each - l.here; a.units[l.free[0]].Memory == m && k >= 0 && k <= min(len(l.free), n-len(set)) {
					set = append(set, l.free[:k]...)
				}
			}
			if len(set) == n && !a.refusedLimits(set) {
				return set
			}
		}
	}
	return nil
}

func (a *Allocatable) compareLoads(x, y *deviceLoad) int {
	byTaken := cmp.Compare(x.taken, y.taken)
	if a.packed {
		byTaken = -byTaken
	}
	return cmp.Or(byTaken, cmp.Compare(x.here, y.here))
}
