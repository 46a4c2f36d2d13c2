package allocator

import (
	"iter"
	"math/rand/v2"
	"testing"

	"github.com/NVIDIA/go-gpuallocator/gpuallocator"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/placement"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// scoreOf is go-gpuallocator's score of a set (calculateGPUSetScore, which is not exported): for each pair 10 to 60 points
// for the PCIe path, and 100 for each NVLink.
func scoreOf(devices gpuallocator.DeviceList, set []int) (score int) {
	for _, a := range set {
		for _, b := range set {
			if a >= b {
				continue
			}
			for _, l := range devices[a].Links[b] {
				// The types are numbered: six PCIe paths from far to near, then one to 18 NVLinks.
				if n := int(l.Type); n <= 6 {
					score += 10 * n
				} else {
					score += 100 * (n - 6)
				}
			}
		}
	}
	return score
}

// node is a simulated machine as both read it.
type node struct {
	placement.Machine
	devices gpuallocator.DeviceList
}

func read(t *testing.T, name string, prepare ...func(*simdriver.Machine) error) node {
	t.Helper()
	m := placement.Read(t, name, prepare...)
	devices, err := gpuallocator.NewDevices(gpuallocator.WithNvmlLib(nvml.New(nvml.WithLibraryPath(m.Driver.Library))))
	if err != nil {
		t.Fatal(err)
	}
	return node{m, devices}
}

// request is a request of the kubelet in a random state of a node.
type request struct {
	available, required []int
	n                   int
}

// requests yields those for every size, in random states.
func (m node) requests(random *rand.Rand) iter.Seq[request] {
	return func(yield func(request) bool) {
		for range 300 {
			var r request
			for i := range m.devices {
				if random.IntN(4) > 0 {
					r.available = append(r.available, i)
				}
			}
			if len(r.available) > 0 && random.IntN(2) == 0 {
				r.required = []int{r.available[random.IntN(len(r.available))]}
			}
			random.Shuffle(len(r.available), func(i, j int) { r.available[i], r.available[j] = r.available[j], r.available[i] })
			for r.n = 1; r.n <= len(r.available); r.n++ {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// allocate returns go-gpuallocator's set.
func (m node) allocate(r request) (set []int) {
	pick := func(indices []int) (all []*gpuallocator.Device) {
		for _, i := range indices {
			all = append(all, m.devices[i])
		}
		return all
	}
	for _, d := range gpuallocator.NewBestEffortPolicy().Allocate(pick(r.available), pick(r.required), r.n) {
		set = append(set, d.Index)
	}
	return set
}

// On every topology and in random states a request gets a set whose score is never below that of go-gpuallocator's set.
func TestNeverWorse(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for name, scoreOfAll := range map[string]int{"h100x8": 400, "a100-islands": 5200, "dgx1": 3000, "gb200": 80, "l40s": 520} {
		t.Run(name, func(t *testing.T) {
			m := read(t, name)
			all := make([]int, len(m.devices))
			for i := range all {
				all[i] = i
			}
			if got := scoreOf(m.devices, all); got != scoreOfAll {
				t.Errorf("score of all GPUs: %d, want %d", got, scoreOfAll)
			}
			compared, better, most := 0, 0, 0.0
			for r := range m.requests(random) {
				got, its := m.Prefer(r.available, r.required, r.n), m.allocate(r)
				mine, theirs := scoreOf(m.devices, got), scoreOf(m.devices, its)
				if len(got) != r.n || len(its) != r.n || mine < theirs {
					t.Errorf("seed %d: %+v: %v with score %d, go-gpuallocator %v with %d", seed, r, got, mine, its, theirs)
				}
				if compared++; mine > theirs {
					better, most = better+1, max(most, float64(mine-theirs)/float64(mine))
				}
			}
			t.Logf("%s: go-gpuallocator's set has a lower score in %d of %d requests, by up to %.0f %%", name, better, compared, 100*most)
		})
	}
}

// Only where its score can't see the NVLinks, because they go through NVSwitches, a set may have a lower one: it has more
// NVLinks then. Half of the links of one GPU of eight are down.
func TestLowerScoreOnlyForNVLinksThroughNVSwitch(t *testing.T) {
	seed := rand.Uint64()
	m := read(t, "h100x8", func(m *simdriver.Machine) error { return m.Set(3, "links_down", "0x1ff") })
	compared, lower, fewer := 0, 0, 0
	for r := range m.requests(rand.New(rand.NewPCG(seed, 0))) {
		got, its := m.Prefer(r.available, r.required, r.n), m.allocate(r)
		if compared++; m.nvlinks(got) > m.nvlinks(its) {
			fewer++
		}
		if scoreOf(m.devices, got) >= scoreOf(m.devices, its) {
			continue
		}
		if lower++; m.nvlinks(got) <= m.nvlinks(its) {
			t.Errorf("seed %d: %+v: %v with %d NVLinks, go-gpuallocator %v with %d", seed, r, got, m.nvlinks(got), its, m.nvlinks(its))
		}
	}
	if t.Logf("%d requests: a lower score in %d; go-gpuallocator's set has fewer NVLinks in %d", compared, lower, fewer); lower == 0 {
		t.Error("no request got a set with a lower score")
	}
}

// nvlinks counts the NVLinks within a set.
func (m node) nvlinks(set []int) (sum int) {
	index := map[gpu.DeviceID]int{}
	for _, i := range set {
		index[m.GPUs[i].ID] = i
	}
	for _, l := range m.Links {
		_, a := index[l.A]
		_, b := index[l.B]
		if a && b {
			sum += l.NVLinks
		}
	}
	return sum
}
