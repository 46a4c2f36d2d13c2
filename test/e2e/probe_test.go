//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// mountFolder is where the strategy volume-mounts has a mount for each device.
const mountFolder = "/var/run/nvidia-container-devices"

// controlNodes are the nodes that every container with a GPU gets, and their numbers.
var controlNodes = map[string]string{
	"/dev/nvidiactl": "195:255", "/dev/nvidia-modeset": "195:254", "/dev/nvidia-uvm": "511:0", "/dev/nvidia-uvm-tools": "511:1",
}

// seen is what testdata/probe.c printed in a container.
type seen struct {
	nodes     map[string]string // by path: the number "major:minor"
	denied    []string          // paths of nodes that may not be opened
	made      map[string]bool   // by number of a node that the container made itself: may it be opened?
	mounts    []string          // names in mountFolder
	libraries map[string]string // "loaded", or the linker's error
	variables map[string]string
}

func parseSeen(output string) (seen, error) {
	s := seen{nodes: map[string]string{}, made: map[string]bool{}, libraries: map[string]string{}, variables: map[string]string{}}
	done := false
	for line := range strings.Lines(output) {
		kind, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		name, value, _ := strings.Cut(rest, " ")
		number, answer, _ := strings.Cut(value, " ")
		switch kind {
		case "node":
			s.nodes[name] = number
			if answer == denied {
				s.denied = append(s.denied, name)
			}
		case "made":
			if strings.HasPrefix(answer, "mknod") {
				return s, errors.New(line)
			}
			s.made[number] = answer != denied
		case "mount":
			s.mounts = append(s.mounts, name)
		case "library":
			s.libraries[name] = value
		case "variable":
			s.variables[name] = value
		case "end":
			done = true
		}
	}
	slices.Sort(s.mounts)
	if !done {
		return s, fmt.Errorf("the probe has not finished: %q", output)
	}
	return s, nil
}

// String is the same for containers that see the same.
func (s seen) String() string {
	var open []string
	for number, may := range s.made {
		if may {
			open = append(open, number)
		}
	}
	slices.Sort(open)
	return fmt.Sprintf("nodes %v, of which it may not open %q; made %d nodes and may open %q; %v %v %q",
		s.nodes, s.denied, len(s.made), open, s.libraries, s.variables, s.mounts)
}

// denied is the kernel's answer to a process whose device controller does not allow a number. No driver of this machine has the
// numbers of NVIDIA's devices, so that a process which may open them gets another error.
const denied = "EPERM"

// deviceNodes are the nodes of each GPU and MIG instance of the machine and their numbers, by UUID.
func deviceNodes(t *testing.T, m *simdriver.Machine) map[string]map[string]string {
	t.Helper()
	nodes, err := m.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	return nodes
}

