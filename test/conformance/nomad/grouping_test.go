package nomad

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/nomad/structs"
)

// A job's GPUs are near each other because they are of one group.
func Test19GroupsArePlaces(t *testing.T) {
	for by, tc := range map[string]struct {
		prepare func(machine)
		names   []string // how they end
		sizes   []int
	}{
		"none": {nil, []string{"HBM3"}, []int{8}},
		"numa": {nil, []string{" NUMA 0", " NUMA 1"}, []int{4, 4}},
		"nvlink": {func(m machine) {
			m.edit(t, "nvlink = 18 all", "nvlink = 4 0-2\nnvlink = 4 3-6")
			m.edit(t, "switches = ", "# switches = ")
		}, []string{"HBM3", " NVLink 0000:1b:00.0", " NVLink 0000:61:00.0"}, []int{1, 3, 4}},
	} {
		t.Run(by, func(t *testing.T) {
			m := install(t, "h100x8")
			if tc.prepare != nil {
				tc.prepare(m)
			}
			a := startAgent(t, m, map[string]any{"group_by": by})
			groups := a.devices(t, 8, 8)
			slices.SortFunc(groups, func(x, y *structs.NodeDeviceResource) int { return strings.Compare(x.Name, y.Name) })
			var sizes []int
			for i, g := range groups {
				sizes = append(sizes, len(g.Instances))
				if i >= len(tc.names) || !strings.HasSuffix(g.Name, tc.names[i]) {
					t.Errorf("group %q", g.Name)
				}
			}
			if !slices.Equal(sizes, tc.sizes) {
				t.Fatalf("groups of %v, want %v", sizes, tc.sizes)
			}
			largest := slices.Max(sizes)
			for range 30 { // Nomad picks by chance
				got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu", uint64(min(4, largest)), that("${device.attr.product}", "=", "NVIDIA H100 80GB HBM3")))
				if got == nil {
					t.Fatal("blocked")
				}
				if g := group(t, groups, "gpu", got[0].Name); len(got) != 1 || !within(g, got[0].DeviceIDs) {
					t.Errorf("%v are not in %s", got[0].DeviceIDs, g.Name)
				}
				if _, err := a.dm.Reserve(got[0]); err != nil {
					t.Error(err)
				}
			}
			if c := newCluster(t, node(groups)); c.place(t, ask("nvidia/gpu", uint64(largest+1))) != nil {
				t.Errorf("%d GPUs of groups of %v", largest+1, sizes)
			}
		})
	}
}

func within(g *structs.NodeDeviceResource, ids []string) bool {
	all := map[string]bool{}
	for _, d := range g.Instances {
		all[d.ID] = true
	}
	return !slices.ContainsFunc(ids, func(id string) bool { return !all[id] })
}

// Who is lost stays in its group, and a process that starts meanwhile gives it and the others the same names.
func Test12PlacesStay(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, map[string]any{"group_by": "nvlink"})
	well := names(a.devices(t, 8, 8))
	m.ctl(t, "lose", "0")
	if sick := names(a.devices(t, 8, 7)); !maps.Equal(sick, well) {
		t.Errorf("%v, was %v", sick, well)
	}
	a.dm.Shutdown()
	b := startAgent(t, m, map[string]any{"group_by": "nvlink"}) // which has the island's first GPU by its history only
	if sick := names(b.devices(t, 8, 7)); !maps.Equal(sick, well) {
		t.Errorf("after a restart %v, was %v", sick, well)
	}
	m.ctl(t, "restore", "0")
	b.devices(t, 8, 8)
	b.dm.Shutdown()
	if again := names(startAgent(t, m, map[string]any{"group_by": "nvlink"}).devices(t, 8, 8)); !maps.Equal(again, well) {
		t.Errorf("after another %v, was %v", again, well)
	}
}

