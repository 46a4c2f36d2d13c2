package nomadadapter

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// afterRestart returns the assignment of a process that starts in boot to after one with assignment n in boot from.
func afterRestart(t *testing.T, n assignment, from, to string) assignment {
	t.Helper()
	text, err := encodeGroups(n, from)
	check.NoError(t, err)
	saved, boot, err := decodeGroups(text, to)
	if err != nil || boot != from {
		t.Fatalf("boot %q, %v:\n%s", boot, err, text)
	}
	next := assignment{by: n.by}.merge(saved)
	if from == to {
		if again, _ := encodeGroups(next, to); string(again) != string(text) {
			t.Fatalf("a restart changes the file:\n%s", cmp.Diff(string(text), string(again)))
		}
	}
	return next
}

// What happened before a step.
const (
	noRestart = iota
	pluginRestart
	hostBoot
)

// step is an inventory and the expected group of each device.
type step struct {
	restart  int
	snapshot gpu.Snapshot
	obs      []health.Observation
	want     map[string]string
}

// runSteps checks the groups of one node over time.
func runSteps(t *testing.T, by config.GroupBy, steps []step) {
	t.Helper()
	boots, given := 0, assignment{by: by}
	for i, s := range steps {
		before := fmt.Sprint("boot ", boots)
		if s.restart == hostBoot {
			boots++
		}
		if s.restart != noRestart {
			given = afterRestart(t, given, before, fmt.Sprint("boot ", boots))
		}
		inv := nodeInventory(s.snapshot, s.obs...)
		given = given.with(inv)
		checkEqual(t, fmt.Sprintf("step %d", i), s.want, groupByDevice(t, groups(inv, given)))
	}
}

// absent marks a GPU that is in no group.
const absent = "absent"

// inGroups returns the groups of the first GPUs by the ends of their names after the model's.
func inGroups(ends ...string) map[string]string {
	of := map[string]string{}
	for i, end := range ends {
		if end != absent {
			of[gpuID(i)] = h100 + end
		}
	}
	return of
}

// absentGPU is absent among islands.
const absentGPU = -2

// inIslands is inGroups by the numbers of NVLink islands; -1 = none.
func inIslands(islands ...int) map[string]string {
	of := map[string]string{}
	for i, n := range islands {
		switch n {
		case absentGPU:
		case -1:
			of[gpuID(i)] = h100
		default:
			of[gpuID(i)] = islandName(n)
		}
	}
	return of
}

func islandName(n int) string { return fmt.Sprintf("%s NVLink 0000:1%d:00.0", h100, n) }

// withInstances adds the groups of the instances of migSnapshot by the end of their names.
func withInstances(of map[string]string, end string) map[string]string {
	for i, profile := range []string{"1g.10gb", "1g.10gb", "3g.40gb"} {
		of[fmt.Sprint("MIG-", i)] = h100 + " MIG " + profile + end
	}
	return of
}

