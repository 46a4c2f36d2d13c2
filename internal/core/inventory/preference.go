package inventory

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Method is how Prefer chooses units.
type Method string

// The methods.
const (
	MethodRequired  Method = "required"     // the required units are enough
	MethodAll       Method = "all"          // all available units are needed
	MethodShared    Method = "least used"   // shared devices, those with the fewest units in use first
	MethodPacked    Method = "most used"    // shared devices, those with the most units in use first: Config.Packed
	MethodEqual     Method = "equal limits" // shared devices, the same number of units of each: a container has one limit of memory for all of its GPUs
	MethodConnected Method = "best GPU set" // the best connected GPUs: see Prefer
)

// Preference is what Prefer chooses, and why.
type Preference struct {
	Units  []UnitID
	Method Method
	GPUs   []gpu.DeviceID // of Units, in canonical order
	Pairs  []Pair         // of GPUs
	Others []NotPreferred // available devices without a unit in Units, in canonical order
}

// Pair is how two GPUs are connected.
type Pair struct {
	gpu.Link
	Bandwidth int  // of the NVLinks in each direction, in GB/s
	SameNUMA  bool // they are on one NUMA node
}

// NotPreferred is a device that was available and not chosen.
type NotPreferred struct {
	Device gpu.DeviceID
	Why    string // one line
}

// ExplainPreference returns what Prefer chooses for the same arguments, and why. It searches once more for each GPU that is not chosen,
// so it takes as many times longer.
func (a *Allocatable) ExplainPreference(available, required []UnitID, n int) Preference {
	chosen, method := a.choose(available, required, n)
	p := Preference{Units: a.ids(slices.Clone(chosen)), Method: method}
	for _, i := range chosen {
		if id := a.units[i].Device.At.GPU; !slices.Contains(p.GPUs, id) {
			p.GPUs = append(p.GPUs, id)
		}
	}
	p.Pairs = a.pairs(p.GPUs)
	taken, pool := a.candidates(available, required)
	switch method {
	case MethodConnected:
		p.Others = a.worseSets(taken, pool, n)
	case MethodShared, MethodPacked:
		p.Others = a.otherLoads(chosen, pool)
	case MethodRequired:
		p.Others = a.notChosen(chosen, pool, func(int) string { return "the required devices are enough" })
	case MethodEqual:
		p.Others = a.notChosen(chosen, pool, func(int) string {
			return "a container has one limit of memory for all of its GPUs, and so the same number of shares of each"
		})
	case MethodAll:
	}
	p.Others = slices.CompactFunc(p.Others, func(a, b NotPreferred) bool { return a.Device == b.Device })
	return p
}

// notChosen returns the devices of a pool without a chosen unit, with the reason for each unit (by index).
func (a *Allocatable) notChosen(chosen, pool []int, why func(unit int) string) (others []NotPreferred) {
	here := map[gpu.DeviceID]bool{}
	for _, i := range chosen {
		here[a.units[i].Device.ID] = true
	}
	for _, i := range pool {
		if id := a.units[i].Device.ID; !here[id] {
			others = append(others, NotPreferred{id, why(i)})
		}
	}
	return others
}

// pairs returns the connections of all pairs of GPUs.
func (a *Allocatable) pairs(ids []gpu.DeviceID) (pairs []Pair) {
	node := map[gpu.DeviceID]int{}
	for i := range a.units {
		node[a.units[i].Device.At.GPU] = a.units[i].Device.NUMANode
	}
	for i, x := range ids {
		for _, y := range ids[i+1:] {
			p := Pair{Link: gpu.Link{A: x, B: y}, SameNUMA: node[x] >= 0 && node[x] == node[y]}
			if j := slices.IndexFunc(a.links, func(l gpu.Link) bool { return l.A == x && l.B == y || l.A == y && l.B == x }); j >= 0 {
				p.Link = a.links[j]
				p.A, p.B = x, y
				p.Bandwidth = bandwidth(p.Link)
			}
			pairs = append(pairs, p)
		}
	}
	return pairs
}

// bandwidth is that of the NVLinks of a link in GB/s: 100 points are 25 GB/s.
func bandwidth(l gpu.Link) int { return l.NVLinks * nvlinkPoints(l.Generation) / 4 }

// worseSets returns for each GPU outside of the best set why the best set with it is worse.
func (a *Allocatable) worseSets(taken, pool []int, n int) (others []NotPreferred) {
	best := a.newSearch(taken, pool, n)
	set := slices.Clone(best.run())
	for g := range best.gpus {
		if slices.Contains(set, g) || len(best.gpus[g].free) == 0 {
			continue
		}
		other := a.newSearch(taken, pool, n)
		other.gpus[g].required = true
		other.run()
		why := best.whyBetter(other)
		for _, i := range best.gpus[g].free {
			others = append(others, NotPreferred{a.units[i].Device.ID, why})
		}
	}
	return others
}

// whyBetter returns why the set of s is preferred to that of o, which has a certain GPU.
func (s *search) whyBetter(o *search) string {
	a, b := s.best, o.best
	switch {
	case o.size > s.size:
		return fmt.Sprintf("with it the request would use %d GPUs instead of %d", o.size, s.size)
	case b.free > a.free:
		return fmt.Sprintf("GPUs that are partly used come first: a set with it has %d available units, the chosen one %d", b.free, a.free)
	case b.near < a.near:
		return fmt.Sprintf("a set with it is connected worse: %s; the chosen one: %s", b.near, a.near)
	case b.degree > a.degree:
		return "it is as good, but what remains for the next request would be connected worse"
	}
	return "it is as good, and later in the order of GPUs"
}

// String describes the sum of connections: "1200 points (100 are 25 GB/s), 6 pairs over NVSwitches, 3 pairs on one NUMA node".
func (c connection) String() string {
	text := fmt.Sprintf("%d points (100 are 25 GB/s)", c/point)
	if n := c % point / switched; n > 0 {
		text += fmt.Sprintf(", %d pairs over NVSwitches", n)
	}
	if n := c % switched / sameNode; n > 0 {
		text += fmt.Sprintf(", %d pairs on one NUMA node", n)
	}
	return text
}

// otherLoads returns for each shared device without a chosen unit why others come first.
func (a *Allocatable) otherLoads(chosen, pool []int) []NotPreferred {
	free := map[gpu.DeviceID]int{}
	for _, i := range pool {
		free[a.units[i].Device.ID]++
	}
	used := func(i int) int { return max(a.units[i].Sharing.Replicas, 1) - free[a.units[i].Device.ID] }
	least, most := -1, -1 // units in use on the chosen devices
	for _, i := range chosen {
		if n := used(i); n >= 0 {
			if most = max(most, n); least < 0 || n < least {
				least = n
			}
		}
	}
	return a.notChosen(chosen, pool, func(i int) string {
		switch n := used(i); {
		case !a.packed && n > most:
			return fmt.Sprintf("it has %d units in use, the chosen ones %d or fewer", n, most)
		case a.packed && n < least:
			return fmt.Sprintf("it has %d units in use, the chosen ones %d or more", n, least)
		default:
			return fmt.Sprintf("it has %d units in use, as the chosen ones, and is later in the order of devices", n)
		}
	})
}
