package inventory

import "slices"

// selection is a set of GPUs that can be changed, for searches that can't compare all sets.
//
// The search grows a set from each GPU, each time by the GPU with the best connection to those chosen already. Of these
// sets, and the one of the GPUs with the most units, it takes the best, and exchanges one GPU as long as that makes it
// better, at most once per GPU. The cost is O(g²·k) for k of g GPUs. The result is a set that no exchange of one GPU
// makes better (unless g exchanges were not enough), but not necessarily the best one.
type selection struct {
	set     []int
	has     []bool       // by GPU
	gain    []connection // by GPU: the sum of its connections with the set
	measure measure
}

func (s *search) selection(set []int) *selection {
	c := &selection{has: make([]bool, len(s.gpus)), gain: make([]connection, len(s.gpus))}
	for _, g := range set {
		s.add(c, g)
	}
	return c
}

func (s *search) add(c *selection, g int) {
	c.measure.free += len(s.gpus[g].free)
	c.measure.near += c.gain[g]
	c.measure.degree += s.degree[g]
	c.set, c.has[g] = append(c.set, g), true
	for other, v := range s.to[g] {
		c.gain[other] += v
	}
}

func (s *search) remove(c *selection, g int) {
	for other, v := range s.to[g] {
		c.gain[other] -= v
	}
	c.measure.free -= len(s.gpus[g].free)
	c.measure.near -= c.gain[g]
	c.measure.degree -= s.degree[g]
	c.set, c.has[g] = slices.DeleteFunc(c.set, func(member int) bool { return member == g }), false
}

func (s *search) offer(c *selection) { s.offerSet(c.set, c.measure) }

// grow adds GPUs until the set is complete.
func (s *search) grow(c *selection) *selection {
	for len(c.set) < s.size {
		next := -1
		for _, g := range s.others {
			if !c.has[g] && (next < 0 || c.gain[g] > c.gain[next] || c.gain[g] == c.gain[next] && s.degree[g] < s.degree[next]) {
				next = g
			}
		}
		s.add(c, next)
	}
	return c
}

// improve exchanges GPUs that are not required, each time those two that improve the set most.
func (s *search) improve(c *selection) []int {
	for range s.gpus {
		out, in, best := -1, -1, c.measure
		for _, a := range s.others {
			if !c.has[a] {
				continue
			}
			for _, b := range s.others {
				if c.has[b] {
					continue
				}
				if m := s.exchanged(c, a, b); m.free >= s.need && m.compare(best) < 0 {
					out, in, best = a, b, m
				}
			}
		}
		if out < 0 {
			break
		}
		s.remove(c, out)
		s.add(c, in)
	}
	return c.set
}

// exchanged returns the measure with b in the place of a.
func (s *search) exchanged(c *selection, a, b int) measure {
	return measure{
		free:   c.measure.free - len(s.gpus[a].free) + len(s.gpus[b].free),
		near:   c.measure.near - c.gain[a] + c.gain[b] - s.to[a][b],
		degree: c.measure.degree - s.degree[a] + s.degree[b],
	}
}
