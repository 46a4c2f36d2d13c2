package inventory_test

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// linked is a snapshot of n GPUs whose links are given by a function of two indices.
func linked(n int, link func(a, b int) gpu.Link) gpu.Snapshot {
	s := coretest.GPUs(n)
	s.Links = nil
	for b := range n {
		for a := range b {
			l := link(a, b)
			l.A, l.B = coretest.GPU(a), coretest.GPU(b)
			s.Links = append(s.Links, l)
		}
	}
	return gpu.NewSnapshot(s)
}

func build(s gpu.Snapshot, c core.Config) *inventory.Allocatable {
	return core.Build(s, health.Ledger{}, c).WithoutHost()
}

func idsOf(inv *inventory.Allocatable) (ids []inventory.UnitID) {
	for u := range inv.Units() {
		ids = append(ids, u.ID)
	}
	return ids
}

// randomLinks are up to 4 NVLinks for some of the pairs of n GPUs, by index.
func randomLinks(random *rand.Rand, n int) ([][]int, gpu.Snapshot) {
	nvlinks := make([][]int, n)
	for i := range nvlinks {
		nvlinks[i] = make([]int, n)
	}
	return nvlinks, linked(n, func(a, b int) gpu.Link {
		l := gpu.Link{NVLinks: max(0, random.IntN(8)-3), Path: gpu.PathSystem}
		nvlinks[a][b], nvlinks[b][a] = l.NVLinks, l.NVLinks
		return l
	})
}

// within counts the NVLinks between the GPUs of a set, given as bits.
func within(nvlinks [][]int, set uint) (sum int) {
	for rest := set; rest != 0; rest &= rest - 1 {
		a := bits.TrailingZeros(rest)
		for others := rest & (rest - 1); others != 0; others &= others - 1 {
			sum += nvlinks[a][bits.TrailingZeros(others)]
		}
	}
	return sum
}

func bitsOf(inv *inventory.Allocatable, ids []inventory.UnitID) (set uint) {
	for _, id := range ids {
		u, _ := inv.Unit(id)
		set |= 1 << u.Device.Index
	}
	return set
}

// MIG instances: as few GPUs as possible, and of these sets one with as few free instances as possible.
func TestInstancesAreOfFewAndUsedGPUs(t *testing.T) {
	const gpus, instances = 5, 4
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	s := coretest.GPUs(gpus)
	for i := range gpus {
		s = coretest.WithMIG(s, i, "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb")
	}
	config := core.DefaultConfig()
	config.MIG = inventory.MIGMixed
	inv := build(s, config)
	for range 2000 {
		var available, required []inventory.UnitID
		free, fixed := [gpus]int{}, uint(0)
		for i := range gpus {
			for j := range instances {
				id := inventory.UnitID(coretest.Instance(i, j))
				switch random.IntN(12) {
				case 0, 1, 2, 3, 4, 5:
					available, free[i] = append(available, id), free[i]+1
				case 6:
					required, fixed = append(required, id), fixed|1<<i
				}
			}
		}
		n := len(required) + 1 + random.IntN(max(1, len(available)))
		total := min(n, len(required)+len(available))
		random.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
		got := inv.Prefer(available, required, n)
		set := bitsOf(inv, got)

		unused := func(set uint) (sum int) {
			for i, f := range free {
				sum += f * int(set>>i&1)
			}
			return sum + len(required) - total
		}
		fewest, least := gpus+1, 0
		for other := range uint(1) << gpus {
			if other&fixed != fixed || unused(other) < 0 {
				continue
			}
			if k := bits.OnesCount(other); k < fewest || k == fewest && unused(other) < least {
				fewest, least = k, unused(other)
			}
		}
		if len(got) != total || bits.OnesCount(set) != fewest || unused(set) != least {
			t.Fatalf("seed %d: %d of %v with %v: got %v of %d GPUs that have %d more, want %d GPUs that have %d more",
				seed, n, available, required, got, bits.OnesCount(set), unused(set), fewest, least)
		}
	}
}

// With more sets than are compared, the result can't be improved by the exchange of one GPU. On these random topologies it
// has at least 93 % of the NVLinks of the best set (measured), and is the best set in nine of ten cases.
func TestManyGPUs(t *testing.T) {
	const machines, gpus, n = 300, 18, 9
	random := rand.New(rand.NewPCG(1, 2))
	worst, best := 1.0, 0
	for range machines {
		nvlinks, s := randomLinks(random, gpus)
		inv := build(s, core.DefaultConfig())
		ids := idsOf(inv)
		set := bitsOf(inv, inv.Prefer(ids, nil, n))
		have, most := within(nvlinks, set), 0
		for other := range uint(1) << gpus {
			if bits.OnesCount(other) != n {
				continue
			}
			sum := within(nvlinks, other)
			if most = max(most, sum); sum > have && bits.OnesCount(other^set) == 2 {
				t.Errorf("%b has %d links, %b has %d", set, have, other, sum)
			}
		}
		worst = min(worst, float64(have)/float64(most))
		if have == most {
			best++
		}
		random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		if again := bitsOf(inv, inv.Prefer(ids, nil, n)); again != set {
			t.Errorf("%b, in another order %b", set, again)
		}
	}
	if t.Logf("worst %.3f, best in %d of %d", worst, best, machines); worst < 0.93 || best < machines*9/10 {
		t.Errorf("worst %.3f, best in %d of %d", worst, best, machines)
	}
}

