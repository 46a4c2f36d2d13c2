package nomad

import (
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/nomad/structs"
)

// The constraints of jobs, as users write them.
func Test19Constraints(t *testing.T) {
	_, _, whole := onMachine(t, "h100x8", nil, 8)
	_, _, single := onMachine(t, "t4", nil, 1)
	_, _, numa := onMachine(t, "h100x8", map[string]any{"group_by": "numa"}, 8)
	_, _, shared := underPolicy(t, "h100x8", "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4}]}\n", 32)
	mps := install(t, "h100x8")
	keys := mps.policy(t, "policy: {rules: [{select: {model: \"*\"}, use: mps, replicas: 4, memory: 8GiB, threads: 25}]}\n")
	nodes := map[string]*structs.Node{
		"gpu": node(whole), "gpu of one": node(single), "gpu by numa": node(numa), "gpu-shared": node(shared),
		"gpu-mps": node(healthy(startAgent(t, mps, keys).first(t, mps))),
	}
	for i, tc := range []struct {
		on, left, operand, right string
		want                     bool
	}{
		{"gpu", "memory", ">=", "40 GiB", true},
		{"gpu", "memory", ">=", "80000 MiB", true},
		{"gpu", "memory", ">=", "96 GiB", false},
		{"gpu", "memory", ">=", "40000", false}, // a number without a unit can't be compared
		{"gpu", "power", ">=", "600 W", true},
		{"gpu", "power", "<", "1 kW", true},
		{"gpu", "bar1", ">", "1 GiB", true},
		{"gpu", "cores_clock", ">=", "1 GHz", true},
		{"gpu", "memory_clock", ">=", "2000 MHz", true},
		{"gpu", "pci_bandwidth", ">=", "32 GB/s", true},
		{"gpu", "driver_version", "version", ">= 500", true},
		{"gpu", "driver_version", "version", ">= 900", false},
		{"gpu", "display_state", "=", "Enabled", true},
		{"gpu", "persistence_mode", "=", "Enabled", true},
		{"gpu", "mig_profile", "is_not_set", "", true},
		{"gpu", "mig_profile", "is_set", "", false},
		{"gpu", "device.model", "regexp", "H100", true},
		{"gpu", "device.vendor", "=", "nvidia", true},
		{"gpu", "device.type", "=", "gpu", true},
		{"gpu", "device.ids", "set_contains_any", whole[0].Instances[6].ID + ",GPU-x", true},
		{"gpu", "device.ids", "set_contains_any", "GPU-x", false},

		{"gpu", "architecture", "=", "Hopper", true},
		{"gpu", "architecture", "=", "Ampere", false},
		{"gpu", "architecture", "regexp", "^(Hopper|Blackwell)$", true},
		{"gpu", "architecture", "!=", "Turing", true},
		{"gpu", "architecture", "set_contains_any", "Hopper,Blackwell", true},
		{"gpu", "brand", "=", "NVIDIA", true},
		{"gpu of one", "brand", "regexp", "(?i)nvidia|tesla", true},
		{"gpu", "product", "=", "NVIDIA H100 80GB HBM3", true},
		{"gpu", "product", "regexp", "H100", true},
		{"gpu of one", "product", "=", "Tesla T4", true},
		{"gpu", "ecc_mode", "=", "Enabled", true},
		{"gpu", "nvlinks", ">=", "12", true},
		{"gpu", "nvlinks", ">", "18", false},
		{"gpu of one", "nvlinks", "is_set", "", false},
		{"gpu", "numa_node", "is_set", "", false}, // they are on two
		{"gpu by numa", "numa_node", "=", "1", true},
		{"gpu by numa", "numa_node", "=", "0", true},
		{"gpu by numa", "numa_node", "=", "2", false},
		{"gpu", "cuda_version", "version", ">= 12.4", true},
		{"gpu", "cuda_version", "version", ">= 99", false},
		{"gpu", "cuda_version", ">=", "12.4", false}, // a text is no number
		{"gpu", "compute_capability", "version", ">= 9.0", true},
		{"gpu", "compute_capability", "version", ">= 9.1", false},
		{"gpu", "compute_capability", "=", "9.0", false}, // a text is no number
		{"gpu of one", "compute_capability", "version", "= 7.5", true},
		{"gpu of one", "unique.serial", "=", "1325020056789", true},
		{"gpu of one", "unique.serial", "=", "1325020056788", false},
		{"gpu", "unique.serial", "is_set", "", false}, // they are eight
		{"gpu", "sharing", "is_set", "", false},
		{"gpu", "replicas", "is_not_set", "", true},
		{"gpu-shared", "sharing", "=", "time-slicing", true},
		{"gpu-shared", "sharing", "=", "mps", false},
		{"gpu-shared", "replicas", "<=", "4", true},
		{"gpu-shared", "replicas", "<", "4", false},
		{"gpu-shared", "memory", ">=", "79 GiB", true}, // of the GPU: a share has no limit
		{"gpu-mps", "sharing", "=", "mps", true},
		{"gpu-mps", "mps_memory_limit", ">=", "8 GiB", true},
		{"gpu-mps", "mps_memory_limit", ">", "8 GiB", false},
		{"gpu-mps", "mps_memory_limit", ">=", "8192", false}, // a number without a unit can't be compared
		{"gpu-mps", "mps_thread_limit", ">=", "25", true},
		{"gpu-shared", "mps_thread_limit", "is_set", "", false},
		{"gpu", "gpu_slices", "is_set", "", false},
	} {
		kind, _, _ := strings.Cut(tc.on, " ")
		if got := fits(t, nodes[tc.on], ask("nvidia/"+kind, 1, attr(tc.left, tc.operand, tc.right))); got != tc.want {
			t.Errorf("%d: on %s: %s %s %q is %t, want %t", i, tc.on, tc.left, tc.operand, tc.right, got, tc.want)
		}
	}
	for key := range whole[0].Attributes {
		if !fits(t, nodes["gpu"], ask("gpu", 1, attr(key, "is_set", ""))) {
			t.Errorf("%s is not set", key)
		}
	}
	for name, want := range map[string]bool{
		"gpu": true, "nvidia/gpu": true, "nvidia/gpu/" + whole[0].Name: true, "nvidia/gpu/T4": false, "amd/gpu": false,
	} {
		if got := fits(t, nodes["gpu"], ask(name, 8)); got != want {
			t.Errorf("device %q is %t, want %t", name, got, want)
		}
	}
	if fits(t, nodes["gpu"], ask("gpu", 9)) {
		t.Error("nine of eight")
	}
}

