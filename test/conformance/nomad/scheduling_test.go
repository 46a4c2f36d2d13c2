package nomad

import (
	"testing"

	"github.com/hashicorp/nomad/nomad/mock"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/scheduler/feasible"
)

// node is a node of the cluster that has devices.
func node(devices []*structs.NodeDeviceResource) *structs.Node {
	n := mock.Node()
	n.NodeResources.Devices = devices
	return n
}

func ask(name string, count uint64, constraints ...*structs.Constraint) *structs.RequestedDevice {
	return &structs.RequestedDevice{Name: name, Count: count, Constraints: constraints}
}

func that(left, operand, right string) *structs.Constraint {
	return &structs.Constraint{LTarget: left, Operand: operand, RTarget: right}
}

// feasibleOn says whether Nomad's device checker lets a task ask for this on the node.
func feasibleOn(t *testing.T, n *structs.Node, asks ...*structs.RequestedDevice) bool {
	t.Helper()
	_, ctx := feasible.MockContext(t)
	checker := feasible.NewDeviceChecker(ctx)
	checker.SetTaskGroup(&structs.TaskGroup{Tasks: []*structs.Task{{Resources: &structs.Resources{Devices: asks}}}})
	return checker.Feasible(n)
}

func Test19Constraints(t *testing.T) {
	m := install(t, "h100x8")
	groups := startAgent(t, m, nil).devices(t, 8, 8)
	n := node(groups)
	for _, tc := range []struct {
		left, operand, right string
		want                 bool
	}{
		{"${device.attr.memory}", ">=", "40 GiB", true},
		{"${device.attr.memory}", ">=", "80000 MiB", true},
		{"${device.attr.memory}", ">=", "96 GiB", false},
		{"${device.attr.memory}", ">=", "40000", false}, // without a unit nothing is comparable
		{"${device.attr.power}", ">=", "600 W", true},
		{"${device.attr.power}", "<", "1 kW", true},
		{"${device.attr.bar1}", ">", "1 GiB", true},
		{"${device.attr.cores_clock}", ">=", "1 GHz", true},
		{"${device.attr.memory_clock}", ">=", "2000 MHz", true},
		{"${device.attr.pci_bandwidth}", ">=", "32 GB/s", true},
		{"${device.attr.driver_version}", "version", ">= 500", true},
		{"${device.attr.driver_version}", "version", ">= 900", false},
		{"${device.attr.cuda_version}", "version", ">= 12.0", true},
		{"${device.attr.compute_capability}", "version", ">= 8.0", true},
		{"${device.attr.compute_capability}", "version", ">= 9.1", false},
		{"${device.attr.display_state}", "=", "Disabled", true},
		{"${device.attr.persistence_mode}", "=", "Enabled", true},
		{"${device.attr.mig_profile}", "is_not_set", "", true},
		{"${device.attr.mig_profile}", "is_set", "", false},
		{"${device.model}", "regexp", "H100", true},
		{"${device.vendor}", "=", "nvidia", true},
		{"${device.type}", "=", "gpu", true},
		{"${device.ids}", "set_contains_any", groups[0].Instances[6].ID + ",GPU-x", true},
		{"${device.ids}", "set_contains_any", "GPU-x", false},
	} {
		if got := feasibleOn(t, n, ask("nvidia/gpu", 1, that(tc.left, tc.operand, tc.right))); got != tc.want {
			t.Errorf("%s %s %q is %t, want %t", tc.left, tc.operand, tc.right, got, tc.want)
		}
	}
	for key := range groups[0].Attributes {
		if !feasibleOn(t, n, ask("gpu", 1, that("${device.attr."+key+"}", "is_set", ""))) {
			t.Errorf("%s is not set", key)
		}
	}
	for name, want := range map[string]bool{
		"gpu": true, "nvidia/gpu": true, "nvidia/gpu/" + groups[0].Name: true, "nvidia/gpu/T4": false, "amd/gpu": false,
	} {
		if got := feasibleOn(t, n, ask(name, 8)); got != want {
			t.Errorf("device %q is %t, want %t", name, got, want)
		}
	}
	if feasibleOn(t, n, ask("gpu", 9)) {
		t.Error("nine of eight")
	}
}