// A GPU stays in the island in which it was first found, also after a restart of the plugin, whatever its links are; a GPU
// that is added joins the island of the GPUs it is linked with. After a boot no task runs any more: present links move a
// GPU, missing links do not.
func TestIslands(t *testing.T) {
	two := linked(4, [2]int{0, 1}, [2]int{2, 3})
	one := linked(4, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3})
	without := linked(4, [2]int{0, 1})
	boots := func(n int, s gpu.Snapshot, want map[string]string) []step {
		return slices.Repeat([]step{{hostBoot, s, nil, want}}, n)
	}
	noPCI := func(d *gpu.Device) { d.PCI = "" }
	for name, steps := range map[string][]step{
		"links are lost and return": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{noRestart, without, nil, inIslands(0, 0, 2, 2)},
			{noRestart, linked(4), nil, inIslands(0, 0, 2, 2)},
			{noRestart, linked(4, [2]int{1, 2}), nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, without, nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, linked(4), nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, two, nil, inIslands(0, 0, 2, 2)},
		},
		"a link was lost in the middle of an island": {
			{noRestart, one, nil, inIslands(0, 0, 0, 0)},
			{pluginRestart, two, nil, inIslands(0, 0, 0, 0)},
		},
		"a link was added": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, one, nil, inIslands(0, 0, 2, 2)},
		},
		"links that appear after the GPU accepted work": {
			{noRestart, linked(2), nil, inIslands(-1, -1)},
			{noRestart, linked(2, [2]int{0, 1}), nil, inIslands(-1, -1)},
			{pluginRestart, linked(2, [2]int{0, 1}), nil, inIslands(-1, -1)},
		},
		"links that appear before the GPU accepted work": {
			{noRestart, linked(2), []health.Observation{lost(0), lost(1)}, inIslands(-1, -1)},
			{noRestart, linked(2, [2]int{0, 1}), nil, inIslands(0, 0)},
		},
		"a driver that is ready later": {
			{noRestart, gpu.Snapshot{Driver: gpu.Driver{State: gpu.DriverFailed}, Devices: coretest.GPUs(2).Devices}, nil, inIslands(-1, -1)},
			{noRestart, linked(2, [2]int{0, 1}), nil, inIslands(0, 0)},
		},
		"a GPU is removed and returns": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{noRestart, onlyGPUs(linked(4, [2]int{2, 3}), 1, 2, 3), nil, inIslands(absentGPU, 0, 2, 2)},
			{pluginRestart, onlyGPUs(two, 1), nil, inIslands(absentGPU, 0)},
			{noRestart, linked(4, [2]int{2, 3}), []health.Observation{lost(0)}, inIslands(0, 0, 2, 2)},
			{pluginRestart, two, nil, inIslands(0, 0, 2, 2)},
		},
		"a GPU is added at a lower PCI address": {
			{noRestart, onlyGPUs(linked(4, [2]int{1, 2}), 1, 2), nil, inIslands(absentGPU, 1, 1)},
			{noRestart, linked(4, [2]int{0, 1}, [2]int{1, 2}), nil, inIslands(1, 1, 1, -1)},
		},
		"a GPU was added": {
			{noRestart, onlyGPUs(two, 0, 1), nil, inIslands(0, 0)},
			{pluginRestart, linked(3, [2]int{1, 2}), nil, inIslands(0, 0, 0)},
		},
		"another GPU at the PCI address in an island's name": {
			{noRestart, onlyGPUs(without, 0, 1), nil, inIslands(0, 0)},
			{noRestart, withDevice(onlyGPUs(linked(4, [2]int{2, 3}), 1, 2, 3), 1, func(d *gpu.Device) { d.PCI = "0000:10:00.0" }), nil, inIslands(absentGPU, 0, 3, 3)},
		},
		"no PCI addresses": {
			{noRestart, withDevice(withDevice(linked(2, [2]int{0, 1}), 0, noPCI), 1, noPCI), nil, inGroups(" NVLink "+gpuID(0), " NVLink "+gpuID(0))},
		},
		"a GPU in MIG mode has no links": {
			{noRestart, migSnapshot(), nil, withInstances(inIslands(absentGPU, 1), "")},
		},

		"a boot: nothing changed": {{noRestart, two, nil, inIslands(0, 0, 2, 2)}, {hostBoot, two, nil, inIslands(0, 0, 2, 2)}},
		"a boot: a link is missing": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, without, nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, without, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, two, nil, inIslands(0, 0, 2, 2)},
		},
		"a boot: links appear after the first snapshot": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, linked(4), nil, inIslands(0, 0, 2, 2)},
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
		},
		"a boot: an NVLink bridge was added": {
			{noRestart, without, nil, inIslands(0, 0, -1, -1)},
			{pluginRestart, two, nil, inIslands(0, 0, -1, -1)},
			{hostBoot, two, nil, inIslands(0, 0, 2, 2)},
		},
		"a boot: two islands became one": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, one, nil, inIslands(0, 0, 0, 0)},
		},
		"a boot: a GPU was moved to another island": {
			{noRestart, linked(5, [2]int{0, 1}, [2]int{2, 3}, [2]int{3, 4}), nil, inIslands(0, 0, 2, 2, 2)},
			{hostBoot, linked(5, [2]int{0, 2}, [2]int{2, 3}, [2]int{3, 4}), nil, inIslands(2, 0, 2, 2, 2)},
		},
		"a boot: an island keeps its name without its first GPU": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, onlyGPUs(linked(4, [2]int{1, 2}, [2]int{2, 3}), 1, 2, 3), nil, inIslands(absentGPU, 2, 2, 2)},
		},
		"a boot: MIG mode was enabled": {
			{noRestart, linked(2, [2]int{0, 1}), nil, inIslands(0, 0)},
			{hostBoot, migSnapshot(), nil, withInstances(inIslands(absentGPU, 0), "")},
		},
		"boots: an NVLink bridge was removed permanently": slices.Concat(
			[]step{{noRestart, two, nil, inIslands(0, 0, 2, 2)}},
			boots(unusedBoots, without, inIslands(0, 0, 2, 2)),
			boots(1, without, inIslands(0, 0, -1, -1)),
		),
		"boots: an island was split permanently": slices.Concat(
			[]step{{noRestart, linked(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3}, [2]int{3, 4}), nil, inIslands(0, 0, 0, 0, 0)}},
			boots(unusedBoots, linked(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{3, 4}), inIslands(0, 0, 0, 0, 0)),
			boots(1, linked(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{3, 4}), inIslands(0, 0, 0, 3, 3)),
		),
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, config.GroupByNVLink, steps) })
	}
}

