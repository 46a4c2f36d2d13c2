package nomad

import (
	"testing"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/test/check"
)

// A constraint of a job is met by the rules of Nomad's scheduler.
func TestNodeConstraints(t *testing.T) {
	n := &api.Node{
		ID: "id1", Name: "gpu1", Datacenter: "dc1", NodeClass: "h100", NodePool: "gpu",
		Attributes: map[string]string{"kernel.name": "linux", "cpu.numcores": "64", "kernel.version": "6.8.0-45-generic", "driver.version": "580.95.05", "nomad.version": "1.11.3"},
		Meta:       map[string]string{"tags": "a, b,c", "rack": "r1", "empty": ""},
	}
	for _, tc := range []struct {
		left, operand, right string
		want, unknown        bool
	}{
		{"${node.unique.id}", "=", "id1", true, false},
		{"${node.unique.name}", "==", "gpu2", false, false},
		{"${node.datacenter}", "is", "dc1", true, false},
		{"${node.class}", "!=", "h100", false, false},
		{"${node.pool}", "not", "default", true, false},
		{"linux", "=", "${attr.kernel.name}", true, false},
		{"${attr.none}", "=", "${meta.none}", false, false},
		{"${attr.none}", "!=", "x", true, false},
		{"${node.none}", "=", "x", false, false},
		{"${attr.cpu.numcores}", ">=", "9", true, false},
		{"${attr.cpu.numcores}", "<", "63.5", false, false},
		{"${attr.cpu.numcores}", ">", "64", false, false},
		{"${attr.kernel.name}", "<=", "m", true, false},
		{"${meta.none}", "<", "x", false, false},
		{"${meta.rack}", "is_set", "", true, false},
		{"${meta.empty}", "is_set", "", true, false},
		{"${meta.gpu_repair}", "is_not_set", "", true, false},
		{"${meta.rack}", "is_not_set", "", false, false},
		{"${meta.rack}", "regexp", "^r[0-9]$", true, false},
		{"${meta.rack}", "regexp", "(", false, false},
		{"${meta.tags}", "set_contains", "c,a", true, false},
		{"${meta.tags}", "set_contains_all", "a,d", false, false},
		{"${meta.tags}", "set_contains_any", "d, b", true, false},
		{"${attr.nomad.version}", "version", ">= 1.9, < 2", true, false},
		{"${attr.nomad.version}", "version", "~> 1.11.0", true, false},
		{"${attr.nomad.version}", "version", "~> 1.10.0", false, false},
		{"${attr.nomad.version}", "semver", ">= 1.11.3", true, false},
		{"${attr.kernel.version}", "version", ">= 6.5", false, false}, // of before a release
		{"${attr.kernel.version}", "semver", ">= 6.5.0", true, false},
		{"${attr.driver.version}", "version", "> 580.95.4", true, false},
		{"${attr.kernel.name}", "version", "> 1", false, false},
		{"", "distinct_hosts", "true", true, false},
		{"${meta.rack}", "near", "r1", false, true},
		{"${meta.rack}", "", "r1", false, true},
	} {
		got, err := meetsNode(&api.Constraint{LTarget: tc.left, Operand: tc.operand, RTarget: tc.right}, n)
		if got != tc.want || (err != nil) != tc.unknown {
			t.Errorf("%s %s %s: %t, %v", tc.left, tc.operand, tc.right, got, err)
		}
	}
}

// A constraint of a device compares numbers in their units.
func TestDeviceConstraints(t *testing.T) {
	text := "9.0"
	memory, numa, yes, share := int64(81559), int64(1), true, 0.5
	g := &api.NodeDeviceResource{
		Vendor: "nvidia", Type: "gpu", Name: "H100", Instances: []*api.NodeDevice{{ID: "GPU-a"}, {ID: "GPU-b"}}, Attributes: map[string]*api.Attribute{
			"compute_capability": {StringVal: &text}, "memory": {IntVal: &memory, Unit: "MiB"}, "numa_node": {IntVal: &numa}, "shared": {BoolVal: &yes},
			"share": {FloatVal: &share},
		},
	}
	for _, tc := range []struct {
		left, operand, right string
		want                 bool
	}{
		{"${device.model}", "=", "H100", true},
		{"${device.vendor}", "!=", "nvidia", false},
		{"${device.type}", "regexp", "^gpu", true},
		{"${device.ids}", "set_contains", "GPU-b", true},
		{"${device.attr.memory}", ">", "75 GiB", true},
		{"${device.attr.memory}", ">=", "80 GiB", false},
		{"${device.attr.memory}", ">", "5 W", false},
		{"${device.attr.memory}", "=", "81559 MiB", true},
		{"${device.attr.numa_node}", "=", "1", true},
		{"${device.attr.numa_node}", "!=", "0", true},
		{"${device.attr.share}", "<", "0.6", true},
		{"${device.attr.compute_capability}", "version", ">= 8.0", true},
		{"${device.attr.compute_capability}", "=", "9.0", false}, // a text and a number
		{"${device.attr.none}", "!=", "x", true},
		{"${device.attr.none}", "is_not_set", "", true},
		{"${device.attr.none}", "=", "x", false},
	} {
		got, err := meetsDevice(&api.Constraint{LTarget: tc.left, Operand: tc.operand, RTarget: tc.right}, g)
		check.NoError(t, err)
		if got != tc.want {
			t.Errorf("%s %s %s: %t", tc.left, tc.operand, tc.right, got)
		}
	}
}