// healthy returns the groups as if all their devices were healthy.
func healthy(groups []*structs.NodeDeviceResource) (all []*structs.NodeDeviceResource) {
	for _, g := range groups {
		g = g.Copy()
		for _, d := range g.Instances {
			d.Healthy = true
		}
		all = append(all, g)
	}
	return all
}

// A job selects a MIG instance by its properties.
func Test19MIGInstances(t *testing.T) {
	m := install(t, "a100-mig")
	groups := startAgent(t, m, nil).first(t, m)
	for i, tc := range []struct {
		constraints []*structs.Constraint
		want        string // how the group's name ends; "" = none fits
	}{
		{[]*structs.Constraint{attr("mig_profile", "=", "1g.10gb")}, " MIG 1g.10gb"},
		{[]*structs.Constraint{attr("mig_profile", "=", "1g.10gb+me")}, " MIG 1g.10gb+me"},
		{[]*structs.Constraint{attr("mig_profile", "=", "4g.40gb")}, ""},
		{[]*structs.Constraint{attr("multiprocessors", ">=", "40"), attr("multiprocessors", "<", "90")}, " MIG 3g.40gb"},
		{[]*structs.Constraint{attr("gpu_slices", "=", "2"), attr("memory", ">=", "18 GiB")}, " MIG 2g.20gb"},
		{[]*structs.Constraint{attr("compute_slices", "=", "7")}, " MIG 7g.80gb"},
		{[]*structs.Constraint{attr("mig_profile", "is_set", ""), attr("jpeg_decoders", ">", "0"), attr("gpu_slices", "<", "3")}, " MIG 1g.10gb+me"},
		{[]*structs.Constraint{attr("mig_profile", "is_not_set", "")}, "NVIDIA A100-SXM4-80GB"},
		{[]*structs.Constraint{attr("mig_profile", "regexp", "^[23]g"), attr("copy_engines", "<=", "2")}, " MIG 2g.20gb"},
	} {
		got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu", 1, tc.constraints...))
		switch {
		case got == nil && tc.want != "":
			t.Errorf("%d: blocked, want %s", i, tc.want)
		case got != nil && (tc.want == "" || !strings.HasSuffix(got[0].Name, tc.want)):
			t.Errorf("%d: %s, want %q", i, got[0].Name, tc.want)
		}
	}
}

