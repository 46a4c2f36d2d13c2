package allocator

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// workload is a random sequence of requests that end again. It is the same for each way to choose.
type workload struct {
	random *rand.Rand
	free   []int
	held   [][]int
}

// run returns the sum of the scores of the sets that the requests get. A request that does not fit waits for others to end.
func (m node) run(seed uint64, choose func(request) []int) (sum, requests int) {
	w := workload{random: rand.New(rand.NewPCG(seed, 0))}
	for i := range m.devices {
		w.free = append(w.free, i)
	}
	for range 2000 {
		n := []int{1, 1, 1, 2, 2, 4}[w.random.IntN(6)]
		for n > len(w.free) || len(w.held) > 0 && w.random.IntN(3) == 0 {
			k := w.random.IntN(len(w.held))
			w.free, w.held = append(w.free, w.held[k]...), slices.Delete(w.held, k, k+1)
		}
		set := choose(request{available: w.free, n: n})
		sum, requests = sum+scoreOf(m.devices, set), requests+1
		w.free = slices.DeleteFunc(w.free, func(i int) bool { return slices.Contains(set, i) })
		w.held = append(w.held, set)
	}
	return sum, requests
}

// Over a sequence of requests of one, two and four GPUs that come and end, the sets have a higher score in all than
// go-gpuallocator's, although each is chosen as the best one of its moment: what is left is looked at, too.
func TestSequences(t *testing.T) {
	for _, name := range []string{"a100-islands", "dgx1", "l40s", "h100x8"} {
		t.Run(name, func(t *testing.T) {
			m := read(t, name)
			for seed := range uint64(3) {
				mine, n := m.run(seed, func(r request) []int { return m.Prefer(r.available, nil, r.n) })
				theirs, _ := m.run(seed, m.allocate)
				t.Logf("%d requests: score %d, go-gpuallocator %d: %+.1f %%", n, mine, theirs, 100*float64(mine-theirs)/float64(theirs))
				if mine <= theirs {
					t.Errorf("seed %d: score %d, go-gpuallocator %d", seed, mine, theirs)
				}
			}
		})
	}
}
