package nomadadapter

import (
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

const h100 = "NVIDIA H100 80GB HBM3"

// groupByDevice returns the group of each device. A device must not be in two groups: it could be allocated twice.
func groupByDevice(t *testing.T, gs []*device.DeviceGroup) map[string]string {
	t.Helper()
	of := map[string]string{}
	seen := map[string]bool{}
	for _, g := range gs {
		if seen[g.Name] {
			t.Errorf("two groups are named %q", g.Name)
		}
		seen[g.Name] = true
		for _, d := range g.Devices {
			if of[d.ID] != "" {
				t.Errorf("%s is in %q and in %q", d.ID, of[d.ID], g.Name)
			}
			of[d.ID] = g.Name
		}
	}
	return of
}

// withDevice returns s with its n-th device changed.
func withDevice(s gpu.Snapshot, n int, change func(*gpu.Device)) gpu.Snapshot {
	s.Devices = slices.Clone(s.Devices)
	change(&s.Devices[n])
	return s
}

func memory(mib uint64) func(*gpu.Device) { return func(d *gpu.Device) { d.Memory = mib << 20 } }

func TestGroupSplit(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(d []gpu.Device)
		want   []string
	}{
		"alike":               {func([]gpu.Device) {}, []string{h100}},
		"less than a MiB":     {func(d []gpu.Device) { d[1].Memory += 4096 }, []string{h100}},
		"more memory":         {func(d []gpu.Device) { d[1].Memory = 97871 << 20 }, []string{h100, h100 + " (97871 MiB)"}},
		"more in the first":   {func(d []gpu.Device) { d[0].Memory = 97871 << 20 }, []string{h100 + " (97871 MiB)", h100}},
		"less memory":         {func(d []gpu.Device) { d[2].Memory = 40 << 30 }, []string{h100 + " (81559 MiB)", h100}},
		"memory unknown":      {func(d []gpu.Device) { d[0].Memory = 0 }, []string{h100 + " (memory unknown)", h100}},
		"all memory unknown":  {func(d []gpu.Device) { d[0].Memory, d[1].Memory, d[2].Memory, d[3].Memory = 0, 0, 0, 0 }, []string{h100}},
		"compute":             {func(d []gpu.Device) { d[2].Compute.Minor = 1 }, []string{h100, h100 + " (compute 9.1)"}},
		"compute unknown":     {func(d []gpu.Device) { d[2].Compute = gpu.Compute{} }, []string{h100, h100 + " (compute unknown)"}},
		"both":                {func(d []gpu.Device) { d[2].Compute.Minor, d[2].Memory = 1, 1<<40 }, []string{h100, h100 + " (1048576 MiB, compute 9.1)"}},
		"models":              {func(d []gpu.Device) { d[1].Model = "NVIDIA A2" }, []string{h100, "NVIDIA A2"}},
		"nothing known twice": {func(d []gpu.Device) { d[0].Memory, d[1].Memory, d[1].Compute = 0, 0, gpu.Compute{} }, []string{h100 + " (memory unknown)", h100 + " (memory unknown, compute unknown)", h100}},
	} {
		s := coretest.GPUs(4)
		tc.change(s.Devices)
		gs := firstGroups(nodeInventory(s))
		var got []string
		for _, g := range gs {
			got = append(got, g.Name)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if n := len(groupByDevice(t, gs)); n != 4 {
			t.Errorf("%s: %d devices, want 4", name, n)
		}
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
	large := h100 + " (97871 MiB)"
	mixed := withDevice(two, 0, memory(97871))
	for name, steps := range map[string][]step{
		"the GPU with the model's name is removed and returns": {
			{snapshot: withDevice(two, 1, memory(97871)), want: map[string]string{gpuID(0): h100, gpuID(1): large}},
			{snapshot: onlyGPUs(withDevice(two, 1, memory(97871)), 1), want: map[string]string{gpuID(1): large}},
			{snapshot: withDevice(two, 1, memory(97871)), want: map[string]string{gpuID(0): h100, gpuID(1): large}},
		},
		"a smaller GPU is added at a lower index": {
			{snapshot: onlyGPUs(three, 1, 2), want: map[string]string{gpuID(1): h100, gpuID(2): h100}},
			{snapshot: withDevice(three, 0, memory(40960)), want: map[string]string{gpuID(0): h100 + " (40960 MiB)", gpuID(1): h100, gpuID(2): h100}},
			{snapshot: onlyGPUs(withDevice(three, 0, memory(40960)), 0), want: map[string]string{gpuID(0): h100 + " (40960 MiB)"}},
		},
		"memory that is reported later": {
			{snapshot: withDevice(withDevice(two, 0, memory(0)), 1, memory(0)), want: map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{snapshot: withDevice(two, 1, memory(0)), want: map[string]string{gpuID(0): h100, gpuID(1): h100 + " (memory unknown)"}},
			{snapshot: two, want: map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{snapshot: withDevice(two, 0, memory(0)), want: map[string]string{gpuID(0): h100 + " (memory unknown)", gpuID(1): h100}},
		},
		"the memory of a GPU changes (ECC is disabled)": {
			{snapshot: two, want: map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{snapshot: mixed, want: map[string]string{gpuID(0): large, gpuID(1): h100}},
			{snapshot: withDevice(mixed, 1, memory(97871)), want: map[string]string{gpuID(0): large, gpuID(1): large}},
		},
		"MIG mode is enabled and disabled": {
			{snapshot: two, want: map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{snapshot: migSnapshot(), want: map[string]string{gpuID(1): h100, "MIG-0": h100 + " MIG 1g.10gb", "MIG-1": h100 + " MIG 1g.10gb", "MIG-2": h100 + " MIG 3g.40gb"}},
			{snapshot: two, want: map[string]string{gpuID(0): h100, gpuID(1): h100}},
		},
		"the driver is unloaded": {
			{snapshot: mixed, want: map[string]string{gpuID(0): large, gpuID(1): h100}},
			{snapshot: gpu.NoDriver(gpu.DriverAbsent, "unloaded"), want: map[string]string{}},
			{snapshot: onlyGPUs(mixed, 0), want: map[string]string{gpuID(0): large}},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, config.GroupByNone, steps) })
	}
}

// Another configuration starts another source: the streams continue, and the groups have the same names. Statistics have the
// names of fingerprints.
func TestStreamsContinueWithAnotherConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t)
		s.Source.Set(nodeInventory(coretest.GPUs(2)))
		ch := fingerprints(t.Context(), t, s.Plugin)
		<-ch
		s.mustConfigure(t, map[string]any{"fingerprint_period": "5m"})
		synctest.Wait()
		if n := len(s.Started()); n != 2 {
			t.Fatalf("%d sources, want 2", n)
		}
		time.Sleep(time.Minute)
		select {
		case r := <-ch:
			t.Fatalf("sent before the second source has an inventory: %v", r.Devices)
		default:
		}
		s.source(1).Set(nodeInventory(withDevice(coretest.GPUs(3), 0, memory(40960))))
		want := map[string]string{gpuID(0): h100 + " (40960 MiB)", gpuID(1): h100, gpuID(2): h100}
		if diff := cmp.Diff(want, groupByDevice(t, (<-ch).Devices)); diff != "" {
			t.Errorf("fingerprint (-want +got):\n%s", diff)
		}
		got := map[string]string{}
		for _, g := range (<-openStats(t.Context(), t, s.Plugin, time.Second)).Groups {
			for device := range g.InstanceStats {
				got[device] = g.Name
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("statistics (-want +got):\n%s", diff)
		}
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