// The scheduler chooses between two nodes by their fingerprints.
func Test19TheSchedulerChooses(t *testing.T) {
	_, _, t4 := onMachine(t, "t4", nil, 1)
	_, _, h100 := onMachine(t, "h100x8", nil, 8)
	for _, tc := range []struct {
		count           uint64
		operand, memory string
		want            []*structs.NodeDeviceResource // nil = blocked
	}{
		{2, ">=", "40 GiB", h100},
		{1, "<", "40 GiB", t4},
		{1, ">=", "1 TiB", nil},
	} {
		got := newCluster(t, node(t4), node(h100)).place(t, ask("nvidia/gpu", tc.count, attr("memory", tc.operand, tc.memory)))
		switch {
		case tc.want == nil && got != nil:
			t.Errorf("%+v: allocates %+v", tc, got[0])
		case tc.want != nil && (len(got) != 1 || len(got[0].DeviceIDs) != int(tc.count) || got[0].Name != tc.want[0].Name || !within(tc.want[0], got[0].DeviceIDs)):
			t.Errorf("%+v: allocates %+v", tc, got)
		}
	}
}

// within reports whether all IDs are of the group.
func within(g *structs.NodeDeviceResource, of []string) bool {
	all := ids([]*structs.NodeDeviceResource{g})
	return !slices.ContainsFunc(of, func(id string) bool { return !slices.Contains(all, id) })
}

// Two machines of one model have one computed class, so that the scheduler's result for one is valid for the other: UUIDs and
// serial numbers are not part of it.
func Test20ComputedClass(t *testing.T) {
	other := install(t, "t4")
	other.edit(t, "serial = 1325020056789", "serial = 1325020099999")
	other.edit(t, other.uuid(t, 0), "GPU-00000000-0000-4000-8000-000000000001")
	_, _, a := onMachine(t, "t4", nil, 1)
	b := startAgent(t, other, nil).devices(t, 1, 1)
	x, y := a[0].Attributes["unique.serial"], b[0].Attributes["unique.serial"]
	if ids(a)[0] == ids(b)[0] || x == nil || y == nil || *x.Int == *y.Int {
		t.Fatalf("the machines are the same: serials %v, %v", x, y)
	}
	if classOf(t, a) != classOf(t, b) {
		t.Error("the classes differ")
	}
}

// Nomad checks one node of a computed class for the devices, and takes the result for all of the class (scheduler/feasible,
// FeasibilityWrapper). A node with unhealthy GPUs has another class, and excludes no other node.
func Test20UnhealthyNodeExcludesNoOther(t *testing.T) {
	m, a, _ := onMachine(t, "t4", nil, 1)
	m.ctl(t, "lose", "0")
	unhealthy := a.devices(t, 1, 0)
	_, _, other := onMachine(t, "t4", nil, 1)
	for range 64 { // in random order
		if newCluster(t, node(unhealthy), node(other)).place(t, ask("nvidia/gpu", 1)) == nil {
			t.Fatal("the healthy GPU was not found")
		}
	}
}
