package inventory

import (
	"cmp"
	"slices"
)

// maxExact is up to how many sets of GPUs are all compared: 16 GPUs have at most 12,870 of one size.
const maxExact = 20_000

// measure rates a set of GPUs. All sets that are compared have as many GPUs.
type measure struct {
	free   int        // available units of these GPUs; fewer are better
	near   connection // sum over the pairs of the set; more is better
	degree connection // sum of the connections of each GPU with all candidates; less is better
}

// compare returns a negative number if m is the better one.
//
// What a set leaves is the sum over the pairs outside it. That is the sum over all pairs, minus degree, plus near: of
// sets with equal near the one with the smallest degree leaves most.
func (m measure) compare(o measure) int {
	return cmp.Or(cmp.Compare(m.free, o.free), cmp.Compare(o.near, m.near), cmp.Compare(m.degree, o.degree))
}

// search looks for the best set of GPUs for one request.
type search struct {
	gpus   []candidate // in canonical order
	need   int         // units to choose, fewer than there are
	to     connections
	degree []connection // by GPU: the sum of its connections

	size   int   // GPUs of a set
	others []int // GPUs that are not required
	found  []int // the best set so far; nil = none
	best   measure
}

func (s *search) connect(to connections) {
	s.to, s.degree = to, make([]connection, len(to))
	for g, row := range to {
		for _, c := range row {
			s.degree[g] += c
		}
	}
}

// run returns the best set of as few GPUs as possible that has the required GPUs and enough units.
func (s *search) run() []int {
	set, m := make([]int, 0, len(s.gpus)), measure{}
	for g, c := range s.gpus {
		if c.required {
			m = s.with(m, set, g)
			set = append(set, g)
		} else {
			s.others = append(s.others, g)
		}
	}
	largest := slices.SortedStableFunc(slices.Values(s.others), func(a, b int) int {
		return cmp.Compare(len(s.gpus[b].free), len(s.gpus[a].free))
	})
	s.size = len(set)
	for free := m.free; free < s.need; s.size++ {
		free += len(s.gpus[largest[s.size-len(set)]].free)
	}
	more := s.size - len(set)
	if combinations(len(s.others), more) <= maxExact {
		s.compareAll(set, 0, m)
		return s.found
	}
	s.offer(s.selection(slices.Concat(set, largest[:more])))
	for _, g := range s.others {
		s.offer(s.grow(s.selection(append(set, g))))
	}
	return s.improve(s.selection(s.found))
}

// with returns the measure of a set and another GPU; m is that of the set.
func (s *search) with(m measure, set []int, g int) measure {
	m.free += len(s.gpus[g].free)
	m.degree += s.degree[g]
	for _, member := range set {
		m.near += s.to[g][member]
	}
	return m
}

// compareAll compares all sets that consist of these GPUs and as many as are missing of others[from:].
func (s *search) compareAll(set []int, from int, m measure) {
	missing := s.size - len(set)
	if missing == 0 {
		s.offerSet(set, m)
	}
	for i := from; missing > 0 && i <= len(s.others)-missing; i++ {
		g := s.others[i]
		s.compareAll(append(set, g), i+1, s.with(m, set, g))
	}
}

// offerSet keeps a set if it has enough units and is better than the best one so far.
func (s *search) offerSet(set []int, m measure) {
	if m.free >= s.need && (s.found == nil || m.compare(s.best) < 0) {
		s.found, s.best = append(s.found[:0], set...), m
	}
}

// combinations returns how many sets of k there are of n, or some number above maxExact.
func combinations(n, k int) int {
	c := 1
	for i := range min(k, n-k) {
		if c = c * (n - i) / (i + 1); c > maxExact {
			break
		}
	}
	return c
}
