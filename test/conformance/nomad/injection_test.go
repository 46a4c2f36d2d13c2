package nomad

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	clientconfig "github.com/hashicorp/nomad/client/config"

	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/plugins/drivers"
)

// pools has a pool for each injection.
const pools = `policy:
  rules:
  - {select: {index: [0, 1]}, name: runtime}
  - {select: {index: [2, 3]}, name: nodes, injection: devices}
  - {select: {index: [4, 5]}, name: names, injection: cdi}
  - {select: {index: 6}, name: both, injection: [variables, cdi]}
  - {select: {index: 7}, name: files, injection: [devices, libraries]}
`

// withPools returns an agent with a pool for each injection, and the folder of its CDI specification.
func withPools(t *testing.T) (m machine, a *agent, groups []*structs.NodeDeviceResource, folder string) {
	t.Helper()
	m = install(t, "h100x8")
	keys := m.policy(t, pools)
	folder = filepath.Join(string(m), "cdi")
	keys["cdi_dir"] = folder
	a = startAgent(t, m, keys)
	return m, a, a.devices(t, 8, 8), folder
}

// nodesOf returns the device nodes of a GPU, without those that a container runtime may leave out.
func nodesOf(gpu string) []string {
	return []string{"/dev/nvidia-uvm", "/dev/nvidia" + gpu, "/dev/nvidiactl"}
}

// Two device blocks in one task: the task has the nodes of both, and the variables of the last.
func Test39TwoDeviceBlocks(t *testing.T) {
	m, a, groups, _ := withPools(t)
	for name, tc := range map[string]struct {
		pool, variable string
	}{
		"variables": {"runtime", "NVIDIA_VISIBLE_DEVICES"},
		"devices":   {"nodes", "CUDA_VISIBLE_DEVICES"},
		"cdi":       {"names", "CUDA_VISIBLE_DEVICES"},
	} {
		g := group(t, groups, "gpu", tc.pool)
		var both []*structs.AllocatedDeviceResource
		for i := range 2 {
			both = append(both, &structs.AllocatedDeviceResource{Vendor: g.Vendor, Type: g.Type, Name: g.Name, DeviceIDs: []string{g.Instances[i].ID}})
		}
		r := newRecorder(t)
		k := a.newTask(t, r, both, nil)
		k.run(t)
		got := r.next(t)
		if last := g.Instances[1].ID; got.Env[tc.variable] != last || got.DeviceEnv[tc.variable] != last {
			t.Errorf("%s: %s", name, got.Env[tc.variable])
		} else if names := got.Env["CDI_DEVICES"]; name == "cdi" && names != `["`+kind+"="+last+`"]` {
			t.Errorf("%s: %s", name, names)
		}
		if !m.hasNodes() || name == "cdi" {
			continue
		}
		nodes, _ := paths(got)
		first := map[string]string{"runtime": "0", "nodes": "2"}[tc.pool]
		if !contains(nodes, nodesOf(first)) || strings.Count(strings.Join(nodes, " "), "/dev/nvidiactl") != 2 {
			t.Errorf("%s: nodes %v", name, nodes)
		}
		if named := got.Env["TANDEM_GPU_NODES"]; strings.Contains(named, "/dev/nvidia"+first) {
			t.Errorf("%s: TANDEM_GPU_NODES has the nodes of the first block, too: %s", name, named)
		}
	}
}

// After a restart of the Nomad agent, a task that restarts has the variables, and no nodes: nomad#9473. This test fails when that
// is mended, and then docs/operations.md changes.
func Test40NodesAreLostWithTheAgent(t *testing.T) {
	m, a, groups, _ := withPools(t)
	if !m.hasNodes() {
		t.Skip("SKIPPED: without root the simulated machine has no device nodes")
	}
	r := newRecorder(t)
	k := a.newTask(t, r, newCluster(t, node(groups)).place(t, ask("nvidia/gpu/nodes", 1)), nil)
	k.run(t)
	began := r.next(t)
	k.restart(t)
	again := r.next(t)
	k.restartAgent(t)
	k.restart(t)
	restored := r.next(t)
	nodes, _ := paths(began)
	if got, _ := paths(again); len(nodes) == 0 || !slices.Equal(got, nodes) {
		t.Errorf("nodes %v, after a restart of the task %v", nodes, got)
	}
	if got, _ := paths(restored); got != nil {
		t.Errorf("nomad#9473 is mended: nodes %v", got)
	}
	for _, name := range []string{"CUDA_VISIBLE_DEVICES", "TANDEM_GPU_NODES"} {
		if restored.Env[name] != began.Env[name] || began.Env[name] == "" {
			t.Errorf("%s=%s, after a restart of the agent %s", name, began.Env[name], restored.Env[name])
		}
	}
	if want := strings.Split(began.Env["TANDEM_GPU_NODES"], ":"); !contains(nodes, want) {
		t.Errorf("TANDEM_GPU_NODES has %v, the task has %v", want, nodes)
	}
}