// 64 GPUs in islands of eight: a request gets an island, a smaller one what is left of a used island.
func TestManyGPUsInIslands(t *testing.T) {
	inv := build(linked(64, func(a, b int) gpu.Link {
		l := gpu.Link{Path: gpu.PathSystem}
		if a/8 == b/8 {
			l.NVLinks, l.Path = 4, gpu.PathNUMA
		}
		return l
	}), core.DefaultConfig())
	var available []inventory.UnitID
	for i, id := range idsOf(inv) {
		if i/8 != 3 || i%2 == 0 { // half of island 3 is in use
			available = append(available, id)
		}
	}
	for n, want := range map[int]map[int]int{1: {3: 1}, 4: {3: 4}, 8: {0: 8}, 12: {0: 8, 3: 4}, 20: {0: 8, 1: 8, 3: 4}} {
		islands := map[int]int{}
		for _, id := range inv.Prefer(available, nil, n) {
			u, _ := inv.Unit(id)
			islands[u.Device.Index/8]++
		}
		if fmt.Sprint(islands) != fmt.Sprint(want) {
			t.Errorf("%d: %v, want %v", n, islands, want)
		}
	}
}

// More sets than are compared, and only one has enough MIG instances: it is found, although each search from one GPU ends with others.
func TestManyGPUsWithInstances(t *testing.T) {
	const gpus, large, n = 24, 6, 24
	s := coretest.GPUs(gpus)
	var available []inventory.UnitID
	for g := range gpus {
		s = coretest.WithMIG(s, g, slices.Repeat([]string{"1g.10gb"}, 4)...)
		for instance := range 4 {
			if instance == 0 || g >= gpus-large {
				available = append(available, inventory.UnitID(coretest.Instance(g, instance)))
			}
		}
	}
	c := core.DefaultConfig()
	c.MIG = inventory.MIGMixed
	got := build(s, c).Prefer(available, nil, n)
	if want := available[len(available)-n:]; !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
		t.Errorf("%v, want %v", got, want)
	}
}

// Pairs of four GPUs that differ in one property: the second pair is better. A pair may be listed twice, in either order, with
// itself, or with a GPU that is not offered.
func TestPairs(t *testing.T) {
	a, b, c, d := coretest.GPU(0), coretest.GPU(1), coretest.GPU(2), coretest.GPU(3)
	for name, links := range map[string][]gpu.Link{
		"more NVLinks":         {{A: a, B: b, NVLinks: 4, Path: gpu.PathBoard}, {A: c, B: d, NVLinks: 5}},
		"faster NVLinks":       {{A: a, B: b, NVLinks: 7, Generation: 4}, {A: c, B: d, NVLinks: 4, Generation: 5}},
		"slower NVLinks":       {{A: a, B: b, NVLinks: 5, Generation: 1}, {A: c, B: d, NVLinks: 5}},
		"NVSwitch":             {{A: a, B: b, NVLinks: 4}, {A: c, B: d, NVLinks: 4, NVSwitch: true}},
		"NVLink over PCIe":     {{A: a, B: b, Path: gpu.PathBoard}, {A: c, B: d, NVLinks: 1, Generation: 1}},
		"path":                 {{A: a, B: b, Path: gpu.PathUnknown}, {A: c, B: d, Path: gpu.PathSystem}},
		"listed twice":         {{A: a, B: b, NVLinks: 7}, {A: a, B: b, NVLinks: 7}, {A: b, B: a, NVLinks: 7}, {A: d, B: c, NVLinks: 8}},
		"itself and elsewhere": {{A: a, B: a, NVLinks: 99}, {A: a, B: "GPU-unknown", NVLinks: 99}, {A: d, B: c, NVLinks: 8}},
	} {
		s := coretest.GPUs(4)
		s.Links = links
		inv := build(gpu.NewSnapshot(s), core.DefaultConfig())
		if got, want := inv.Prefer(idsOf(inv), nil, 2), []inventory.UnitID{inventory.UnitID(c), inventory.UnitID(d)}; !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

// BenchmarkPrefer measures one request where all sets of GPUs are compared. The bound of the product is 1 ms for 4 of 16 GPUs.
func BenchmarkPrefer(b *testing.B) {
	inv := build(coretest.GPUs(16), core.DefaultConfig())
	ids := idsOf(inv)
	for _, n := range []int{4, 8} {
		b.Run(fmt.Sprintf("n=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				inv.Prefer(ids, nil, n)
			}
		})
	}
}
