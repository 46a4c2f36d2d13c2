package nomad

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/hcl"
	"github.com/hashicorp/nomad/nomad/mock"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/nomad/structs/config"
)

// machine is a simulated machine; "" is one without a driver.
type machine string

func install(t testing.TB, name string) machine {
	t.Helper()
	m := machine(t.TempDir())
	cmd := exec.Command(bin.simctl, "install", string(m), name)
	cmd.Dir = "../../.." // it builds the library with the header of go-nvml, a dependency of that module
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("simctl install: %v\n%s", err, out)
	}
	return m
}

// ctl runs simctl on the machine.
func (m machine) ctl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command(bin.simctl, append([]string{"-machine", string(m)}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("simctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// readings returns how often the plugin has read the whole machine.
func (m machine) readings(t testing.TB) (n int) {
	t.Helper()
	for line := range strings.Lines(m.ctl(t, "calls")) {
		var count int
		var name string
		if _, err := fmt.Sscan(line, &count, &name); err == nil && strings.HasPrefix(name, "nvmlDeviceGetCount") {
			n += count
		}
	}
	return n
}

// config returns the config block for the machine, with more keys: the state directory is on the machine, and GPUs recover
// soon.
func (m machine) config(more map[string]any) map[string]any {
	keys := map[string]any{
		"driver_root": "/nowhere", "fingerprint_period": "1s",
		"state_dir": "", "kernel_log": "off", "health_period": "1s", "recovery_dwell": "1s",
	}
	if m != "" {
		keys["driver_root"], keys["state_dir"] = string(m), filepath.Join(string(m), "state")
		keys["sysfs_root"], keys["procfs_root"] = filepath.Join(string(m), "sys"), filepath.Join(string(m), "proc")
	}
	maps.Copy(keys, more)
	return keys
}

// policy writes a policy file for the machine, and returns the key with its path.
func (m machine) policy(t testing.TB, text string) map[string]any {
	t.Helper()
	path := filepath.Join(string(m), "policy.yaml")
	must(t, os.WriteFile(path, []byte("version: v1\n"+text), 0o644))
	return map[string]any{"policy_file": path}
}

// edit replaces a text in the description of the machine, on which no plugin runs.
func (m machine) edit(t testing.TB, old, text string) {
	t.Helper()
	path := filepath.Join(string(m), "machine.conf")
	was, err := os.ReadFile(path)
	must(t, err)
	is := strings.ReplaceAll(string(was), old, text)
	if is == string(was) {
		t.Fatalf("%q is not in %s", old, path)
	}
	must(t, os.WriteFile(path, []byte(is), 0o644))
}

// uuid returns the UUID of the GPU in a slot.
func (m machine) uuid(t testing.TB, slot int) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(string(m), "machine.conf"))
	must(t, err)
	var all []string
	for line := range strings.Lines(string(text)) {
		if id, ok := strings.CutPrefix(line, "uuid = "); ok {
			all = append(all, strings.TrimSpace(id))
		}
	}
	return all[slot]
}

// block is a config block as the agent reads it from its configuration file.
func block(t *testing.T, text string) map[string]any {
	t.Helper()
	var agent struct {
		Plugins []*config.PluginConfig `hcl:"plugin"`
	}
	must(t, hcl.Decode(&agent, `plugin "nomad-gpu" { config { `+text+` } }`))
	return agent.Plugins[0].Config
}

// node is a node of a cluster that has devices.
func node(devices []*structs.NodeDeviceResource) *structs.Node {
	n := mock.Node()
	n.NodeResources.Devices = devices
	return n
}

// classOf returns the computed class of a node with these devices.
func classOf(t *testing.T, groups []*structs.NodeDeviceResource) string {
	t.Helper()
	n := node(groups)
	must(t, n.ComputeClass())
	return n.ComputedClass
}

func ask(name string, count uint64, constraints ...*structs.Constraint) *structs.RequestedDevice {
	return &structs.RequestedDevice{Name: name, Count: count, Constraints: constraints}
}

// attr is a constraint on an attribute of the device, or on another property if it contains a dot.
func attr(name, operand, value string) *structs.Constraint {
	if !strings.HasPrefix(name, "device.") {
		name = "device.attr." + name
	}
	return &structs.Constraint{LTarget: "${" + name + "}", Operand: operand, RTarget: value}
}

// fits reports whether a job that requests this is placed on the empty node. Nomad's device checker must agree.
func fits(t *testing.T, n *structs.Node, request *structs.RequestedDevice) bool {
	t.Helper()
	checker := newDeviceChecker(newEvalContext(t))
	checker.SetTaskGroup(&structs.TaskGroup{Tasks: []*structs.Task{{Resources: &structs.Resources{Devices: []*structs.RequestedDevice{request}}}}})
	placed := newCluster(t, n).place(t, request) != nil
	if got := checker.Feasible(n); got != placed {
		t.Errorf("%s: feasible %t, placed %t", request.Name, got, placed)
	}
	return placed
}

// cluster is Nomad's scheduler over nodes, with what it has placed so far.
type cluster struct {
	ctx   *evalContext
	nodes []*structs.Node
}

func newCluster(t *testing.T, nodes ...*structs.Node) *cluster {
	t.Helper()
	for _, n := range nodes {
		must(t, n.ComputeClass())
	}
	return &cluster{newEvalContext(t), nodes}
}

// place places a job with one task, and returns the devices of the task; nil if it is blocked.
func (c *cluster) place(t *testing.T, asks ...*structs.RequestedDevice) []*structs.AllocatedDeviceResource {
	t.Helper()
	j := mock.Job()
	group := j.TaskGroups[0]
	group.Networks = nil
	resources := group.Tasks[0].Resources
	resources.Networks, resources.Devices = nil, asks
	resources.CPU, resources.MemoryMB = 20, 20
	c.ctx.Reset()
	stack := newGenericStack(false, c.ctx)
	stack.SetNodes(slices.Clone(c.nodes)) // it shuffles them
	stack.SetJob(j)
	got := stack.Select(group, &selectOptions{})
	if got == nil {
		return nil
	}
	a := mock.Alloc()
	a.NodeID, a.Job, a.JobID = got.Node.ID, j, j.ID
	a.AllocatedResources = &structs.AllocatedResources{Tasks: got.TaskResources}
	c.ctx.Plan().AppendAlloc(a, nil)
	devices := got.TaskResources[group.Tasks[0].Name].Devices
	if structs.NewDeviceAccounter(got.Node).AddAllocs(c.ctx.Plan().NodeAllocation[got.Node.ID]) {
		t.Errorf("a device is allocated twice: %+v", devices)
	}
	return devices
}

// exhausted returns the reasons of the last refusal.
func (c *cluster) exhausted() string {
	return strings.Join(slices.Concat(slices.Collect(maps.Keys(c.ctx.Metrics().DimensionExhausted)), slices.Collect(maps.Keys(c.ctx.Metrics().ConstraintFiltered))), "; ")
}

// group returns the group of a type and with a part of a name.
func group(t testing.TB, groups []*structs.NodeDeviceResource, kind, name string) *structs.NodeDeviceResource {
	t.Helper()
	for _, g := range groups {
		if g.Type == kind && strings.Contains(g.Name, name) {
			return g
		}
	}
	t.Fatalf("no %s group %q among %v", kind, name, groups)
	return nil
}

// names returns the group of each device.
func names(groups []*structs.NodeDeviceResource) map[string]string {
	of := map[string]string{}
	for _, g := range groups {
		for _, d := range g.Instances {
			of[d.ID] = g.Type + "/" + g.Name
		}
	}
	return of
}

// gpus returns the GPUs of devices, each with the number of its devices.
func gpus(ids []string) map[string]int {
	n := map[string]int{}
	for _, id := range ids {
		gpu, _, _ := strings.Cut(id, "::")
		n[gpu]++
	}
	return n
}
