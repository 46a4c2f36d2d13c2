package nomadadapter

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

const h100 = "NVIDIA H100 80GB HBM3"

// groupByDevice says for each device in which group it is. A device in two groups could be given out twice.
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

// withDevice is the machine with its n-th device changed.
func withDevice(s core.Snapshot, n int, change func(*core.Device)) core.Snapshot {
	s.Devices = slices.Clone(s.Devices)
	change(&s.Devices[n])
	return s
}

func memory(mib uint64) func(*core.Device) { return func(d *core.Device) { d.Memory = mib << 20 } }

func TestGroupSplit(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(d []core.Device)
		want   []string
	}{
		"alike":               {func([]core.Device) {}, []string{h100}},
		"less than a MiB":     {func(d []core.Device) { d[1].Memory += 4096 }, []string{h100}},
		"more memory":         {func(d []core.Device) { d[1].Memory = 97871 << 20 }, []string{h100, h100 + " (97871 MiB)"}},
		"more in the first":   {func(d []core.Device) { d[0].Memory = 97871 << 20 }, []string{h100 + " (97871 MiB)", h100}},
		"less memory":         {func(d []core.Device) { d[2].Memory = 40 << 30 }, []string{h100 + " (81559 MiB)", h100}},
		"memory unknown":      {func(d []core.Device) { d[0].Memory = 0 }, []string{h100 + " (memory unknown)", h100}},
		"all memory unknown":  {func(d []core.Device) { d[0].Memory, d[1].Memory, d[2].Memory, d[3].Memory = 0, 0, 0, 0 }, []string{h100}},
		"compute":             {func(d []core.Device) { d[2].Compute.Minor = 1 }, []string{h100, h100 + " (compute 9.1)"}},
		"compute unknown":     {func(d []core.Device) { d[2].Compute = core.Compute{} }, []string{h100, h100 + " (compute unknown)"}},
		"both":                {func(d []core.Device) { d[2].Compute.Minor, d[2].Memory = 1, 1<<40 }, []string{h100, h100 + " (1048576 MiB, compute 9.1)"}},
		"models":              {func(d []core.Device) { d[1].Model = "NVIDIA A2" }, []string{h100, "NVIDIA A2"}},
		"nothing known twice": {func(d []core.Device) { d[0].Memory, d[1].Memory, d[1].Compute = 0, 0, core.Compute{} }, []string{h100 + " (memory unknown)", h100 + " (memory unknown, compute unknown)", h100}},
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

// A restart finds the same names: they do not depend on which slot a GPU has.
func TestNamesDoNotDependOnTheOrder(t *testing.T) {
	s := withDevice(coretest.GPUs(4), 1, memory(97871))
	s = withDevice(withDevice(s, 2, memory(97871)), 3, memory(0))
	want := groupByDevice(t, firstGroups(nodeInventory(core.NewSnapshot(s))))
	for range 50 {
		order := rand.Perm(4)
		other := s
		other.Devices = slices.Clone(s.Devices)
		for i := range other.Devices {
			other.Devices[i].Index = order[i]
		}
		if diff := cmp.Diff(want, groupByDevice(t, firstGroups(nodeInventory(core.NewSnapshot(other))))); diff != "" {
			t.Fatalf("in order %v (-want +got):\n%s", order, diff)
		}
	}
}

// What comes and goes takes no name from what runs.
func TestNamesStay(t *testing.T) {
	two, three := coretest.GPUs(2), coretest.GPUs(3)
	large := h100 + " (97871 MiB)"
	only := func(s core.Snapshot, keep ...int) core.Snapshot {
		t := s
		t.Devices = nil
		for _, n := range keep {
			t.Devices = append(t.Devices, s.Devices[n])
		}
		return t
	}
	cut := migSnapshot()
	type step struct {
		reading core.Snapshot
		want    map[string]string
	}
	for name, steps := range map[string][]step{
		"the GPU with the model's name goes and comes back": {
			{withDevice(two, 1, memory(97871)), map[string]string{gpuID(0): h100, gpuID(1): large}},
			{only(withDevice(two, 1, memory(97871)), 1), map[string]string{gpuID(1): large}},
			{withDevice(two, 1, memory(97871)), map[string]string{gpuID(0): h100, gpuID(1): large}},
		},
		"a smaller one comes at a lower index": {
			{only(three, 1, 2), map[string]string{gpuID(1): h100, gpuID(2): h100}},
			{withDevice(three, 0, memory(40960)), map[string]string{gpuID(0): h100 + " (40960 MiB)", gpuID(1): h100, gpuID(2): h100}},
			{only(withDevice(three, 0, memory(40960)), 0), map[string]string{gpuID(0): h100 + " (40960 MiB)"}},
		},
		"memory that is told later": {
			{withDevice(withDevice(two, 0, memory(0)), 1, memory(0)), map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{withDevice(two, 1, memory(0)), map[string]string{gpuID(0): h100, gpuID(1): h100 + " (memory unknown)"}},
			{two, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{withDevice(two, 0, memory(0)), map[string]string{gpuID(0): h100 + " (memory unknown)", gpuID(1): h100}},
		},
		"a GPU becomes another kind (ECC is switched off)": {
			{two, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{withDevice(two, 0, memory(97871)), map[string]string{gpuID(0): large, gpuID(1): h100}},
			{withDevice(withDevice(two, 0, memory(97871)), 1, memory(97871)), map[string]string{gpuID(0): large, gpuID(1): large}},
		},
		"a GPU is cut up and whole again": {
			{two, map[string]string{gpuID(0): h100, gpuID(1): h100}},
			{cut, map[string]string{gpuID(1): h100, "MIG-0": h100 + " MIG 1g.10gb", "MIG-1": h100 + " MIG 1g.10gb", "MIG-2": h100 + " MIG 3g.40gb"}},
			{two, map[string]string{gpuID(0): h100, gpuID(1): h100}},
		},
		"no driver in between": {
			{withDevice(two, 0, memory(97871)), map[string]string{gpuID(0): large, gpuID(1): h100}},
			{core.NoDriver(core.DriverAbsent, "unloaded"), map[string]string{}},
			{only(withDevice(two, 0, memory(97871)), 0), map[string]string{gpuID(0): large}},
		},
	} {
		var given assignment
		for i, step := range steps {
			inv := nodeInventory(step.reading)
			given = given.with(inv)
			if diff := cmp.Diff(step.want, groupByDevice(t, groups(inv, given))); diff != "" {
				t.Errorf("%s, step %d (-want +got):\n%s", name, i, diff)
			}
		}
	}
}

// On any machine, whatever comes and goes: a device is in one group, groups have names of their own, and a
// kind of which everything is known never has another name.
func TestNamesOnAnyMachine(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	for range 200 {
		var given assignment
		first := map[groupKey]string{}
		for range 20 {
			s := coretest.GPUs(1 + random.IntN(6))
			for i := range s.Devices {
				d := &s.Devices[i]
				d.Model = []string{"A", "B"}[random.IntN(2)]
				d.Memory = []uint64{0, 40 << 30, 80 << 30, 96 << 30}[random.IntN(4)]
				d.Compute = []core.Compute{{}, {Major: 8}, {Major: 9}}[random.IntN(3)]
			}
			before := maps.Clone(given.names)
			inv := nodeInventory(core.NewSnapshot(s))
			next := given.with(inv)
			if !maps.Equal(before, given.names) {
				t.Fatalf("%v was changed to %v", before, given.names)
			}
			given = next
			if of := groupByDevice(t, groups(inv, given)); len(of) != inv.Len() {
				t.Errorf("%d of %d devices are in a group", len(of), inv.Len())
			}
			taken := map[string]groupKey{}
			for k, name := range given.names {
				if other, ok := taken[name]; ok {
					t.Errorf("%+v and %+v are both %q", k, other, name)
				}
				taken[name] = k
				if !k.complete() {
					continue
				}
				if was, ok := first[k]; ok && was != name {
					t.Errorf("%+v was %q and is %q", k, was, name)
				}
				first[k] = name
			}
			for k := range first {
				if given.names[k] == "" {
					t.Errorf("%+v has lost its name", k)
				}
			}
		}
		if t.Failed() {
			return
		}
	}
}

// Tasks run on while Nomad sets another configuration: the next life has the names of the one before. And
// statistics come under the names of fingerprints, whoever saw the GPU first.
func TestNamesOutliveALife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t)
		s.Source.Set(nodeInventory(coretest.GPUs(2)))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ch := fingerprints(ctx, t, s)
		<-ch
		s.mustConfigure(t, map[string]any{"fingerprint_period": "5m"})
		synctest.Wait()
		small := nodeInventory(withDevice(coretest.GPUs(2), 0, memory(40960)))
		s.source(1).Set(small)
		time.Sleep(fingerprintInterval)
		want := map[string]string{gpuID(0): h100 + " (40960 MiB)", gpuID(1): h100}
		if diff := cmp.Diff(want, groupByDevice(t, (<-ch).Devices)); diff != "" {
			t.Errorf("fingerprint (-want +got):\n%s", diff)
		}
		stats := openStats(ctx, t, s, time.Second)
		got := map[string]string{}
		for _, g := range (<-stats).Groups {
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
			results <- n.groups(nodeInventory(withDevice(coretest.GPUs(2), 0, memory(uint64(10000+i)))), GroupByNone)
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
