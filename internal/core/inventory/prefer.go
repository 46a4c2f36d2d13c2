package inventory

import (
	"cmp"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Prefer chooses n of the available units for one container, the required ones first. It prefers GPUs with the
// most NVLinks between them, then those with the shortest PCIe path, then those of one NUMA node; MIG instances of
// few GPUs; and of shared devices those with the fewest units in use, or, with Config.Packed, those with
// the most. Prefer never fails: it leaves out unknown IDs, so the result may have fewer than n units. The order of
// the arguments does not matter.
//
// The cost is O(n·a·g) for a available units of g GPUs: microseconds for 8 GPUs, a few milliseconds for half of
// 112 MIG instances.
func (inv *Inventory) Prefer(available, required []UnitID, n int) []UnitID {
	inv = inv.orEmpty()
	chosen := inv.indices(required)
	pool := slices.DeleteFunc(inv.indices(available), func(i int) bool {
		_, ok := slices.BinarySearch(chosen, i)
		return ok
	})
	if n < len(chosen) {
		chosen = chosen[:max(n, 0)]
	}
	if inv.anyShared(chosen) || inv.anyShared(pool) {
		return inv.ids(inv.chooseShared(chosen, pool, n))
	}
	near := nearest{scores: inv.scores(), pool: pool, n: n}
	best, bestScore := chosen, -1
	if len(chosen) > 0 {
		best, _ = near.choose(chosen...)
	} else {
		for k, seed := range pool {
			if k > 0 && inv.interchangeable(seed, pool[k-1]) {
				continue // results in an equal set
			}
			if set, s := near.choose(seed); n > 0 && s > bestScore {
				best, bestScore = append(best[:0], set...), s
			}
		}
	}
	return inv.ids(best)
}

// ids returns the IDs of units (by index), in canonical order.
func (inv *Inventory) ids(units []int) []UnitID {
	slices.Sort(units)
	ids := make([]UnitID, len(units))
	for i, u := range units {
		ids[i] = inv.units[u].ID
	}
	return ids
}

func (inv *Inventory) anyShared(units []int) bool {
	return slices.ContainsFunc(units, func(i int) bool { return inv.units[i].Sharing.Mode != Exclusive })
}

// interchangeable reports whether two units (by index) are instances of one GPU, so that their scores are equal.
func (inv *Inventory) interchangeable(a, b int) bool {
	d, e := &inv.units[a].Device, &inv.units[b].Device
	return d.At.GPU == e.At.GPU && d.NUMANode == e.NUMANode
}

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
func (inv *Inventory) chooseShared(chosen, pool []int, n int) []int {
	var loads []*deviceLoad // in canonical order
	of := map[gpu.DeviceID]*deviceLoad{}
	for _, i := range pool {
		u := &inv.units[i]
		l := of[u.Device.ID]
		if l == nil {
			l = &deviceLoad{taken: max(u.Sharing.Replicas, 1)}
			loads, of[u.Device.ID] = append(loads, l), l
		}
		l.free, l.taken = append(l.free, i), l.taken-1
	}
	for _, i := range chosen {
		if l := of[inv.units[i].Device.ID]; l != nil {
			l.here++
		}
	}
	set := slices.Clone(chosen)
	for len(set) < n && len(loads) > 0 {
		best := slices.MinFunc(loads, inv.compareLoads)
		set, best.free = append(set, best.free[0]), best.free[1:]
		best.taken, best.here = best.taken+1, best.here+1
		if len(best.free) == 0 {
			loads = slices.DeleteFunc(loads, func(l *deviceLoad) bool { return l == best })
		}
	}
	return set
}

func (inv *Inventory) compareLoads(a, b *deviceLoad) int {
	byTaken := cmp.Compare(a.taken, b.taken)
	if inv.packed {
		byTaken = -byTaken
	}
	return cmp.Or(byTaken, cmp.Compare(a.here, b.here))
}

// indices returns the indices of the known units among ids, each once, in canonical order.
func (inv *Inventory) indices(ids []UnitID) []int {
	var units []int
	for _, id := range ids {
		if i, ok := inv.byID[id]; ok {
			units = append(units, i)
		}
	}
	slices.Sort(units)
	return slices.Compact(units)
}

// nearest chooses sets of n units from pool. It reuses its memory: a set is valid until the next choice.
type nearest struct {
	scores           scores
	pool             []int
	n                int
	set, left, gains []int
}

// choose adds to seed the units of the pool with the highest scores until there are n, and returns the sum of the
// scores.
func (c *nearest) choose(seed ...int) (set []int, total int) {
	c.set, c.left, c.gains = append(c.set[:0], seed...), c.left[:0], c.gains[:0]
	for _, i := range c.pool {
		if !slices.Contains(seed, i) {
			c.left, c.gains = append(c.left, i), append(c.gains, 0) // for each one left: the sum of its scores with the set
		}
	}
	if len(c.set) < c.n {
		for _, member := range seed {
			c.join(member)
		}
	}
	for len(c.set) < c.n && len(c.left) > 0 {
		at := slices.Index(c.gains, slices.Max(c.gains))
		member := c.left[at]
		c.set, total = append(c.set, member), total+c.gains[at]
		c.left, c.gains = slices.Delete(c.left, at, at+1), slices.Delete(c.gains, at, at+1)
		if len(c.set) < c.n {
			c.join(member)
		}
	}
	return c.set, total
}

// join adds the scores with a new member of the set.
func (c *nearest) join(member int) {
	for k, candidate := range c.left {
		c.gains[k] += c.scores.of(candidate, member)
	}
}

// scores rate pairs of units.
type scores struct {
	gpuOf, nodeOf []int // by unit: number of the GPU, NUMA node
	gpus          int
	links         []int // by two numbers of GPUs
}

func (inv *Inventory) scores() scores {
	number := map[gpu.DeviceID]int{} // of each GPU
	s := scores{gpuOf: make([]int, len(inv.units)), nodeOf: make([]int, len(inv.units))}
	for i := range inv.units {
		d := &inv.units[i].Device
		n, ok := number[d.At.GPU]
		if !ok {
			n = len(number)
			number[d.At.GPU] = n
		}
		s.gpuOf[i], s.nodeOf[i] = n, d.NUMANode
	}
	s.gpus = len(number)
	s.links = make([]int, s.gpus*s.gpus)
	for _, l := range inv.links {
		a, known := number[l.A]
		b, too := number[l.B]
		if known && too {
			v := 100*l.NVLinks + 10*int(l.Path)
			s.links[a*s.gpus+b], s.links[b*s.gpus+a] = v, v
		}
	}
	return s
}

// of rates two units (by index): higher is better.
func (s *scores) of(a, b int) int {
	if s.gpuOf[a] == s.gpuOf[b] {
		return 10_000 // instances of one GPU
	}
	v := s.links[s.gpuOf[a]*s.gpus+s.gpuOf[b]]
	if s.nodeOf[a] >= 0 && s.nodeOf[a] == s.nodeOf[b] {
		v += 5
	}
	return v
}