// numbers are those of all devices of the machine, in order.
func numbers(t *testing.T, m *simdriver.Machine) []string {
	t.Helper()
	set := map[string]bool{}
	for _, nodes := range deviceNodes(t, m) {
		for _, number := range nodes {
			set[number] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

// checkPresent fails unless the container has just the control nodes and those of the devices, and may open all of them. It returns the numbers.
func (s seen) checkPresent(t *testing.T, m *simdriver.Machine, ids []string) []string {
	t.Helper()
	want := maps.Clone(controlNodes)
	for _, id := range ids {
		maps.Copy(want, deviceNodes(t, m)[id])
	}
	if len(ids) == 0 || !maps.Equal(s.nodes, want) || len(s.denied) > 0 {
		t.Errorf("with the devices %q the container has the nodes %v and may not open %q; want %v", ids, s.nodes, s.denied, want)
	}
	return slices.Collect(maps.Values(want))
}

// checkNodes also fails if the container may open another device of the machine, by a node that it makes.
func (s seen) checkNodes(t *testing.T, m *simdriver.Machine, ids []string) {
	t.Helper()
	allowed := s.checkPresent(t, m, ids)
	for _, number := range numbers(t, m) {
		open, made := s.made[number]
		if want := slices.Contains(allowed, number); !made || open != want {
			t.Errorf("a node %s that the container made (%v) may be opened: %v, want %v", number, made, open, want)
		}
	}
}

func (s seen) checkVariable(t *testing.T, name, want string) {
	t.Helper()
	if got := s.variables[name]; got != want {
		t.Errorf("%s=%q, want %q", name, got, want)
	}
}

// checkLibrary fails unless libcuda.so.1 can be loaded, or cannot.
func (s seen) checkLibrary(t *testing.T, want bool) {
	t.Helper()
	if answer := s.libraries["libcuda.so.1"]; answer == "" || (answer == "loaded") != want {
		t.Errorf("libcuda.so.1: %q; want it loaded: %v", answer, want)
	}
}

// buildProbe compiles testdata/probe.c.
func buildProbe(t *testing.T) string {
	t.Helper()
	program := filepath.Join(stateDir(), "probe")
	must(t, "cc", "-Wall", "-Werror", "-O1", "-o", program, "testdata/probe.c")
	return program
}

// probeCommand is the command line of the probe in a container.
func probeCommand(t *testing.T, m *simdriver.Machine) []string {
	t.Helper()
	command := []string{"/usr/bin/probe", "libcuda.so.1", "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "TANDEM_GPU_NODES"}
	return append(command, numbers(t, m)...)
}

// probeImage returns an image archive of the probe and the libraries that it links.
func probeImage(t *testing.T) string {
	t.Helper()
	return saveImage(t, "localhost/probe:1", nil, buildProbe(t))
}

// probe creates a pod that runs the probe on these resources. A container that ends is started again.
func (c *cluster) probe(t *testing.T, m *simdriver.Machine, name string, limits map[string]int, env map[string]string) {
	t.Helper()
	c.apply(t, map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name}, "spec": probeSpec(t, m, limits, env),
	})
}

// deployProbe creates a deployment of pods that run the probe on one GPU each, and replaces those that kubelet rejects.
func (c *cluster) deployProbe(t *testing.T, m *simdriver.Machine, name string, replicas int) {
	t.Helper()
	labels := map[string]any{"app": name}
	c.apply(t, map[string]any{
		"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"replicas": replicas, "selector": map[string]any{"matchLabels": labels},
			"template": map[string]any{
				"metadata": map[string]any{"labels": labels}, "spec": probeSpec(t, m, map[string]int{gpuResource: 1}, nil),
			},
		},
	})
}

func probeSpec(t *testing.T, m *simdriver.Machine, limits map[string]int, env map[string]string) map[string]any {
	t.Helper()
	var variables []map[string]string
	for name, value := range env {
		variables = append(variables, map[string]string{"name": name, "value": value})
	}
	return map[string]any{
		"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false, "enableServiceLinks": false,
		"containers": []any{map[string]any{
			"name": "gpus", "image": "localhost/probe:1", "imagePullPolicy": "Never",
			"command": probeCommand(t, m), "env": variables, "resources": map[string]any{"limits": limits},
		}},
	}
}

func (c *cluster) apply(t *testing.T, object map[string]any) {
	t.Helper()
	must(t, "kubectl", "apply", "-f", write(t, "object.json", encode(t, object)))
}

// awaitProbe waits until the container that the pod runs now has printed what it can do, and kubelet shows its devices.
func (c *cluster) awaitProbe(t *testing.T, name string, count int) (p pod, s seen) {
	t.Helper()
	c.awaitRunning(t, name)
	await(t, "the devices and the log of pod "+name, 60*time.Second, func() (err error) {
		if p, err = c.pod(name); err == nil && len(p.health()) != count {
			err = fmt.Errorf("its status shows %q", p.health())
		}
		output, err2 := command("kubectl", "logs", name)
		s, err2 = parseOr(output, err2)
		return errors.Join(err, err2)
	})
	t.Logf("pod %s has %q and sees %v", name, p.ids(), s)
	return p, s
}

func parseOr(output string, err error) (seen, error) {
	if err != nil {
		return seen{}, err
	}
	return parseSeen(output)
}

// installHook puts NVIDIA's program for the hooks of a CDI specification on the machine.
func installHook(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	installProgram(t, "nvidia-cdi-hook", hook(m))
}

func installProgram(t *testing.T, name, path string) {
	t.Helper()
	built, err := exec.LookPath(name)
	if err != nil {
		t.Fatal(err)
	}
	must(t, "install", "-D", built, path)
}

// hook is where the machine has NVIDIA's program for hooks.
func hook(m *simdriver.Machine) string { return filepath.Join(m.Root, "usr/bin/nvidia-cdi-hook") }
