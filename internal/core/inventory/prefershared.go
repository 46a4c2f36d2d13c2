package inventory

import (
	"cmp"
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
	var loads []*deviceLoad // in canonical order
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

func (a *Allocatable) compareLoads(x, y *deviceLoad) int {
	byTaken := cmp.Compare(x.taken, y.taken)
	if a.packed {
		byTaken = -byTaken
	}
	return cmp.Or(byTaken, cmp.Compare(x.here, y.here))
}
