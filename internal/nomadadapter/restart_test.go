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
)

// afterRestart returns the assignment of a process that starts in boot to after one with assignment n in boot from.
func afterRestart(t *testing.T, n assignment, from, to string) assignment {
	t.Helper()
	text, err := encodeGroups(n, from)
	if err != nil {
		t.Fatal(err)
	}
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
		if diff := cmp.Diff(s.want, groupByDevice(t, groups(inv, given))); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

func islandName(n int) string { return fmt.Sprintf("%s NVLink 0000:1%d:00.0", h100, n) }

// inIslands returns the groups of the first GPUs by the numbers of their islands; -1 = none.
func inIslands(islands ...int) map[string]string {
	of := map[string]string{}
	for i, n := range islands {
		if of[gpuID(i)] = h100; n >= 0 {
			of[gpuID(i)] = islandName(n)
		}
	}
	return of
}

// A GPU is in the same group after a restart of the plugin, whatever its links are.
func TestIslandsStayOverARestart(t *testing.T) {
	two := linked(4, [2]int{0, 1}, [2]int{2, 3})
	only := func(n int) map[string]string { return map[string]string{gpuID(n): islandName(n - n%2)} }
	for name, steps := range map[string][]step{
		"a link was lost": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{noRestart, linked(4, [2]int{0, 1}), nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, linked(4, [2]int{0, 1}), nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, two, nil, inIslands(0, 0, 2, 2)},
		},
		"all links were lost": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, linked(4), nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, two, nil, inIslands(0, 0, 2, 2)},
		},
		"a link was lost in the middle of an island": {
			{noRestart, linked(4, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3}), nil, inIslands(0, 0, 0, 0)},
			{pluginRestart, two, nil, inIslands(0, 0, 0, 0)},
		},
		"a link was added": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, linked(4, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3}), nil, inIslands(0, 0, 2, 2)},
		},
		"links that appear after the GPU accepted work": {
			{noRestart, linked(2), nil, inIslands(-1, -1)},
			{pluginRestart, linked(2, [2]int{0, 1}), nil, inIslands(-1, -1)},
		},
		"the first GPU of an island was removed": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, onlyGPUs(two, 1), nil, only(1)},
			{pluginRestart, two, nil, inIslands(0, 0, 2, 2)},
		},
		"a GPU was added": {
			{noRestart, onlyGPUs(two, 0, 1), nil, inIslands(0, 0)},
			{pluginRestart, linked(3, [2]int{1, 2}), nil, inIslands(0, 0, 0)},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, config.GroupByNVLink, steps) })
	}
}

// After a boot no task runs any more: present links move a GPU, missing links do not.
func TestIslandsAfterABoot(t *testing.T) {
	two := linked(4, [2]int{0, 1}, [2]int{2, 3})
	one := linked(4, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3})
	gone := func(n int, s gpu.Snapshot, want map[string]string) []step {
		return slices.Repeat([]step{{hostBoot, s, nil, want}}, n)
	}
	for name, steps := range map[string][]step{
		"nothing changed": {{noRestart, two, nil, inIslands(0, 0, 2, 2)}, {hostBoot, two, nil, inIslands(0, 0, 2, 2)}},
		"a link is missing": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, linked(4, [2]int{0, 1}), nil, inIslands(0, 0, 2, 2)},
			{pluginRestart, linked(4, [2]int{0, 1}), nil, inIslands(0, 0, 2, 2)},
			{hostBoot, two, nil, inIslands(0, 0, 2, 2)},
		},
		"links appear after the first snapshot": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, linked(4), nil, inIslands(0, 0, 2, 2)},
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
		},
		"an NVLink bridge was added": {
			{noRestart, linked(4, [2]int{0, 1}), nil, inIslands(0, 0, -1, -1)},
			{pluginRestart, two, nil, inIslands(0, 0, -1, -1)},
			{hostBoot, two, nil, inIslands(0, 0, 2, 2)},
		},
		"two islands became one": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, one, nil, inIslands(0, 0, 0, 0)},
		},
		"a GPU was moved to another island": {
			{noRestart, linked(5, [2]int{0, 1}, [2]int{2, 3}, [2]int{3, 4}), nil, inIslands(0, 0, 2, 2, 2)},
			{hostBoot, linked(5, [2]int{0, 2}, [2]int{2, 3}, [2]int{3, 4}), nil, inIslands(2, 0, 2, 2, 2)},
		},
		"an island keeps its name without its first GPU": {
			{noRestart, two, nil, inIslands(0, 0, 2, 2)},
			{hostBoot, onlyGPUs(linked(4, [2]int{1, 2}, [2]int{2, 3}), 1, 2, 3), nil, map[string]string{gpuID(1): islandName(2), gpuID(2): islandName(2), gpuID(3): islandName(2)}},
		},
		"MIG mode was enabled": {
			{noRestart, linked(2, [2]int{0, 1}), nil, inIslands(0, 0)},
			{hostBoot, migSnapshot(), nil, map[string]string{gpuID(1): islandName(0), "MIG-0": h100 + " MIG 1g.10gb", "MIG-1": h100 + " MIG 1g.10gb", "MIG-2": h100 + " MIG 3g.40gb"}},
		},
		"an NVLink bridge was removed permanently": slices.Concat(
			[]step{{noRestart, two, nil, inIslands(0, 0, 2, 2)}},
			gone(unusedBoots, linked(4, [2]int{0, 1}), inIslands(0, 0, 2, 2)),
			gone(1, linked(4, [2]int{0, 1}), inIslands(0, 0, -1, -1)),
		),
		"an island was split permanently": slices.Concat(
			[]step{{noRestart, linked(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{2, 3}, [2]int{3, 4}), nil, inIslands(0, 0, 0, 0, 0)}},
			gone(unusedBoots, linked(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{3, 4}), inIslands(0, 0, 0, 0, 0)),
			gone(1, linked(5, [2]int{0, 1}, [2]int{1, 2}, [2]int{3, 4}), inIslands(0, 0, 0, 3, 3)),
		),
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, config.GroupByNVLink, steps) })
	}
}

