package nomadadapter

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// linked returns n GPUs with NVLinks between these pairs only.
func linked(n int, pairs ...[2]int) gpu.Snapshot {
	s := coretest.GPUs(n)
	s.Links = nil
	for _, p := range pairs {
		s.Links = append(s.Links, gpu.Link{A: coretest.GPU(p[0]), B: coretest.GPU(p[1]), NVLinks: 4})
	}
	return gpu.NewSnapshot(s)
}

// onlyGPUs returns s with these GPUs only.
func onlyGPUs(s gpu.Snapshot, n ...int) gpu.Snapshot {
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d gpu.Device) bool {
		return !slices.ContainsFunc(n, func(i int) bool { return coretest.GPU(i) == d.At.GPU })
	})
	return s
}

// A GPU stays in the island in which it was first found; a GPU that is added joins the island of the GPUs it is linked with.
func TestIslandsStay(t *testing.T) {
	pairs := [][2]int{{0, 1}, {2, 3}}
	const a, b = h100 + " NVLink 0000:10:00.0", h100 + " NVLink 0000:12:00.0"
	cut := migSnapshot() // GPU 0 in MIG mode
	four := map[string]string{gpuID(0): a, gpuID(1): a, gpuID(2): b, gpuID(3): b}
	for name, steps := range map[string][]step{
		"links are lost and return": {
			{noRestart, linked(4, pairs...), nil, four},
			{noRestart, linked(4), nil, four},
			{noRestart, linked(4, [2]int{1, 2}), nil, four},
			{noRestart, linked(4, pairs...), nil, four},
		},
		"a GPU is removed and returns": {
			{noRestart, linked(4, pairs...), nil, four},
			{noRestart, onlyGPUs(linked(4, pairs[1]), 1, 2, 3), nil, map[string]string{gpuID(1): a, gpuID(2): b, gpuID(3): b}},
			{noRestart, linked(4, pairs[1]), []health.Observation{lost(0)}, four},
		},
		"a GPU is added, also at a lower PCI address": {
			{noRestart, onlyGPUs(linked(4, [2]int{1, 2}), 1, 2), nil, map[string]string{gpuID(1): h100 + " NVLink 0000:11:00.0", gpuID(2): h100 + " NVLink 0000:11:00.0"}},
			{noRestart, linked(4, [2]int{0, 1}, [2]int{1, 2}), nil, map[string]string{gpuID(0): h100 + " NVLink 0000:11:00.0", gpuID(1): h100 + " NVLink 0000:11:00.0", gpuID(2): h100 + " NVLink 0000:11:00.0", gpuID(3): h100}},
		},
		"links that appear after the GPU accepted work": {
			{noRestart, linked(2), nil, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{noRestart, linked(2, [2]int{0, 1}), nil, map[string]string{gpuID(0): h100, gpuID(1): h100}},
		},
		"links that appear before the GPU accepted work": {
			{noRestart, linked(2), []health.Observation{lost(0), lost(1)}, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{noRestart, linked(2, [2]int{0, 1}), nil, map[string]string{gpuID(0): a, gpuID(1): a}},
		},
		"a driver that is ready later": {
			{noRestart, gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverFailed}, Devices: coretest.GPUs(2).Devices}, nil, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{noRestart, linked(2, [2]int{0, 1}), nil, map[string]string{gpuID(0): a, gpuID(1): a}},
		},
		"another GPU at the PCI address in an island's name": {
			{noRestart, onlyGPUs(linked(4, [2]int{0, 1}), 0, 1), nil, map[string]string{gpuID(0): a, gpuID(1): a}},
			{noRestart, withDevice(onlyGPUs(linked(4, [2]int{2, 3}), 1, 2, 3), 1, func(d *gpu.Device) { d.PCI = "0000:10:00.0" }), nil,
				map[string]string{gpuID(1): a, gpuID(2): h100 + " NVLink 0000:13:00.0", gpuID(3): h100 + " NVLink 0000:13:00.0"}},
		},
		"no PCI addresses": {
			{noRestart, withDevice(withDevice(linked(2, [2]int{0, 1}), 0, func(d *gpu.Device) { d.PCI = "" }), 1, func(d *gpu.Device) { d.PCI = "" }), nil,
				map[string]string{gpuID(0): h100 + " NVLink " + gpuID(0), gpuID(1): h100 + " NVLink " + gpuID(0)}},
		},
		"a GPU in MIG mode has no links": {
			{noRestart, cut, nil, map[string]string{gpuID(1): h100 + " NVLink 0000:11:00.0", "MIG-0": h100 + " MIG 1g.10gb", "MIG-1": h100 + " MIG 1g.10gb", "MIG-2": h100 + " MIG 3g.40gb"}},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, config.GroupByNVLink, steps) })
	}
}

func TestNUMANodes(t *testing.T) {
	s := withDevice(coretest.GPUs(4), 1, func(d *gpu.Device) { d.NUMANode = -1 })
	want := map[string]string{gpuID(0): h100 + " NUMA 0", gpuID(1): h100, gpuID(2): h100 + " NUMA 1", gpuID(3): h100 + " NUMA 1"}
	runSteps(t, config.GroupByNUMA, []step{
		{snapshot: s, want: want},
		{snapshot: coretest.GPUs(4), want: want},
		{snapshot: withDevice(s, 3, func(d *gpu.Device) { d.NUMANode = 0 }), want: want},
	})
	cut := inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Select: inventory.Selector{Profiles: []string{"1g*"}}, Pool: "small"}}}, migSnapshot())
	want = map[string]string{gpuID(1): h100 + " NUMA 1", "MIG-0": "small NUMA 0", "MIG-1": "small NUMA 0", "MIG-2": h100 + " MIG 3g.40gb NUMA 0"}
	if diff := cmp.Diff(want, groupByDevice(t, groups(cut, assignment{by: config.GroupByNUMA}))); diff != "" {
		t.Errorf("MIG (-want +got):\n%s", diff)
	}
}

// The groups of one value of group_by do not depend on those of another.
func TestGroupByChanges(t *testing.T) {
	inv := nodeInventory(linked(2, [2]int{0, 1}))
	var r groupNamer
	for _, step := range []struct {
		by   config.GroupBy
		want map[string]string
	}{
		{config.GroupByNVLink, map[string]string{gpuID(0): h100 + " NVLink 0000:10:00.0", gpuID(1): h100 + " NVLink 0000:10:00.0"}},
		{config.GroupByNone, map[string]string{gpuID(0): h100, gpuID(1): h100}},
		{config.GroupByNUMA, map[string]string{gpuID(0): h100 + " NUMA 0", gpuID(1): h100 + " NUMA 1"}},
		{config.GroupByNVLink, map[string]string{gpuID(0): h100 + " NVLink 0000:10:00.0", gpuID(1): h100 + " NVLink 0000:10:00.0"}},
	} {
		if diff := cmp.Diff(step.want, groupByDevice(t, deviceGroups(inv.Driver(), r.groups(inv, step.by)))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.by, diff)
		}
	}
}
