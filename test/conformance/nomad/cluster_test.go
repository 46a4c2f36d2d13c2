package nomad

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/nomad/mock"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/scheduler/feasible"
)

// cluster is Nomad's scheduler over nodes, with what it has placed so far.
type cluster struct {
	ctx   *feasible.EvalContext
	nodes []*structs.Node
}

func newCluster(t *testing.T, nodes ...*structs.Node) *cluster {
	t.Helper()
	for _, n := range nodes {
		if err := n.ComputeClass(); err != nil {
			t.Fatal(err)
		}
	}
	_, ctx := feasible.MockContext(t)
	return &cluster{ctx, nodes}
}

// place has a job placed, and returns the devices that its task is given; none if it is blocked.
func (c *cluster) place(t *testing.T, asks ...*structs.RequestedDevice) []*structs.AllocatedDeviceResource {
	t.Helper()
	j := job(asks...)
	j.TaskGroups[0].Tasks[0].Resources.CPU, j.TaskGroups[0].Tasks[0].Resources.MemoryMB = 20, 20
	c.ctx.Reset()
	stack := feasible.NewGenericStack(false, c.ctx)
	stack.SetNodes(append([]*structs.Node(nil), c.nodes...)) // it shuffles them
	stack.SetJob(j)
	got := stack.Select(j.TaskGroups[0], &feasible.SelectOptions{})
	if got == nil {
		return nil
	}
	a := mock.Alloc()
	a.NodeID, a.Job, a.JobID = got.Node.ID, j, j.ID
	a.AllocatedResources = &structs.AllocatedResources{Tasks: got.TaskResources}
	c.ctx.Plan().AppendAlloc(a, nil)
	if structs.NewDeviceAccounter(got.Node).AddAllocs(c.ctx.Plan().NodeAllocation[got.Node.ID]) {
		t.Errorf("a device is given out twice: %+v", got.TaskResources["web"].Devices)
	}
	return got.TaskResources["web"].Devices
}

// exhausted are the reasons of the last refusal, in Nomad's words.
func (c *cluster) exhausted() string {
	var all []string
	for reason := range c.ctx.Metrics().DimensionExhausted {
		all = append(all, reason)
	}
	for reason := range c.ctx.Metrics().ConstraintFiltered {
		all = append(all, reason)
	}
	return strings.Join(all, "; ")
}

// policy writes a policy file for the machine, and returns the keys that name it.
func (m machine) policy(t testing.TB, text string) map[string]any {
	t.Helper()
	path := filepath.Join(string(m), "policy.yaml")
	if err := os.WriteFile(path, []byte("version: v1\n"+text), 0o644); err != nil {
		t.Fatal(err)
	}
	return map[string]any{"policy_file": path}
}

// edit changes the machine before anybody looks at it.
func (m machine) edit(t testing.TB, old, text string) {
	t.Helper()
	path := filepath.Join(string(m), "machine.conf")
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	is := strings.ReplaceAll(string(was), old, text)
	if is == string(was) {
		t.Fatalf("%q is not in %s", old, path)
	}
	if err := os.WriteFile(path, []byte(is), 0o644); err != nil {
		t.Fatal(err)
	}
}

// group is the one of a type and with a part of a name.
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

// gpus are the GPUs of devices, each as often as it occurs.
func gpus(ids []string) map[string]int {
	n := map[string]int{}
	for _, id := range ids {
		gpu, _, _ := strings.Cut(id, "::")
		n[gpu]++
	}
	return n
}
