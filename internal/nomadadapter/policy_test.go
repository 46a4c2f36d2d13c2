package nomadadapter

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// inventoryUnder is nodeInventory with a policy, of which all MPS daemons answer.
func inventoryUnder(p inventory.Policy, s gpu.Snapshot, obs ...health.Observation) *inventory.Inventory {
	settings, _, err := config.NewBlock(nil).Read()
	if err != nil {
		panic(err)
	}
	settings.Core.Policy = p
	return inventoryWith(settings.Core, s, obs...).WithHost(inventory.Host{MPS: pools(p)}, inventory.OverlapWarn)
}

// pools returns the pools of a policy.
func pools(p inventory.Policy) []string {
	all := []string{"gpu.mps", "gpu"}
	for _, r := range p.Rules {
		all = append(all, r.Pool)
	}
	for _, n := range p.Names {
		all = append(all, n.Pool)
	}
	return all
}

func selectGPUs(n ...int) (s inventory.Selector) {
	for _, i := range n {
		s.IDs = append(s.IDs, coretest.GPU(i))
	}
	return s
}

func timeSlicing(replicas int) *inventory.Sharing {
	return &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas}
}

func mps(replicas int) *inventory.Sharing {
	return &inventory.Sharing{Mode: inventory.MPS, Replicas: replicas, OnePerRequest: true}
}

// mixedPolicy is a policy of eight GPUs: two exclusive, three time-sliced by four, two with MPS, one reserved.
var mixedPolicy = inventory.Policy{Rules: []inventory.Rule{
	{Select: selectGPUs(0, 1)},
	{Select: selectGPUs(2, 3, 4), Sharing: timeSlicing(4)},
	{Select: selectGPUs(5, 6), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 4 << 30, Threads: 25}},
	{Select: selectGPUs(7), Reserve: "reserved by policy.yaml:12"},
}}

// withDetails returns s with all properties that the driver can report.
func withDetails(s gpu.Snapshot) gpu.Snapshot {
	s.Devices = slices.Clone(s.Devices)
	for i := range s.Devices {
		d := &s.Devices[i]
		d.Architecture, d.Brand, d.ECC, d.Serial = "Hopper", "NVIDIA", gpu.Enabled, fmt.Sprintf("165292200%04d", d.Index)
		if d.NVLinks = 18; d.Profile != "" {
			d.NVLinks = 0
			d.Slices = gpu.Slices{GPU: 1, Compute: 1, Multiprocessors: 16, CopyEngines: 1, Decoders: 1, JPEGDecoders: 1}
			if d.Profile == "3g.40gb" {
				d.Slices = gpu.Slices{GPU: 3, Compute: 3, Multiprocessors: 60, CopyEngines: 3, Decoders: 3, JPEGDecoders: 3}
			}
		}
	}
	return s
}

