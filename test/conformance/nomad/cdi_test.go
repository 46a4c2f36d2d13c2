package nomad

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	clientconfig "github.com/hashicorp/nomad/client/config"
	"github.com/hashicorp/nomad/jobspec2"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"
)

const kind = "nomad.device-plugin.nvidia.com/gpu"

// defined returns the names of the devices in the CDI specification of a folder.
func defined(t *testing.T, folder string) (names []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, strings.ReplaceAll(kind, "/", "-")+".json"))
	must(t, err)
	var spec struct {
		Kind    string
		Devices []struct{ Name string }
	}
	must(t, json.Unmarshal(text, &spec))
	for _, d := range spec.Devices {
		names = append(names, spec.Kind+"="+d.Name)
	}
	return names
}

// What a driver gets for a task, by the injection of the pool. Nomad's docker driver requires NVIDIA's container runtime if
// NVIDIA_VISIBLE_DEVICES is among the variables of devices (drivers/docker/driver.go, createContainerConfig).
func Test38EachInjection(t *testing.T) {
	m, a, groups, folder := withPools(t)
	for pool, want := range map[string]struct{ runtime, nodes, cdi, mounts bool }{
		"runtime": {runtime: true, nodes: true},
		"nodes":   {nodes: true},
		"names":   {cdi: true},
		"both":    {runtime: true, nodes: true, cdi: true},
		"files":   {nodes: true, mounts: true},
	} {
		r := newRecorder(t)
		allocated := newCluster(t, node(groups)).place(t, ask("nvidia/gpu/"+pool, 1))
		a.newTask(t, r, allocated, nil).run(t)
		got, id := r.next(t), allocated[0].DeviceIDs[0]
		variable, other := "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"
		if want.runtime {
			variable, other = other, variable
		}
		_, unwanted := got.DeviceEnv[other]
		if got.Env[variable] != id || got.DeviceEnv[variable] != id || unwanted {
			t.Errorf("%s: %v", pool, got.DeviceEnv)
		}
		nodes, mounts := paths(got)
		if (len(nodes) > 0) != (want.nodes && m.hasNodes()) || (len(mounts) > 0) != want.mounts || (got.Env["TANDEM_GPU_NODES"] != "") != (len(nodes) > 0) {
			t.Errorf("%s: nodes %v, mounts %v", pool, nodes, mounts)
		}
		var names []string
		if text := got.Env["CDI_DEVICES"]; text != "" {
			if err := json.Unmarshal([]byte(text), &names); err != nil {
				t.Errorf("%s: %s: %v", pool, text, err)
			}
		}
		if (names != nil) != want.cdi || want.cdi && !slices.Equal(names, []string{kind + "=" + id}) || !contains(defined(t, folder), names) {
			t.Errorf("%s: CDI devices %v, of %v", pool, names, defined(t, folder))
		}
		for _, mount := range got.Mounts {
			if _, err := os.Stat(mount.HostPath); err != nil || strings.HasPrefix(mount.TaskPath, string(m)) {
				t.Errorf("%s: mount %+v: %v", pool, mount, err)
			}
		}
		if want.mounts && !slices.ContainsFunc(mounts, func(path string) bool { return filepath.Base(path) == "libcuda.so.1" }) {
			t.Errorf("%s: no libcuda.so.1 among %v", pool, mounts)
		}
	}
}

// There is a CDI specification only while a pool needs one.
func Test38SpecificationOnDemand(t *testing.T) {
	m := install(t, "h100x8")
	keys := m.policy(t, "policy: {rules: [{select: {index: 0}, injection: devices, name: nodes}]}\n")
	folder := filepath.Join(string(m), "cdi")
	keys["cdi_dir"] = folder
	a := startAgent(t, m, keys)
	a.devices(t, 8, 8)
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("there is a folder: %v", err)
	}
	m.policy(t, pools)
	a.signal(t, syscall.SIGHUP)
	groups := a.until(t, "the new pools", func(g []*structs.NodeDeviceResource) bool {
		return slices.ContainsFunc(g, func(g *structs.NodeDeviceResource) bool { return g.Name == "names" && g.Instances[0].Healthy })
	})
	g := group(t, groups, "gpu", "names")
	if r, err := a.reserve(g, g.Instances[0].ID); err != nil || !strings.Contains(r.Envs["CDI_DEVICES"], g.Instances[0].ID) {
		t.Errorf("%v, %v", r, err)
	}
	if names := defined(t, folder); !contains(names, []string{kind + "=" + g.Instances[0].ID}) {
		t.Errorf("defined: %v", names)
	}
}