func TestNUMANodes(t *testing.T) {
	on := func(s gpu.Snapshot, n, node int) gpu.Snapshot {
		return withDevice(s, n, func(d *gpu.Device) { d.NUMANode = node })
	}
	s := coretest.GPUs(4)
	first, all := inGroups(" NUMA 0", "", " NUMA 1", " NUMA 1"), inGroups(" NUMA 0", " NUMA 0", " NUMA 1", " NUMA 1")
	for name, steps := range map[string][]step{
		"unknown at first": {
			{noRestart, on(s, 1, -1), nil, first},
			{noRestart, s, nil, first},
			{noRestart, on(on(s, 1, -1), 3, 0), nil, first},
		},
		"restarts": {
			{noRestart, s, nil, all},
			{pluginRestart, on(s, 3, 0), nil, all},
			{pluginRestart, on(s, 3, -1), nil, all},
			{hostBoot, on(s, 3, -1), nil, all},
			{hostBoot, on(s, 3, 0), nil, inGroups(" NUMA 0", " NUMA 0", " NUMA 1", " NUMA 0")},
		},
		"MIG": {{noRestart, migSnapshot(), nil, withInstances(inGroups(absent, " NUMA 1"), " NUMA 0")}},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, config.GroupByNUMA, steps) })
	}
	pool := inventoryUnder(rules(inventory.Rule{Pool: "small"}), onlyGPUs(migSnapshot(), 0))
	want := map[string]string{"MIG-0": "small NUMA 0", "MIG-1": "small NUMA 0", "MIG-2": "small NUMA 0"}
	checkEqual(t, "a pool with a name", want, groupByDevice(t, groups(pool, assignment{by: config.GroupByNUMA})))
}

// The groups of one value of group_by do not depend on those of another.
func TestGroupByChanges(t *testing.T) {
	inv := nodeInventory(linked(2, [2]int{0, 1}))
	var r groupNamer
	for _, step := range []struct {
		by   config.GroupBy
		want map[string]string
	}{
		{config.GroupByNVLink, inIslands(0, 0)},
		{config.GroupByNone, inGroups("", "")},
		{config.GroupByNUMA, inGroups(" NUMA 0", " NUMA 1")},
		{config.GroupByNVLink, inIslands(0, 0)},
	} {
		checkEqual(t, fmt.Sprint(step.by), step.want, groupByDevice(t, deviceGroups(inv, r.groups(inv, step.by))))
	}
}
