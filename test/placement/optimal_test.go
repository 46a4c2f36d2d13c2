package placement

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// topologies are the machines on which every set of every size is compared.
var topologies = []struct{ machine, linksDown string }{
	{"h100x8", ""}, {"h100x8", "0xf"}, {"a100-islands", ""}, {"dgx1", ""}, {"dgx1", "0x1"}, {"gb200", ""}, {"l40s", ""},
}

// value is how good a set of GPUs is, by the definition in docs/placement.md: the larger one of two is better, the first
// element decides first. The elements are bandwidth, pairs through NVSwitch and pairs on one NUMA node, of the pairs in the
// set and then of those that are left.
type value [6]int

// valueOf computes the value from its definition, with none of the shortcuts of inventory.Prefer.
func valueOf(m Machine, available, set []int) value {
	left := slices.DeleteFunc(slices.Clone(available), func(i int) bool { return slices.Contains(set, i) })
	var v value
	for part, gpus := range [][]int{set, left} {
		for _, a := range gpus {
			for _, b := range gpus {
				if a >= b {
					continue
				}
				l := m.link(a, b)
				v[3*part] += 10*int(l.Path) + l.NVLinks*map[gpu.NVLinkGeneration]int{0: 100, 1: 80, 2: 100, 3: 100, 4: 100, 5: 200}[l.Generation]
				if l.NVSwitch {
					v[3*part+1]++
				}
				if m.GPUs[a].NUMANode == m.GPUs[b].NUMANode {
					v[3*part+2]++
				}
			}
		}
	}
	return v
}

func (m Machine) link(a, b int) gpu.Link {
	for _, l := range m.Links {
		if l.A == m.GPUs[a].ID && l.B == m.GPUs[b].ID || l.A == m.GPUs[b].ID && l.B == m.GPUs[a].ID {
			return l
		}
	}
	return gpu.Link{}
}

// best compares all sets of n available GPUs that have the required ones, and returns the best one; of equal sets the first.
func best(m Machine, available, required []int, n int) (found []int) {
	available = slices.Compact(slices.Sorted(slices.Values(slices.Concat(available, required))))
	required = slices.Compact(slices.Sorted(slices.Values(required)))
	if n <= len(required) {
		return required[:max(n, 0)]
	}
	var most value
	for bits := range 1 << len(available) {
		var set []int
		for i, index := range available {
			if bits>>i&1 != 0 {
				set = append(set, index)
			}
		}
		if len(set) != min(n, len(available)) || slices.ContainsFunc(required, func(i int) bool { return !slices.Contains(set, i) }) {
			continue
		}
		v := valueOf(m, available, set)
		if c := slices.Compare(v[:], most[:]); found == nil || c > 0 || c == 0 && slices.Compare(set, found) < 0 {
			found, most = set, v
		}
	}
	return found
}

// On every topology and in random states every request gets the best set: the same for any order of the arguments, with the
// required GPUs, also those that are not available, and without unknown IDs.
func TestEverySetIsTheBest(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for _, c := range topologies {
		t.Run(c.machine+c.linksDown, func(t *testing.T) {
			m := Read(t, c.machine, func(m *simdriver.Machine) error {
				if c.linksDown == "" {
					return nil
				}
				return m.Set(3, "links_down", c.linksDown) // in one of the two GPUs of each link
			})
			for trial := range 60 {
				var available, required []int
				for i := range m.GPUs {
					if trial == 0 || random.IntN(3) > 0 {
						available = append(available, i)
					}
					if trial > 30 && random.IntN(6) == 0 {
						required = append(required, i)
					}
				}
				for n := -1; n <= len(m.GPUs)+1; n++ {
					want := best(m, available, required, n)
					for range 2 {
						asked, must := append(slices.Clone(available), 99), append(slices.Clone(required), 99)
						random.Shuffle(len(asked), func(i, j int) { asked[i], asked[j] = asked[j], asked[i] })
						random.Shuffle(len(must), func(i, j int) { must[i], must[j] = must[j], must[i] })
						if got := m.Prefer(asked, must, n); !slices.Equal(got, want) {
							t.Fatalf("seed %d: %d of %v with %v: got %v, want %v", seed, n, asked, must, got, want)
						}
					}
				}
			}
		})
	}
}