// A reservation with mounts makes Nomad drop the volume_mounts of a task at its first start, and one without does not. A restart
// under the same agent has both.
func Test41VolumeMounts(t *testing.T) {
	_, a, groups, _ := withPools(t)
	for pool, kept := range map[string]bool{"runtime": true, "nodes": true, "names": true, "both": true, "files": false} {
		r := newRecorder(t)
		data := t.TempDir()
		k := a.newTask(t, r, newCluster(t, node(groups)).place(t, ask("nvidia/gpu/"+pool, 1)), func(g *structs.TaskGroup, c *clientconfig.Config) {
			g.Volumes = map[string]*structs.VolumeRequest{"data": {Name: "data", Type: structs.VolumeTypeHost, Source: "data"}}
			g.Tasks[0].VolumeMounts = []*structs.VolumeMount{{Volume: "data", Destination: "/data", PropagationMode: structs.VolumeMountPropagationPrivate}}
			c.Node.HostVolumes = map[string]*structs.ClientHostVolumeConfig{"data": {Name: "data", Path: data}}
		})
		k.run(t)
		_, first := paths(r.next(t))
		k.restart(t)
		_, second := paths(r.next(t))
		if slices.Contains(first, "/data") != kept || !slices.Contains(second, "/data") || !contains(second, first) {
			t.Errorf("%s: mounts %v, after a restart %v", pool, first, second)
		}
	}
}

// A task of the exec driver has the driver's files in its chroot, and the nodes. It has neither when it restarts after a restart of
// the Nomad agent.
func Test41LibrariesInAChroot(t *testing.T) {
	m, a, groups, _ := withPools(t)
	if !m.hasNodes() {
		t.Skip("SKIPPED: without root the exec driver does not start tasks")
	}
	allocated := newCluster(t, node(groups)).place(t, ask("nvidia/gpu/files", 1))
	reservation, err := a.dm.Reserve(allocated[0])
	must(t, err)
	var files []string
	for _, mount := range reservation.Mounts {
		files = append(files, mount.TaskPath)
	}
	k := a.execTask(t, allocated, map[string]string{"FILES": strings.Join(files, ":")})
	k.run(t)
	if got := k.output(t); strings.Contains(got, "missing") || !strings.Contains(got, "open /dev/nvidia7") {
		t.Errorf("got:\n%s", got)
	}
	k.restartAgent(t)
	k.restart(t)
	if got := k.output(t); strings.Count(got, "missing") != len(files)+len(nodesOf("7")) {
		t.Errorf("after a restart of the agent, of %d files:\n%s", len(files), got)
	}
}

// podman is a part of the configuration of nomad-driver-podman (config.go of 0.6.5).
var podman = hclspec.NewObject(map[string]*hclspec.Spec{
	"image":   hclspec.NewAttr("image", "string", true),
	"devices": hclspec.NewAttr("devices", "list(string)", false),
})

// The recipe of docs/policy.md: a job passes the names of its CDI devices to the podman driver. Nomad's command line leaves the
// function to the client, which calls it with the variables of the reservation; so the task has its devices also after a restart
// of the agent.
func Test42PodmanRecipe(t *testing.T) {
	_, a, groups, _ := withPools(t)
	text, err := os.ReadFile("../../../docs/policy.md")
	must(t, err)
	_, rest, _ := strings.Cut(string(text), "```hcl\ntask \"train\" {\n  driver = \"podman\"")
	recipe, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("docs/policy.md has no recipe for podman")
	}
	job, err := jobspec2.Parse("job.hcl", strings.NewReader("job \"j\" {\n group \"g\" {\n task \"train\" {\n driver = \"podman\""+recipe+"}\n}\n"))
	must(t, err)
	spec := job.TaskGroups[0].Tasks[0]
	request := spec.Resources.Devices[0]
	r := newRecorder(t)
	r.schema = podman
	k := a.newTask(t, r, newCluster(t, node(groups)).place(t, ask(request.Name, *request.Count)), func(g *structs.TaskGroup, _ *clientconfig.Config) {
		g.Tasks[0].Config = spec.Config
	})
	k.run(t)
	want := []string{}
	for _, d := range group(t, groups, "gpu", "names").Instances {
		want = append(want, kind+"="+d.ID)
	}
	for _, when := range []string{"first start", "restart", "restart after a restart of the agent"} {
		var got struct {
			Devices []string `codec:"devices"`
		}
		must(t, r.next(t).DecodeDriverConfig(&got))
		if slices.Sort(want); !slices.Equal(slices.Sorted(slices.Values(got.Devices)), want) {
			t.Errorf("%s: devices %q, want %q", when, got.Devices, want)
		}
		if when == "restart" {
			k.restartAgent(t)
		}
		if when != "restart after a restart of the agent" {
			k.restart(t)
		}
	}
}
