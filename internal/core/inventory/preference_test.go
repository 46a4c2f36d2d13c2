package inventory_test

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// An explanation has the units that Prefer chooses, and each other available device with a reason that holds: against all sets with that
// device, by their NVLinks.
func TestExplainPreference(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // repeatable
	reasons := map[string]int{}
	for range 300 {
		n := 3 + random.IntN(6)
		nvlinks, s := randomLinks(random, n)
		for i := range s.Devices {
			s.Devices[i].NUMANode = -1
		}
		inv := build(s, core.DefaultConfig())
		all, k := idsOf(inv), 1+random.IntN(n-1)
		p := inv.ExplainPreference(all, nil, k)
		if !slices.Equal(p.Units, inv.Prefer(all, nil, k)) || p.Method != inventory.MethodConnected || len(p.Others) != n-k || len(p.Pairs) != k*(k-1)/2 {
			t.Fatalf("%d of %d: %+v", k, n, p)
		}
		var chosen uint
		links := 0
		for _, id := range p.Units {
			chosen |= 1 << slices.Index(all, id)
		}
		for _, pair := range p.Pairs {
			links += pair.NVLinks
			if pair.Bandwidth != 25*pair.NVLinks {
				t.Fatalf("%+v", pair)
			}
		}
		if links != within(nvlinks, chosen) {
			t.Fatalf("pairs %+v have %d NVLinks, the set %d", p.Pairs, links, within(nvlinks, chosen))
		}
		for _, o := range p.Others {
			bit := uint(1) << slices.Index(all, inventory.UnitID(o.Device))
			best := -1
			for set := range uint(1) << n {
				if set&bit != 0 && bits.OnesCount(set) == k {
					best = max(best, within(nvlinks, set))
				}
			}
			worse := strings.HasPrefix(o.Why, "a set with it is connected worse")
			if chosen&bit != 0 || worse != (best < links) || !worse && !strings.HasPrefix(o.Why, "it is as good, ") {
				t.Fatalf("%s: %q, the best set with it has %d NVLinks, the chosen one %d", o.Device, o.Why, best, links)
			}
			reasons[strings.SplitN(o.Why, ":", 2)[0]]++
		}
	}
	if len(reasons) != 3 {
		t.Errorf("the reasons are %v, want three", reasons)
	}
}

// The other methods, each with the reasons of what is not chosen.
func TestExplainOtherPreferences(t *testing.T) {
	shared := core.DefaultConfig()
	shared.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}}}
	packed := shared
	packed.Packed = true
	mig := core.DefaultConfig()
	mig.MIG = inventory.MIGMixed
	partly := coretest.WithMIG(coretest.WithMIG(coretest.GPUs(2), 0, "1g.10gb", "1g.10gb"), 1, "1g.10gb", "1g.10gb")
	for name, tc := range map[string]struct {
		s      gpu.Snapshot
		cfg    core.Config
		used   []int // units that are not available
		must   []int
		n      int
		method inventory.Method
		why    []string
	}{
		"all":      {coretest.GPUs(2), core.DefaultConfig(), nil, nil, 2, inventory.MethodAll, nil},
		"required": {coretest.GPUs(2), core.DefaultConfig(), nil, []int{1}, 1, inventory.MethodRequired, []string{"the required devices are enough"}},
		"distributed": {coretest.GPUs(3), shared, []int{0}, nil, 1, inventory.MethodShared,
			[]string{"it has 1 units in use, the chosen ones 0 or fewer", "it has 0 units in use, as the chosen ones, and is later in the order of devices"}},
		"packed": {coretest.GPUs(2), packed, []int{0}, nil, 1, inventory.MethodPacked, []string{"it has 0 units in use, the chosen ones 1 or more"}},
		"MIG instances of a GPU in use": {partly, mig, []int{0}, nil, 1, inventory.MethodConnected,
			[]string{"GPUs that are partly used come first: a set with it has 2 available units, the chosen one 1", "GPUs that are partly used come first: a set with it has 2 available units, the chosen one 1"}},
	} {
		inv := build(tc.s, tc.cfg)
		all := idsOf(inv)
		var available, required []inventory.UnitID
		for i, id := range all {
			if !slices.Contains(tc.used, i) {
				available = append(available, id)
			}
			if slices.Contains(tc.must, i) {
				required = append(required, id)
			}
		}
		p := inv.ExplainPreference(available, required, tc.n)
		var why []string
		for _, o := range p.Others {
			why = append(why, o.Why)
		}
		if p.Method != tc.method || !slices.Equal(why, tc.why) || !slices.Equal(p.Units, inv.Prefer(available, required, tc.n)) {
			t.Errorf("%s: %s, %q, want %s, %q", name, p.Method, why, tc.method, tc.why)
		}
	}
}