func Test19MIG(t *testing.T) {
	m := install(t, "a100-mig")
	n := node(startAgent(t, m, nil).first(t, m))
	for profile, want := range map[string]bool{"1g.10gb": true, "3g.40gb": true, "4g.40gb": false} {
		if got := feasibleOn(t, n, ask("nvidia/gpu", 1, that("${device.attr.mig_profile}", "=", profile))); got != want {
			t.Errorf("%s is %t, want %t", profile, got, want)
		}
	}
}

// job asks for devices with one task.
func job(asks ...*structs.RequestedDevice) *structs.Job {
	j := mock.Job()
	j.TaskGroups[0].Networks = nil
	j.TaskGroups[0].Tasks[0].Resources.Networks = nil
	j.TaskGroups[0].Tasks[0].Resources.Devices = asks
	return j
}

// selected is the node that Nomad's scheduler chooses, with what it would allocate; nil if there is none.
func selected(t *testing.T, j *structs.Job, nodes ...*structs.Node) *feasible.RankedNode {
	t.Helper()
	_, ctx := feasible.MockContext(t)
	for _, n := range nodes {
		if err := n.ComputeClass(); err != nil {
			t.Fatal(err)
		}
	}
	stack := feasible.NewGenericStack(false, ctx)
	stack.SetNodes(nodes)
	stack.SetJob(j)
	return stack.Select(j.TaskGroups[0], &feasible.SelectOptions{})
}

// A scheduling decision of a real scheduler over two real fingerprints.
func Test19TheSchedulerChooses(t *testing.T) {
	small, large := install(t, "t4"), install(t, "h100x8")
	t4 := node(startAgent(t, small, nil).devices(t, 1, 1))
	h100 := node(startAgent(t, large, nil).devices(t, 8, 8))

	got := selected(t, job(ask("nvidia/gpu", 2, that("${device.attr.memory}", ">=", "40 GiB"))), t4, h100)
	if got == nil || got.Node.ID != h100.ID {
		t.Fatalf("chose %v, want the H100s", got)
	}
	devices := got.TaskResources["web"].Devices
	if len(devices) != 1 || len(devices[0].DeviceIDs) != 2 || devices[0].Name != h100.NodeResources.Devices[0].Name {
		t.Errorf("allocates %+v", devices)
	}
	if got := selected(t, job(ask("nvidia/gpu", 1, that("${device.attr.memory}", "<", "40 GiB"))), t4, h100); got == nil || got.Node.ID != t4.ID {
		t.Errorf("chose %v, want the T4", got)
	}
	if got := selected(t, job(ask("nvidia/gpu", 1, that("${device.attr.memory}", ">=", "1 TiB"))), t4, h100); got != nil {
		t.Errorf("chose %v, want none", got)
	}
}

// An unhealthy device is not given out.
func Test19UnhealthyIsNotScheduled(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	a.devices(t, 8, 8)
	m.ctl(t, "lose", "2")
	n := node(a.devices(t, 8, 7))
	lost := instances(n.NodeResources.Devices)[2].ID
	got := selected(t, job(ask("nvidia/gpu", 7)), n)
	if got == nil {
		t.Fatal("seven healthy GPUs are not enough for seven")
	}
	for _, id := range got.TaskResources["web"].Devices[0].DeviceIDs {
		if id == lost {
			t.Error("the lost GPU is given out")
		}
	}
	if selected(t, job(ask("nvidia/gpu", 8)), n) != nil {
		t.Error("seven healthy GPUs are enough for eight")
	}
}

// Two machines of one make are of one class, so that the scheduler can tell from one about the other.
func Test20ComputedClass(t *testing.T) {
	one, other := install(t, "h100x8"), install(t, "h100x8")
	other.ctl(t, "remove", "7")
	other.ctl(t, "add", "7")
	a, b := startAgent(t, one, nil).devices(t, 8, 8), startAgent(t, other, nil).devices(t, 8, 8)
	if ids(a)[7] == ids(b)[7] {
		t.Fatal("the machines are the same")
	}
	if classOf(t, a) != classOf(t, b) {
		t.Error("the classes differ")
	}
}
