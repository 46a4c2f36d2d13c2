package nomadadapter

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The groups of three GPUs in a new plugin, with the number of devices.
func TestGroupNames(t *testing.T) {
	none := inventory.Policy{}
	for name, tc := range map[string]struct {
		policy inventory.Policy
		change func(d []gpu.Device)
		want   map[string]int
	}{
		"alike":               {none, func([]gpu.Device) {}, map[string]int{"gpu/" + h100: 3}},
		"less than a MiB":     {none, func(d []gpu.Device) { d[1].Memory += 4096 }, map[string]int{"gpu/" + h100: 3}},
		"more memory":         {none, func(d []gpu.Device) { d[1].Memory = 97871 << 20 }, map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (97871 MiB)": 1}},
		"more in the first":   {none, func(d []gpu.Device) { d[0].Memory = 97871 << 20 }, map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (97871 MiB)": 1}},
		"less memory":         {none, func(d []gpu.Device) { d[2].Memory = 40 << 30 }, map[string]int{"gpu/" + h100: 1, "gpu/" + h100 + " (81559 MiB)": 2}},
		"memory unknown":      {none, func(d []gpu.Device) { d[0].Memory = 0 }, map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (memory unknown)": 1}},
		"all memory unknown":  {none, func(d []gpu.Device) { d[0].Memory, d[1].Memory, d[2].Memory = 0, 0, 0 }, map[string]int{"gpu/" + h100: 3}},
		"compute":             {none, func(d []gpu.Device) { d[2].Compute.Minor = 1 }, map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (compute 9.1)": 1}},
		"compute unknown":     {none, func(d []gpu.Device) { d[2].Compute = gpu.Compute{} }, map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (compute unknown)": 1}},
		"both":                {none, func(d []gpu.Device) { d[2].Compute.Minor, d[2].Memory = 1, 1<<40 }, map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (1048576 MiB, compute 9.1)": 1}},
		"models":              {none, func(d []gpu.Device) { d[1].Model = "NVIDIA A2" }, map[string]int{"gpu/" + h100: 2, "gpu/NVIDIA A2": 1}},
		"nothing known twice": {none, func(d []gpu.Device) { d[0].Memory, d[1].Memory, d[1].Compute = 0, 0, gpu.Compute{} }, map[string]int{"gpu/" + h100: 1, "gpu/" + h100 + " (memory unknown)": 1, "gpu/" + h100 + " (memory unknown, compute unknown)": 1}},

		"default pools have the model's name": {
			rules(inventory.Rule{Select: selectGPUs(0), Pool: "gpu"}, inventory.Rule{Select: selectGPUs(1), Pool: "gpu.shared", Sharing: timeSlicing(2)}, inventory.Rule{Select: selectGPUs(2), Pool: "gpu.mps", Sharing: byMPS(3)}), nil,
			map[string]int{"gpu/" + h100: 1, "gpu-shared/" + h100: 2, "gpu-mps/" + h100: 3},
		},
		"two default pools with time-slicing": {
			rules(inventory.Rule{Select: selectGPUs(0), Pool: "gpu", Sharing: timeSlicing(2)}, inventory.Rule{Select: selectGPUs(1, 2), Pool: "gpu.shared", Sharing: timeSlicing(3)}), nil,
			map[string]int{"gpu-shared/" + h100: 2, "gpu-shared/" + h100 + " (gpu.shared)": 6},
		},
		"two exclusive default pools": {
			rules(inventory.Rule{Select: selectGPUs(0), Pool: "gpu.mps"}), nil,
			map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (gpu.mps)": 1},
		},
		"two exclusive default pools and other memory": {
			rules(inventory.Rule{Select: selectGPUs(1), Pool: "gpu.mps"}), func(d []gpu.Device) { d[1].Memory = 97871 << 20 },
			map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (gpu.mps, 97871 MiB)": 1},
		},
		"a pool name for different models": {
			inventory.Policy{Names: []inventory.Naming{{Pool: "fast"}}}, func(d []gpu.Device) { d[1].Model, d[1].Memory = "NVIDIA L4", 0 },
			map[string]int{"gpu/fast": 3},
		},
		"a pool name with time-slicing": {
			rules(inventory.Rule{Select: selectGPUs(0, 1), Pool: "fast", Sharing: timeSlicing(4)}, inventory.Rule{Pool: "whole"}), func(d []gpu.Device) { d[1].Memory = 97871 << 20 },
			map[string]int{"gpu-shared/fast": 8, "gpu/whole": 1},
		},
		"one pool name, shared and exclusive": {
			rules(inventory.Rule{Select: selectGPUs(0), Pool: "fast", Sharing: timeSlicing(4)}, inventory.Rule{Pool: "fast"}), nil,
			map[string]int{"gpu-shared/fast": 4, "gpu/fast": 2},
		},
		"a pool name equal to a model": {
			rules(inventory.Rule{Select: selectGPUs(0), Pool: "L4"}), func(d []gpu.Device) { d[1].Model = "L4" },
			map[string]int{"gpu/L4": 1, "gpu/L4 (gpu, 81559 MiB, compute 9.0)": 1, "gpu/" + h100: 1},
		},
	} {
		s := coretest.GPUs(3)
		if tc.change != nil {
			tc.change(s.Devices)
		}
		checkEqual(t, name, tc.want, groupSizes(firstGroups(inventoryUnder(tc.policy, s))))
	}
}

// Names do not depend on the indices of GPUs, so they are the same after a restart.
func TestNamesDoNotDependOnTheOrder(t *testing.T) {
	s := withDevice(coretest.GPUs(4), 1, memory(97871))
	s = withDevice(withDevice(s, 2, memory(97871)), 3, memory(0))
	want := groupByDevice(t, firstGroups(nodeInventory(gpu.NewSnapshot(s))))
	for range 50 {
		order := rand.Perm(4)
		other := s
		other.Devices = slices.Clone(s.Devices)
		for i := range other.Devices {
			other.Devices[i].Index = order[i]
		}
		if diff := cmp.Diff(want, groupByDevice(t, firstGroups(nodeInventory(gpu.NewSnapshot(other))))); diff != "" {
			t.Fatalf("in order %v (-want +got):\n%s", order, diff)
		}
	}
}

// A GPU that is added or removed does not change the names of other groups.
func TestNamesStay(t *testing.T) {
	two, three := coretest.GPUs(2), coretest.GPUs(3)
	const large, unknown, small = " (97871 MiB)", " (memory unknown)", " (40960 MiB)"
	mixed := withDevice(two, 0, memory(97871))
	second := withDevice(two, 1, memory(97871))
	for name, steps := range map[string][]step{
		"the GPU with the model's name is removed and returns": {
			{snapshot: second, want: inGroups("", large)},
			{snapshot: onlyGPUs(second, 1), want: inGroups(absent, large)},
			{snapshot: second, want: inGroups("", large)},
		},
		"a smaller GPU is added at a lower index": {
			{snapshot: onlyGPUs(three, 1, 2), want: inGroups(absent, "", "")},
			{snapshot: withDevice(three, 0, memory(40960)), want: inGroups(small, "", "")},
			{snapshot: onlyGPUs(withDevice(three, 0, memory(40960)), 0), want: inGroups(small)},
		},
		"memory that is reported later": {
			{snapshot: withDevice(withDevice(two, 0, memory(0)), 1, memory(0)), want: inGroups("", "")},
			{snapshot: withDevice(two, 1, memory(0)), want: inGroups("", unknown)},
			{snapshot: two, want: inGroups("", "")},
			{snapshot: withDevice(two, 0, memory(0)), want: inGroups(unknown, "")},
		},
		"the memory of a GPU changes (ECC is disabled)": {
			{snapshot: two, want: inGroups("", "")},
			{snapshot: mixed, want: inGroups(large, "")},
			{snapshot: withDevice(mixed, 1, memory(97871)), want: inGroups(large, large)},
		},
		"MIG mode is enabled and disabled": {
			{snapshot: two, want: inGroups("", "")},
			{snapshot: migSnapshot(), want: withInstances(inGroups(absent, ""), "")},
			{snapshot: two, want: inGroups("", "")},
		},
		"the driver is unloaded": {
			{snapshot: mixed, want: inGroups(large, "")},
			{snapshot: gpu.NoDriver(gpu.DriverAbsent, "unloaded"), want: inGroups()},
			{snapshot: onlyGPUs(mixed, 0), want: inGroups(large)},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, config.GroupByNone, steps) })
	}
}

// A changed policy does not change the names of groups that it does not concern.
func TestNamesStayUnderAnotherPolicy(t *testing.T) {
	var given assignment
	s := withDevice(coretest.GPUs(4), 0, memory(97871))
	for i, step := range []struct {
		policy inventory.Policy
		want   map[string]int
	}{
		{inventory.Policy{}, map[string]int{"gpu/" + h100: 3, "gpu/" + h100 + " (97871 MiB)": 1}},
		{rules(inventory.Rule{Select: selectGPUs(1, 2), Sharing: timeSlicing(2)}), map[string]int{"gpu/" + h100: 1, "gpu/" + h100 + " (97871 MiB)": 1, "gpu-shared/" + h100: 4}},
		{rules(inventory.Rule{Select: selectGPUs(1, 2, 3), Pool: "mine"}), map[string]int{"gpu/mine": 3, "gpu/" + h100 + " (97871 MiB)": 1}},
		{rules(inventory.Rule{Sharing: timeSlicing(2)}), map[string]int{"gpu-shared/" + h100: 6, "gpu-shared/" + h100 + " (97871 MiB)": 2}},
		{inventory.Policy{}, map[string]int{"gpu/" + h100: 3, "gpu/" + h100 + " (97871 MiB)": 1}},
	} {
		inv := inventoryUnder(step.policy, s)
		given = given.with(inv)
		checkEqual(t, fmt.Sprintf("step %d", i), step.want, groupSizes(groups(inv, given)))
	}
}

// The first group keeps the model's name in the next process and after a boot.
func TestModelNameStaysOverARestart(t *testing.T) {
	large := withDevice(withDevice(coretest.GPUs(2), 0, memory(97871)), 1, memory(97871))
	both := withDevice(withDevice(coretest.GPUs(3), 0, memory(97871)), 1, memory(97871))
	const smaller = " (81559 MiB)"
	for name, began := range map[string]int{"restart": pluginRestart, "boot": hostBoot} {
		t.Run(name, func(t *testing.T) {
			runSteps(t, config.GroupByNone, []step{
				{noRestart, large, nil, inGroups("", "")},
				{noRestart, both, nil, inGroups("", "", smaller)},
				{began, both, nil, inGroups("", "", smaller)},
				{began, onlyGPUs(both, 1, 2), nil, inGroups(absent, "", smaller)},  // without the lowest index
				{began, onlyGPUs(both, 2), nil, inGroups(absent, absent, smaller)}, // and the next
				{began, both, nil, inGroups("", "", smaller)},
			})
		})
	}
}

// Another driver version can report another size of the same memory: jobs still find the model's name.
func TestModelNameAfterADriverUpdate(t *testing.T) {
	two := coretest.GPUs(2)
	other := withDevice(withDevice(two, 0, memory(81251)), 1, memory(81251))
	const smaller = " (81251 MiB)"
	runSteps(t, config.GroupByNone, []step{
		{noRestart, two, nil, inGroups("", "")},
		{pluginRestart, other, nil, inGroups("", "")},
		{pluginRestart, two, nil, inGroups("", "")},
		{noRestart, withDevice(two, 1, memory(81251)), nil, inGroups("", smaller)},
		{pluginRestart, other, nil, inGroups(smaller, smaller)}, // keeps the name that it has
		{pluginRestart, withDevice(other, 0, memory(0)), nil, inGroups(" (memory unknown)", smaller)},
		{pluginRestart, two, nil, inGroups("", "")},
	})
}

// Concurrent callers get the same names.
func TestGroupNamerIsShared(t *testing.T) {
	var n groupNamer
	results := make(chan []group)
	for i := range 8 {
		go func() {
			results <- n.groups(nodeInventory(withDevice(coretest.GPUs(2), 0, memory(uint64(10000+i)))), config.GroupByNone)
		}()
	}
	names := groupNames{}
	for range 8 {
		for _, g := range <-results {
			if names[g.key] != "" && names[g.key] != g.name {
				t.Errorf("%+v is %q and %q", g.key, names[g.key], g.name)
			}
			names[g.key] = g.name
		}
	}
	if len(names) != 9 {
		t.Errorf("%d keys have names, want 9: %v", len(names), names)
	}
}