func TestGroupsUnderAPolicy(t *testing.T) {
	models := withDevice(withDevice(coretest.GPUs(4), 1, memory(97871)), 2, func(d *gpu.Device) { d.Model, d.PowerLimit = "NVIDIA L40S", 350_000 })
	for name, tc := range map[string]struct {
		inv *inventory.Inventory
		by  config.GroupBy
	}{
		"shared":  {inventoryUnder(mixedPolicy, withDetails(coretest.GPUs(8)), lost(3)), config.GroupByNone},
		"cut":     {inventoryUnder(inventory.Policy{}, withDetails(migSnapshot())), config.GroupByNone},
		"cutmps":  {inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Select: inventory.Selector{Profiles: []string{"1g.*"}}, Pool: "small", Sharing: mps(2)}}}, withDetails(migSnapshot())), config.GroupByNone},
		"renamed": {inventoryUnder(inventory.Policy{Names: []inventory.Naming{{Select: inventory.Selector{Models: []string{"*H100*"}}, Pool: "h100"}}}, withDetails(models)), config.GroupByNone},
		"onepool": {inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0, 1, 2), Pool: "any", Sharing: timeSlicing(2)}}}, withDetails(models)), config.GroupByNone},
		"numa":    {inventoryUnder(inventory.Policy{}, withDetails(coretest.GPUs(4))), config.GroupByNUMA},
		"nvlink":  {inventoryUnder(mixedPolicy, withDetails(pairwiseLinked(8))), config.GroupByNVLink},
	} {
		gs := groups(tc.inv, assignment{by: tc.by})
		golden(t, "testdata/"+name+".txt", formatGroups(gs))
		for _, g := range gs {
			if err := g.Validate(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// pairwiseLinked returns n GPUs of which each even one is linked with the next.
func pairwiseLinked(n int) gpu.Snapshot {
	s := coretest.GPUs(n)
	s.Links = slices.DeleteFunc(slices.Clone(s.Links), func(l gpu.Link) bool {
		a := slices.IndexFunc(s.Devices, func(d gpu.Device) bool { return d.ID == l.A })
		b := slices.IndexFunc(s.Devices, func(d gpu.Device) bool { return d.ID == l.B })
		return a/2 != b/2
	})
	return s
}

// groupSizes returns the number of devices of each group, by type/name.
func groupSizes(gs []*device.DeviceGroup) map[string]int {
	n := map[string]int{}
	for _, g := range gs {
		n[g.Type+"/"+g.Name] += len(g.Devices)
	}
	return n
}

func TestNamesOfPools(t *testing.T) {
	for name, tc := range map[string]struct {
		policy inventory.Policy
		change func(*gpu.Device) // of the second
		want   map[string]int
	}{
		"default pools have the model's name": {
			inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0), Pool: "gpu"}, {Select: selectGPUs(1), Pool: "gpu.shared", Sharing: timeSlicing(2)}, {Select: selectGPUs(2), Pool: "gpu.mps", Sharing: mps(3)}}}, nil,
			map[string]int{"gpu/" + h100: 1, "gpu-shared/" + h100: 2, "gpu-mps/" + h100: 3},
		},
		"two default pools with time-slicing": {
			inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0), Pool: "gpu", Sharing: timeSlicing(2)}, {Select: selectGPUs(1, 2), Pool: "gpu.shared", Sharing: timeSlicing(3)}}}, nil,
			map[string]int{"gpu-shared/" + h100: 2, "gpu-shared/" + h100 + " (gpu.shared)": 6},
		},
		"two exclusive default pools": {
			inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0), Pool: "gpu.mps"}}}, nil,
			map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (gpu.mps)": 1},
		},
		"two exclusive default pools and other memory": {
			inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(1), Pool: "gpu.mps"}}}, memory(97871),
			map[string]int{"gpu/" + h100: 2, "gpu/" + h100 + " (gpu.mps, 97871 MiB)": 1},
		},
		"a pool name for different models": {
			inventory.Policy{Names: []inventory.Naming{{Pool: "fast"}}}, func(d *gpu.Device) { d.Model, d.Memory = "NVIDIA L4", 0 },
			map[string]int{"gpu/fast": 3},
		},
		"a pool name with time-slicing": {
			inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0, 1), Pool: "fast", Sharing: timeSlicing(4)}, {Pool: "whole"}}}, memory(97871),
			map[string]int{"gpu-shared/fast": 8, "gpu/whole": 1},
		},
		"one pool name, shared and exclusive": {
			inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0), Pool: "fast", Sharing: timeSlicing(4)}, {Pool: "fast"}}}, nil,
			map[string]int{"gpu-shared/fast": 4, "gpu/fast": 2},
		},
		"a pool name equal to a model": {
			inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0), Pool: "L4"}}}, func(d *gpu.Device) { d.Model = "L4" },
			map[string]int{"gpu/L4": 1, "gpu/L4 (gpu, 81559 MiB, compute 9.0)": 1, "gpu/" + h100: 1},
		},
	} {
		s := coretest.GPUs(3)
		if tc.change != nil {
			s = withDevice(s, 1, tc.change)
		}
		inv := inventoryUnder(tc.policy, s)
		if diff := cmp.Diff(tc.want, groupSizes(groups(inv, assignment{}))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
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
		{inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(1, 2), Sharing: timeSlicing(2)}}}, map[string]int{"gpu/" + h100: 1, "gpu/" + h100 + " (97871 MiB)": 1, "gpu-shared/" + h100: 4}},
		{inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(1, 2, 3), Pool: "mine"}}}, map[string]int{"gpu/mine": 3, "gpu/" + h100 + " (97871 MiB)": 1}},
		{inventory.Policy{Rules: []inventory.Rule{{Sharing: timeSlicing(2)}}}, map[string]int{"gpu-shared/" + h100: 6, "gpu-shared/" + h100 + " (97871 MiB)": 2}},
		{inventory.Policy{}, map[string]int{"gpu/" + h100: 3, "gpu/" + h100 + " (97871 MiB)": 1}},
	} {
		inv := inventoryUnder(step.policy, s)
		given = given.with(inv)
		if diff := cmp.Diff(step.want, groupSizes(groups(inv, given))); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

// A group has the attribute unique.serial only if all its devices are of one board.
func TestSerial(t *testing.T) {
	cut := withDetails(migSnapshot())
	inv := inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Sharing: timeSlicing(3)}}}, cut)
	for _, g := range groups(inv, assignment{}) {
		if a := g.Attributes["unique.serial"]; a == nil || a.Int == nil {
			t.Errorf("%s: serial %#v", g.Name, a)
		}
	}
	for text, want := range map[string]string{"1652922000001": "1652922000001", "0320918": "320918", "PC-7A": "PC-7A", "1e5": "1e5"} {
		if got := serial(text).wire().GoString(); got != want {
			t.Errorf("serial %s is %s, want %s", text, got, want)
		}
	}
	inv = inventoryUnder(inventory.Policy{}, withDetails(coretest.GPUs(2)))
	if a := groups(inv, assignment{})[0].Attributes["unique.serial"]; a != nil {
		t.Errorf("two GPUs have the serial %#v", a)
	}
}