// A GPU that lost its NVLinks is announced in the group in which Nomad has booked it, also by a plugin that starts after
// that: the allocation still holds it, and no other gets it.
func Test12PlacesStayAfterALinkWasLost(t *testing.T) {
	const joined = "nvlink = 4 0-2\nnvlink = 4 3-6"
	m := install(t, "h100x8")
	m.edit(t, "nvlink = 18 all", joined)
	m.edit(t, "switches = ", "# switches = ")
	a := startAgent(t, m, map[string]any{"group_by": "nvlink"})
	groups := a.devices(t, 8, 8)
	well := names(groups)
	c := newCluster(t, node(groups))
	held := c.place(t, ask("nvidia/gpu/NVIDIA H100 80GB HBM3 NVLink 0000:1b:00.0", 3))
	if held == nil {
		t.Fatal("blocked")
	}
	a.dm.Shutdown()
	last := joined
	for i, links := range []string{"nvlink = 4 0-1\nnvlink = 4 3-6", "nvlink = 4 3-4\nnvlink = 4 5-6", "# no NVLinks", joined} {
		m.edit(t, last, links)
		last = links
		b := startAgent(t, m, map[string]any{"group_by": "nvlink"})
		again := b.devices(t, 8, 8)
		if now := names(again); !maps.Equal(now, well) {
			t.Errorf("start %d: %v, was %v", i, now, well)
		}
		if _, err := b.dm.Reserve(held[0]); err != nil { // Nomad looks for the group and the devices in it
			t.Errorf("start %d: %v", i, err)
		}
		b.dm.Shutdown()
	}
}

// names are the groups of devices.
func names(groups []*structs.NodeDeviceResource) map[string]string {
	of := map[string]string{}
	for _, g := range groups {
		for _, d := range g.Instances {
			of[d.ID] = g.Type + "/" + g.Name
		}
	}
	return of
}

// A name that the policy gives joins what it selects, whatever the models.
func Test19PoolsWithNames(t *testing.T) {
	m := install(t, "h100x8")
	m.ctl(t, "set", "3", "name", "NVIDIA H100 NVL")
	m.ctl(t, "set", "3", "memory", "95830 MiB")
	n := node(startAgent(t, m, m.policy(t, `resources: {gpus: [{pattern: "*H100*", name: h100}]}
policy: {rules: [{select: {index: 7}, name: mine}]}
`)).devices(t, 8, 8))
	c := newCluster(t, n)
	for name, want := range map[string]int{"h100": 7, "mine": 1} {
		if got := c.place(t, ask("nvidia/gpu/"+name, uint64(want))); got == nil || len(got[0].DeviceIDs) != want {
			t.Errorf("%s: %v, %s", name, got, c.exhausted())
		}
	}
	joined := group(t, n.NodeResources.Devices, "gpu", "h100")
	for key, shared := range map[string]bool{"memory": false, "product": false, "architecture": true, "compute_capability": true} {
		if _, ok := joined.Attributes[key]; ok != shared {
			t.Errorf("%s: published %t, want %t", key, ok, shared)
		}
	}
}