func TestNUMANodesStayOverARestart(t *testing.T) {
	s := coretest.GPUs(4)
	moved := withDevice(s, 3, func(d *gpu.Device) { d.NUMANode = 0 })
	unknown := withDevice(s, 3, func(d *gpu.Device) { d.NUMANode = -1 })
	numa := func(nodes ...int) map[string]string {
		of := map[string]string{}
		for i, n := range nodes {
			of[gpuID(i)] = fmt.Sprintf("%s NUMA %d", h100, n)
		}
		return of
	}
	runSteps(t, config.GroupByNUMA, []step{
		{noRestart, s, nil, numa(0, 0, 1, 1)},
		{pluginRestart, moved, nil, numa(0, 0, 1, 1)},
		{pluginRestart, unknown, nil, numa(0, 0, 1, 1)},
		{hostBoot, unknown, nil, numa(0, 0, 1, 1)},
		{hostBoot, moved, nil, numa(0, 0, 1, 0)},
	})
}

// The first group keeps the model's name in the next process and after a boot.
func TestModelNameStaysOverARestart(t *testing.T) {
	large := withDevice(withDevice(coretest.GPUs(2), 0, memory(97871)), 1, memory(97871))
	both := withDevice(withDevice(coretest.GPUs(3), 0, memory(97871)), 1, memory(97871))
	smaller := h100 + " (81559 MiB)"
	for name, began := range map[string]int{"restart": pluginRestart, "boot": hostBoot} {
		t.Run(name, func(t *testing.T) {
			runSteps(t, config.GroupByNone, []step{
				{noRestart, large, nil, inIslands(-1, -1)},
				{noRestart, both, nil, map[string]string{gpuID(0): h100, gpuID(1): h100, gpuID(2): smaller}},
				{began, both, nil, map[string]string{gpuID(0): h100, gpuID(1): h100, gpuID(2): smaller}},
				{began, onlyGPUs(both, 1, 2), nil, map[string]string{gpuID(1): h100, gpuID(2): smaller}}, // without the lowest index
				{began, onlyGPUs(both, 2), nil, map[string]string{gpuID(2): smaller}},                    // and the next
				{began, both, nil, map[string]string{gpuID(0): h100, gpuID(1): h100, gpuID(2): smaller}},
			})
		})
	}
}

// Another driver version can report another size of the same memory: jobs still find the model's name.
func TestModelNameAfterADriverUpdate(t *testing.T) {
	two := coretest.GPUs(2)
	other := withDevice(withDevice(two, 0, memory(81251)), 1, memory(81251))
	runSteps(t, config.GroupByNone, []step{
		{noRestart, two, nil, inIslands(-1, -1)},
		{pluginRestart, other, nil, inIslands(-1, -1)},
		{pluginRestart, two, nil, inIslands(-1, -1)},
		{noRestart, withDevice(two, 1, memory(81251)), nil, map[string]string{gpuID(0): h100, gpuID(1): h100 + " (81251 MiB)"}},
		{pluginRestart, other, nil, map[string]string{gpuID(0): h100 + " (81251 MiB)", gpuID(1): h100 + " (81251 MiB)"}}, // keeps the name that it has
		{pluginRestart, withDevice(other, 0, memory(0)), nil, map[string]string{gpuID(0): h100 + " (memory unknown)", gpuID(1): h100 + " (81251 MiB)"}},
		{pluginRestart, two, nil, inIslands(-1, -1)},
	})
}
