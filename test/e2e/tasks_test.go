//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestEngines has Nomad's drivers and Podman give containers device nodes, by each injection.
func TestEngines(t *testing.T) {
	m := install(t, "h100x8")
	installHook(t, m)
	image := probeImage(t)
	docker, podman := startDocker(t), newPodman()
	for _, e := range []engine{docker, podman} {
		if err := e.try("load", "--input", image); err != nil {
			t.Fatal(err)
		}
	}
	writePolicy(t, "injections")
	config := onMachine(m, "nomad-history", `policy_file = "`+policyDir()+`/policy.yaml"
    cdi_hook_path = "`+hook(m)+`"`)
	n := engines{agent: launchClient(t, "nomad", config, engineConfig(t)), Machine: m}
	n.awaitReady(t)
	n.awaitGPUs(t, 8, 8)
	step(t, "variables and nodes for the driver exec", n.exec)
	step(t, "variables and nodes for the driver java", n.java)
	step(t, "variables for the driver docker, which asks for NVIDIA's runtime", n.runtime)
	step(t, "nodes for the driver docker", n.nodes)
	step(t, "nodes and libraries for the driver docker", n.libraries)
	step(t, "two device blocks", n.blocks)
	step(t, "CDI for Podman, by a task's variables", n.cdi)
	step(t, "the agent and then the task are restarted", n.restart)
	checkDriver(t, m)
}

// engines is a Nomad agent whose tasks run the probe.
type engines struct {
	*agent
	*simdriver.Machine
}

// dockerTask is for a task of the driver docker.
const dockerTask = `image = "localhost/probe:1"
network_mode = "none"`

func (n *engines) exec(t *testing.T) {
	n.runProbe(t, n.Machine, task{name: "isolated", driver: "exec", devices: []string{"nvidia/gpu/" + model}})
	ids, s := n.awaitProbe(t, "isolated")
	s.checkNodes(t, n.Machine, ids)
	s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", strings.Join(ids, ","))
}

func (n *engines) java(t *testing.T) {
	source, err := os.ReadFile("testdata/Probe.java")
	if err != nil {
		t.Fatal(err)
	}
	n.runProbe(t, n.Machine, task{
		name: "java", driver: "java", devices: []string{"nvidia/gpu/" + model}, config: `class = "/local/Probe.java"`,
		more: "template {\ndestination = \"local/Probe.java\"\ndata = <<END\n" + string(source) + "END\n}",
	})
	ids, s := n.awaitProbe(t, "java")
	s.checkNodes(t, n.Machine, ids)
	s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", strings.Join(ids, ","))
	n.remove(t, "java")
}

func (n *engines) runtime(t *testing.T) {
	n.runProbe(t, n.Machine, task{name: "refused", driver: "docker", devices: []string{"nvidia/gpu/" + model}, config: dockerTask})
	n.awaitRefused(t, "refused", `requested docker runtime "nvidia" was not found`)
	n.remove(t, "refused")
}

func (n *engines) nodes(t *testing.T) {
	n.runProbe(t, n.Machine, task{name: "nodes", driver: "docker", devices: []string{"nvidia/gpu/nodes"}, config: dockerTask, volume: true})
	ids, s := n.awaitProbe(t, "nodes")
	s.checkNodes(t, n.Machine, ids)
	s.checkVariable(t, "CUDA_VISIBLE_DEVICES", strings.Join(ids, ","))
	s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", "")
	s.checkLibrary(t, false)
	if !slices.Equal(s.mounts, []string{"volume"}) {
		t.Errorf("in the task's volume_mount is %q, want the file volume", s.mounts)
	}
}

// libraries expects the driver's libraries, and that Nomad drops the task's volume_mount because of their mounts.
func (n *engines) libraries(t *testing.T) {
	n.runProbe(t, n.Machine, task{name: "libraries", driver: "docker", devices: []string{"nvidia/gpu/libraries"}, config: dockerTask, volume: true})
	ids, s := n.awaitProbe(t, "libraries")
	s.checkNodes(t, n.Machine, ids)
	s.checkLibrary(t, true)
	if len(s.mounts) > 0 {
		t.Errorf("in the task's volume_mount is %q: Nomad has fixed what docs/policy.md describes for libraries and volume_mount", s.mounts)
	}
}