// A job says which MIG instance it wants by what the instance is.
func Test19MIGByWhatItIs(t *testing.T) {
	m := install(t, "a100-mig")
	groups := startAgent(t, m, nil).first(t, m)
	for i, tc := range []struct {
		constraints []*structs.Constraint
		want        string // how the group's name ends; "" = none fits
	}{
		{[]*structs.Constraint{that("${device.attr.mig_profile}", "=", "1g.10gb")}, " MIG 1g.10gb"},
		{[]*structs.Constraint{that("${device.attr.mig_profile}", "=", "1g.10gb+me")}, " MIG 1g.10gb+me"},
		{[]*structs.Constraint{that("${device.attr.mig_profile}", "=", "4g.40gb")}, ""},
		{[]*structs.Constraint{that("${device.attr.multiprocessors}", ">=", "40"), that("${device.attr.multiprocessors}", "<", "90")}, " MIG 3g.40gb"},
		{[]*structs.Constraint{that("${device.attr.gpu_slices}", "=", "2"), that("${device.attr.memory}", ">=", "18 GiB")}, " MIG 2g.20gb"},
		{[]*structs.Constraint{that("${device.attr.compute_slices}", "=", "7")}, " MIG 7g.80gb"},
		{[]*structs.Constraint{that("${device.attr.mig_profile}", "is_set", ""), that("${device.attr.jpeg_decoders}", ">", "0"), that("${device.attr.gpu_slices}", "<", "3")}, " MIG 1g.10gb+me"},
		{[]*structs.Constraint{that("${device.attr.mig_profile}", "is_not_set", "")}, "NVIDIA A100-SXM4-80GB"},
		{[]*structs.Constraint{that("${device.attr.mig_profile}", "regexp", "^[23]g"), that("${device.attr.copy_engines}", "<=", "2")}, " MIG 2g.20gb"},
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

// What jobs may ask for beside the nine, as users write it.
func Test19MoreConstraints(t *testing.T) {
	shared := install(t, "h100x8")
	whole, mps := install(t, "h100x8"), install(t, "h100x8")
	nodes := map[string]*structs.Node{
		"gpu":        node(startAgent(t, whole, nil).devices(t, 8, 8)),
		"gpu-shared": node(startAgent(t, shared, shared.policy(t, "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 4}]}\n")).devices(t, 32, 32)),
	}
	keys := mps.policy(t, "policy: {rules: [{select: {model: \"*\"}, use: mps, replicas: 4, memory: 8GiB, threads: 25}]}\n")
	nodes["gpu-mps"] = node(well(startAgent(t, mps, keys).first(t, mps)))
	single := install(t, "t4")
	nodes["gpu of one"] = node(startAgent(t, single, nil).devices(t, 1, 1))
	numa := install(t, "h100x8")
	nodes["gpu by numa"] = node(startAgent(t, numa, map[string]any{"group_by": "numa"}).devices(t, 8, 8))
	for i, tc := range []struct {
		on, left, operand, right string
		want                     bool
	}{
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
		{"gpu", "nvlinks", ">=", "4", true},
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
		{"gpu-shared", "memory", ">=", "79 GiB", true}, // of the GPU: nothing limits a share
		{"gpu-mps", "sharing", "=", "mps", true},
		{"gpu-mps", "mps_memory_limit", ">=", "8 GiB", true},
		{"gpu-mps", "mps_memory_limit", ">", "8 GiB", false},
		{"gpu-mps", "mps_memory_limit", ">=", "8192", false}, // without a unit nothing is comparable
		{"gpu-mps", "mps_thread_limit", ">=", "25", true},
		{"gpu-shared", "mps_thread_limit", "is_set", "", false},
		{"gpu", "gpu_slices", "is_set", "", false},
	} {
		kind, _, _ := strings.Cut(tc.on, " ")
		request := ask("nvidia/"+kind, 1, that(fmt.Sprintf("${device.attr.%s}", tc.left), tc.operand, tc.right))
		if got := feasibleOn(t, nodes[tc.on], request); got != tc.want {
			t.Errorf("%d: on %s: %s %s %q is %t, want %t", i, tc.on, tc.left, tc.operand, tc.right, got, tc.want)
		}
		if got := newCluster(t, nodes[tc.on]).place(t, request) != nil; got != tc.want {
			t.Errorf("%d: on %s: %s %s %q is placed: %t, want %t", i, tc.on, tc.left, tc.operand, tc.right, got, tc.want)
		}
	}
}

// well are groups as if all in them took work.
func well(groups []*structs.NodeDeviceResource) (all []*structs.NodeDeviceResource) {
	for _, g := range groups {
		g = g.Copy()
		for _, d := range g.Instances {
			d.Healthy = true
		}
		all = append(all, g)
	}
	return all
}

// A share of a certain GPU can be asked for by its ID.
func Test19ShareByID(t *testing.T) {
	m := install(t, "h100x8")
	groups := startAgent(t, m, m.policy(t, "policy: {rules: [{select: {model: \"*\"}, use: time-slicing, replicas: 2}]}\n")).devices(t, 16, 16)
	gpu := m.uuid(t, 5)
	c := newCluster(t, node(groups))
	for range 2 {
		got := c.place(t, ask("nvidia/gpu-shared", 1, that("${device.ids}", "set_contains_any", gpu+"::0,"+gpu+"::1")))
		if got == nil || gpus(got[0].DeviceIDs)[gpu] != 1 {
			t.Fatalf("%v, %s", got, c.exhausted())
		}
	}
	if got := c.place(t, ask("nvidia/gpu-shared", 1, that("${device.ids}", "set_contains_any", gpu+"::0,"+gpu+"::1"))); got != nil {
		t.Errorf("a third share of two: %v", got[0])
	}
}

// What only one machine has is not of its class.
func Test20SerialIsNotOfTheClass(t *testing.T) {
	one, other := install(t, "t4"), install(t, "t4")
	other.edit(t, "serial = 1325020056789", "serial = 1325020099999")
	a, b := startAgent(t, one, nil).devices(t, 1, 1), startAgent(t, other, nil).devices(t, 1, 1)
	x, y := a[0].Attributes["unique.serial"], b[0].Attributes["unique.serial"]
	if x == nil || y == nil || *x.Int == *y.Int {
		t.Fatalf("serials: %v, %v", x, y)
	}
	if classOf(t, a) != classOf(t, b) {
		t.Error("the classes differ")
	}
}