// A task of the exec driver opens its nodes and no others. When it restarts after a restart of the Nomad agent, it finds that they
// are missing.
func Test38ExecOpensItsNodes(t *testing.T) {
	m, a, groups, _ := withPools(t)
	if !m.hasNodes() {
		t.Skip("SKIPPED: without root the simulated machine has no device nodes, and the exec driver does not start tasks")
	}
	k := a.execTask(t, newCluster(t, node(groups)).place(t, ask("nvidia/gpu/nodes", 1)), nil)
	k.run(t)
	got := k.output(t)
	gpu := strings.TrimPrefix(strings.Fields(got)[0], "GPU-")
	number := "2"
	if gpu == strings.TrimPrefix(m.uuid(t, 3), "GPU-") {
		number = "3"
	}
	var want []string
	for _, path := range nodesOf(number) {
		want = append(want, "open "+path)
	}
	if lines := strings.Split(got, "\n"); !contains(lines, want) || strings.Contains(got, "missing") || strings.Contains(got, "not permitted: /dev/nvidia") {
		t.Errorf("got:\n%s\nwant %q", got, want)
	}
	if !strings.Contains(got, "not permitted: /local/foreign") { // a node of another GPU that the task has made
		t.Errorf("the task opens another GPU:\n%s", got)
	}

	k.restartAgent(t)
	k.restart(t)
	if got := k.output(t); !contains(strings.Split(got, "\n"), []string{"missing /dev/nvidia" + number, "missing /dev/nvidiactl", "GPU-" + gpu}) {
		t.Errorf("after a restart of the agent:\n%s", got)
	}
}

// execTask returns a task of the exec driver with the script.
func (a *agent) execTask(t *testing.T, devices []*structs.AllocatedDeviceResource, env map[string]string) *task {
	t.Helper()
	return a.newTask(t, driver(t, "exec"), devices, func(g *structs.TaskGroup, c *clientconfig.Config) {
		g.Tasks[0].Driver, g.Tasks[0].Env = "exec", env
		g.Tasks[0].Config = map[string]any{
			"command": "/bin/sh", "args": []string{"-c", script + foreign},
			"cap_drop": []string{"all"}, "cap_add": []string{"mknod"}, // this process may not have all that the driver's default has
		}
		c.ChrootEnv = chroot(t)
	})
}

// A task of the raw_exec driver has the variables; CUDA_VISIBLE_DEVICES is all that keeps it from other GPUs.
func Test38RawExecHasTheVariables(t *testing.T) {
	m, a, groups, _ := withPools(t)
	k := a.newTask(t, driver(t, "raw_exec"), newCluster(t, node(groups)).place(t, ask("nvidia/gpu/nodes", 2)), func(g *structs.TaskGroup, _ *clientconfig.Config) {
		g.Tasks[0].Driver = "raw_exec"
		g.Tasks[0].Config = map[string]any{"command": "/bin/sh", "args": []string{"-c", script + end}}
	})
	k.run(t)
	if got, want := strings.Fields(k.output(t))[0], m.uuid(t, 2)+","+m.uuid(t, 3); got != want {
		t.Errorf("CUDA_VISIBLE_DEVICES=%s, want %s", got, want)
	}
}

// hasNodes reports whether the machine has device nodes; without root they are files.
func (m machine) hasNodes() bool { return os.Getuid() == 0 }

// contains reports whether all has every part.
func contains(all, parts []string) bool {
	return !slices.ContainsFunc(parts, func(part string) bool { return !slices.Contains(all, part) })
}

// paths returns the paths that the nodes and the mounts of a task have in it.
func paths(c *drivers.TaskConfig) (nodes, mounts []string) {
	for _, d := range c.Devices {
		nodes = append(nodes, d.TaskPath)
	}
	for _, m := range c.Mounts {
		mounts = append(mounts, m.TaskPath)
	}
	return nodes, mounts
}

// chroot is the part of this node that a script needs.
func chroot(t *testing.T) map[string]string {
	t.Helper()
	files := map[string]string{}
	add := func(path string) {
		real, err := filepath.EvalSymlinks(path)
		must(t, err)
		files[real] = path
	}
	programs := []string{"/bin/sh", "/bin/sleep", "/bin/mknod"}
	libraries, err := exec.Command("ldd", programs...).Output()
	must(t, err)
	for word := range strings.FieldsSeq(string(libraries)) {
		if strings.HasPrefix(word, "/") && !strings.HasSuffix(word, ":") {
			add(word)
		}
	}
	for _, path := range append(programs, "/etc/passwd") { // in which Nomad 1.10 looks the user up
		add(path)
	}
	return files
}