// blocks expects the nodes of both blocks' devices, and the variables of the last.
func (n *engines) blocks(t *testing.T) {
	n.runProbe(t, n.Machine, task{name: "two", driver: "docker", devices: []string{"nvidia/gpu/nodes", "nvidia/gpu/libraries"}, config: dockerTask})
	ids, s := n.awaitProbe(t, "two")
	s.checkNodes(t, n.Machine, ids)
	last := s.variables["CUDA_VISIBLE_DEVICES"]
	if len(ids) != 2 || !slices.Contains(ids, last) || last != n.UUID(4) && last != n.UUID(5) {
		t.Errorf("CUDA_VISIBLE_DEVICES=%q, want that of the last block's device, of %q", last, ids)
	}
}

// cdi passes the CDI names of the task's devices to Podman, as a job for Nomad's driver podman does in its "devices". Nomad
// evaluates the expression when the task has its devices' variables.
func (n *engines) cdi(t *testing.T) {
	argv := slices.Concat(newPodman()[1:], []string{"run", "--rm", "--network=none", "--cap-add=MKNOD", "--env=CUDA_VISIBLE_DEVICES", "--device"})
	config := fmt.Sprintf(`command = "podman"
args = "$${concat(%s, jsondecode(CDI_DEVICES), %s)}"`, escaped(argv), escaped(append([]string{"localhost/probe:1"}, probeCommand(t, n.Machine)...)))
	n.runProbe(t, n.Machine, task{name: "cdi", driver: "raw_exec", devices: []string{"nvidia/gpu/cdi"}, config: config})
	ids, s := n.awaitProbe(t, "cdi")
	s.checkNodes(t, n.Machine, ids)
	s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", void)
	s.checkVariable(t, "CUDA_VISIBLE_DEVICES", strings.Join(ids, ","))
	s.checkLibrary(t, true)
}

// list is a list in HCL.
func list(words []string) string { return `["` + strings.Join(words, `", "`) + `"]` }

// escaped is a list in HCL, in a string of HCL.
func escaped(words []string) string { return strings.ReplaceAll(list(words), `"`, `\"`) }

// restart shows nomad#9473: Nomad restores the environment of a task's devices after its agent has restarted, and no device
// nodes, so that the next process of the task has none. By a variable it can find out.
func (n *engines) restart(t *testing.T) {
	before, was := n.awaitProbe(t, "isolated")
	n.process.stop(t, syscall.SIGTERM)
	n.start()
	n.awaitReady(t)
	n.awaitGPUs(t, 8, 8)
	alloc, err := n.allocation("isolated")
	if err != nil {
		t.Fatal(err)
	}
	await(t, "the client to take orders again", 60*time.Second, func() error {
		_, err := command("nomad", "alloc", "restart", "-address="+nomadAPI, alloc.ID)
		return err
	})
	var s seen
	await(t, "another process of the task", 60*time.Second, func() error {
		output, err := alloc.log("gpus", "stdout")
		if count := strings.Count(output, "end\n"); err == nil && count != 2 {
			err = fmt.Errorf("it printed %q", output)
		}
		_, after, _ := strings.Cut(output, "end\n")
		if err == nil {
			s, err = parseSeen(after)
		}
		return err
	})
	t.Logf("after the restart it sees %v", s)
	if len(s.nodes) > 0 || !maps.Equal(s.variables, was.variables) {
		t.Errorf("with %q the task had %v, and after restarts it has %v; want only the variables. If it has the nodes, Nomad has "+
			"fixed nomad#9473: change the documents that mention it", before, was, s)
	}
	if before := was.variables["TANDEM_GPU_NODES"]; !strings.Contains(before, "/dev/nvidiactl") {
		t.Errorf("TANDEM_GPU_NODES=%q, want the nodes of the task", before)
	}
}
