package nomadadapter

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// linked is n GPUs with NVLinks between these pairs only.
func linked(n int, pairs ...[2]int) core.Snapshot {
	s := coretest.GPUs(n)
	s.Links = nil
	for _, p := range pairs {
		s.Links = append(s.Links, core.Link{A: coretest.GPU(p[0]), B: coretest.GPU(p[1]), NVLinks: 4})
	}
	return core.NewSnapshot(s)
}

// onlyGPUs is a reading with these GPUs only.
func onlyGPUs(s core.Snapshot, n ...int) core.Snapshot {
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d core.Device) bool {
		return !slices.ContainsFunc(n, func(i int) bool { return coretest.GPU(i) == d.At.GPU })
	})
	return s
}

// A GPU stays in the island in which it was first seen; who comes later joins its neighbours.
func TestIslandsStay(t *testing.T) {
	pairs := [][2]int{{0, 1}, {2, 3}}
	const a, b = h100 + " NVLink 0000:10:00.0", h100 + " NVLink 0000:12:00.0"
	cut := migSnapshot() // the first is cut up, the second is whole
	type step struct {
		reading core.Snapshot
		obs     []core.Observation
		want    map[string]string
	}
	four := map[string]string{gpuID(0): a, gpuID(1): a, gpuID(2): b, gpuID(3): b}
	for name, steps := range map[string][]step{
		"links go and come": {
			{linked(4, pairs...), nil, four},
			{linked(4), nil, four},
			{linked(4, [2]int{1, 2}), nil, four},
			{linked(4, pairs...), nil, four},
		},
		"a GPU goes and comes back": {
			{linked(4, pairs...), nil, four},
			{onlyGPUs(linked(4, pairs[1]), 1, 2, 3), nil, map[string]string{gpuID(1): a, gpuID(2): b, gpuID(3): b}},
			{linked(4, pairs[1]), []core.Observation{lost(0)}, four},
		},
		"one that comes joins, also in a slot before": {
			{onlyGPUs(linked(4, [2]int{1, 2}), 1, 2), nil, map[string]string{gpuID(1): h100 + " NVLink 0000:11:00.0", gpuID(2): h100 + " NVLink 0000:11:00.0"}},
			{linked(4, [2]int{0, 1}, [2]int{1, 2}), nil, map[string]string{gpuID(0): h100 + " NVLink 0000:11:00.0", gpuID(1): h100 + " NVLink 0000:11:00.0", gpuID(2): h100 + " NVLink 0000:11:00.0", gpuID(3): h100}},
		},
		"links that come after work": {
			{linked(2), nil, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{linked(2, [2]int{0, 1}), nil, map[string]string{gpuID(0): h100, gpuID(1): h100}},
		},
		"links that come before work": {
			{linked(2), []core.Observation{lost(0), lost(1)}, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{linked(2, [2]int{0, 1}), nil, map[string]string{gpuID(0): a, gpuID(1): a}},
		},
		"a driver that comes late": {
			{core.Snapshot{Driver: core.Driver{State: core.DriverFailed}, Devices: coretest.GPUs(2).Devices}, nil, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{linked(2, [2]int{0, 1}), nil, map[string]string{gpuID(0): a, gpuID(1): a}},
		},
		"another GPU in the slot that an island is named after": {
			{onlyGPUs(linked(4, [2]int{0, 1}), 0, 1), nil, map[string]string{gpuID(0): a, gpuID(1): a}},
			{withDevice(onlyGPUs(linked(4, [2]int{2, 3}), 1, 2, 3), 1, func(d *core.Device) { d.PCI = "0000:10:00.0" }), nil,
				map[string]string{gpuID(1): a, gpuID(2): h100 + " NVLink 0000:13:00.0", gpuID(3): h100 + " NVLink 0000:13:00.0"}},
		},
		"no slots": {
			{withDevice(withDevice(linked(2, [2]int{0, 1}), 0, func(d *core.Device) { d.PCI = "" }), 1, func(d *core.Device) { d.PCI = "" }), nil,
				map[string]string{gpuID(0): h100 + " NVLink " + gpuID(0), gpuID(1): h100 + " NVLink " + gpuID(0)}},
		},
		"what is cut up has no links": {
			{cut, nil, map[string]string{gpuID(1): h100 + " NVLink 0000:11:00.0", "MIG-0": h100 + " MIG 1g.10gb", "MIG-1": h100 + " MIG 1g.10gb", "MIG-2": h100 + " MIG 3g.40gb"}},
		},
	} {
		given := assignment{by: GroupByNVLink}
		for i, step := range steps {
			inv := nodeInventory(step.reading, step.obs...)
			given = given.with(inv)
			if diff := cmp.Diff(step.want, groupByDevice(t, groups(inv, given))); diff != "" {
				t.Errorf("%s, step %d (-want +got):\n%s", name, i, diff)
			}
		}
	}
}

func TestNUMANodes(t *testing.T) {
	s := withDevice(coretest.GPUs(4), 1, func(d *core.Device) { d.NUMANode = -1 })
	want := map[string]string{gpuID(0): h100 + " NUMA 0", gpuID(1): h100, gpuID(2): h100 + " NUMA 1", gpuID(3): h100 + " NUMA 1"}
	given := assignment{by: GroupByNUMA}
	for _, later := range []core.Snapshot{s, coretest.GPUs(4), withDevice(s, 3, func(d *core.Device) { d.NUMANode = 0 })} {
		inv := nodeInventory(later)
		given = given.with(inv)
		if diff := cmp.Diff(want, groupByDevice(t, groups(inv, given))); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	cut := inventoryUnder(core.Policy{Rules: []core.Rule{{Select: core.Selector{Profiles: []string{"1g*"}}, Pool: "small"}}}, migSnapshot())
	want = map[string]string{gpuID(1): h100 + " NUMA 1", "MIG-0": "small NUMA 0", "MIG-1": "small NUMA 0", "MIG-2": h100 + " MIG 3g.40gb NUMA 0"}
	if diff := cmp.Diff(want, groupByDevice(t, groups(cut, assignment{by: GroupByNUMA}))); diff != "" {
		t.Errorf("MIG (-want +got):\n%s", diff)
	}
}

// One way to group does not bear on another.
func TestAnotherWayToGroup(t *testing.T) {
	inv := nodeInventory(linked(2, [2]int{0, 1}))
	var r groupNamer
	for _, step := range []struct {
		by   GroupBy
		want map[string]string
	}{
		{GroupByNVLink, map[string]string{gpuID(0): h100 + " NVLink 0000:10:00.0", gpuID(1): h100 + " NVLink 0000:10:00.0"}},
		{GroupByNone, map[string]string{gpuID(0): h100, gpuID(1): h100}},
		{GroupByNUMA, map[string]string{gpuID(0): h100 + " NUMA 0", gpuID(1): h100 + " NUMA 1"}},
		{GroupByNVLink, map[string]string{gpuID(0): h100 + " NVLink 0000:10:00.0", gpuID(1): h100 + " NVLink 0000:10:00.0"}},
	} {
		if diff := cmp.Diff(step.want, groupByDevice(t, deviceGroups(inv.Driver(), r.groups(inv, step.by)))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.by, diff)
		}
	}
}

// On any machine, under any policy, whatever comes and goes: each unit is in one group, no group has units of two
// pools or two ways of use, and a unit whose kind is known never moves.
func TestGroupsOnAnyMachine(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	ways := []*core.Sharing{nil, timeSlicing(2), timeSlicing(3), mps(2)}
	names := []string{"", "gpu", "gpu.shared", "gpu.mps", "fast", "A"}
	for range 200 {
		given := assignment{by: []GroupBy{GroupByNone, GroupByNUMA, GroupByNVLink}[random.IntN(3)]}
		type held struct {
			id         core.UnitID
			use, pool  string
			model      string
			memory     uint64
			capability core.Compute
		}
		booked := map[held]string{}
		for range 15 {
			s := onlyGPUs(coretest.GPUs(6), random.Perm(6)[:1+random.IntN(5)]...)
			s.Links = slices.DeleteFunc(slices.Clone(s.Links), func(core.Link) bool { return random.IntN(4) > 0 })
			for i := range s.Devices {
				d := &s.Devices[i]
				d.Model = []string{"A", "B"}[random.IntN(2)]
				d.Memory = []uint64{0, 40 << 30, 80 << 30}[random.IntN(3)]
			}
			var p core.Policy
			for range random.IntN(3) {
				p.Rules = append(p.Rules, core.Rule{Select: selectGPUs(random.IntN(6), random.IntN(6)), Pool: names[random.IntN(6)], Sharing: ways[random.IntN(4)]})
			}
			inv := inventoryUnder(p, s)
			given = given.with(inv)
			of, pools := map[string]string{}, map[string]string{}
			for _, g := range groups(inv, given) {
				if err := g.Validate(); err != nil {
					t.Error(err)
				}
				name := g.Type + "/" + g.Name
				for _, d := range g.Devices {
					u, _ := inv.Unit(core.UnitID(d.ID))
					if of[d.ID] != "" {
						t.Errorf("%s is in %s and in %s", d.ID, of[d.ID], name)
					}
					of[d.ID] = name
					if was, ok := pools[name]; ok && was != u.Pool {
						t.Errorf("%s has units of %s and of %s", name, was, u.Pool)
					}
					pools[name] = u.Pool
					k := held{u.ID, u.Sharing.Mode.String(), u.Pool, u.Device.Model, u.Device.Memory, u.Device.Compute}
					if k.memory == 0 {
						continue
					}
					if was, ok := booked[k]; ok && was != name {
						t.Errorf("%v was in %s and is in %s", k, was, name)
					}
					booked[k] = name
				}
			}
			if len(of) != inv.Len() {
				t.Errorf("%d of %d units are in a group", len(of), inv.Len())
			}
		}
		if t.Failed() {
			t.Log(slices.Sorted(maps.Values(given.names)))
			return
		}
	}
}
