//go:build e2e

package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	cdiFile     = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
	cdiKind     = "k8s.device-plugin.nvidia.com/gpu"
	migResource = "nvidia.com/mig-1g.10gb"
)

// startCDI starts a cluster, with k8s-gpu on a machine that has NVIDIA's hook program, and components of deploy.
func startCDI(t *testing.T, r runtime, machine string, components ...string) (*cluster, *simdriver.Machine) {
	t.Helper()
	parts := []string{"parts/cdi"}
	for _, name := range components {
		parts = append(parts, shippedPart(t, name))
	}
	m := install(t, machine)
	installHook(t, m)
	c := startClusterOn(t, r, pluginImage(), probeImage(t))
	render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(m)})
	c.deployPlugin(t, m.Root, "k8s-history", parts...)
	return c, m
}

// setVariables gives the DaemonSet variables and waits until kubelet has a plugin with them.
func (c *cluster) setVariables(t *testing.T, variables ...string) {
	t.Helper()
	before, err := c.registrations()
	if err != nil {
		t.Fatal(err)
	}
	must(t, append([]string{"kubectl", "set", "env", daemonSet, "--namespace=kube-system"}, variables...)...)
	awaitRollout(t)
	await(t, "a plugin with "+strings.Join(variables, " "), 60*time.Second, func() error {
		count, err := c.registrations()
		if err == nil && count <= before {
			err = fmt.Errorf("kubelet counts %d registrations, as before", count)
		}
		ids, err2 := c.healthy(gpuResource)
		if err2 == nil && len(ids) == 0 {
			err2 = errors.New("kubelet has no healthy GPU")
		}
		return errors.Join(err, err2)
	})
}

// injection is how containers get their devices, and what they see of it.
type injection struct {
	name      string
	variables []string // of the agent
	own       string   // NVIDIA_VISIBLE_DEVICES of the pod itself; "" = none
	visible   string   // what the container has; "" = the UUIDs of its GPUs
	libraries bool     // of the driver
	mounts    bool     // one for each device
}

const void = "void" // has NVIDIA's runtime, beside CDI, do nothing

// injections are in an order: a variable of one is in force in the next.
var injections = []injection{
	{name: "cdi-cri", own: "all", visible: void, libraries: true}, // by the component
	{name: "device-nodes", variables: []string{"DEVICE_LIST_STRATEGY=envvar", "PASS_DEVICE_SPECS=true"}},
	{name: "volume-mounts", variables: []string{"DEVICE_LIST_STRATEGY=volume-mounts"}, visible: mountFolder, mounts: true},
	{name: "both", variables: []string{"DEVICE_LIST_STRATEGY=envvar,cdi-cri"}, own: "all", visible: void, libraries: true},
	{name: "cdi-annotations", variables: []string{"DEVICE_LIST_STRATEGY=cdi-annotations"}, own: "all", visible: void, libraries: true},
	{
		name: "indices", variables: []string{"DEVICE_LIST_STRATEGY=cdi-cri", "DEVICE_ID_STRATEGY=index"}, own: "all", visible: void,
		libraries: true,
	},
}

// TestInjections has pods open their devices, and no others, by each strategy but auto, which TestContainersComeBack has.
func TestInjections(t *testing.T) {
	c, m := startCDI(t, containerd2, "a100-mig", "cdi")
	for _, i := range injections {
		step(t, i.name, func(t *testing.T) {
			if i.variables != nil {
				c.setVariables(t, i.variables...)
			}
			c.checkInjection(t, m, i)
		})
	}
	step(t, "Podman takes the names of the agent's file", func(t *testing.T) { checkPodman(t, m) })
	step(t, "the module is loaded again, with another major number of nvidia-uvm", func(t *testing.T) { c.checkReload(t, m) })
	step(t, "another version of the driver is installed, and then loaded", func(t *testing.T) { c.checkUpgrade(t, m) })
	checkDriver(t, m)
}

// checkReload expects the new number in a container. containerd keeps the number that it saw at the first container until the file
// of the specification is replaced, also by one with the same content.
func (c *cluster) checkReload(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	if err := m.Unload(); err != nil {
		t.Fatal(err)
	}
	must(t, "mknod", "--mode=666", filepath.Join(m.Root, "dev/nvidia-uvm"), "c", "510", "0")
	c.awaitGPUs(t, 4, 0)
	if err := m.Load(); err != nil { // which leaves a node that is there
		t.Fatal(err)
	}
	c.awaitGPUs(t, 4, 4)
	c.probe(t, m, "reloaded", map[string]int{gpuResource: 1}, nil)
	_, s := c.awaitProbe(t, "reloaded", 1)
	if got := s.nodes["/dev/nvidia-uvm"]; got != "510:0" || len(s.denied) > 0 {
		t.Errorf("/dev/nvidia-uvm is %q and it may not open %q, want 510:0 and no other", got, s.denied)
	}
	c.remove(t, "reloaded")
}

// checkUpgrade expects that no GPU is given out while the files on disk and the module differ, because the specification names
// files that are gone, and that a pod which waits runs with the new files then.
func (c *cluster) checkUpgrade(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	const version = "580.95.05"
	if err := m.ReplaceLibrary(version); err != nil {
		t.Fatal(err)
	}
	c.awaitGPUs(t, 4, 0)
	c.probe(t, m, "upgraded", map[string]int{gpuResource: 1}, nil)
	c.awaitInsufficient(t, "upgraded", gpuResource)
	if err := m.SetModule(version); err != nil {
		t.Fatal(err)
	}
	_, s := c.awaitProbe(t, "upgraded", 1)
	s.checkLibrary(t, true)
}

// checkPodman has Podman resolve names that k8s-gpu defines: UUIDs, indices, all.
func checkPodman(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	must(t, "setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "cat", cdiFile) // for runtimes of any user
	podman := newPodman()
	if err := podman.try("load", "--input", probeImage(t)); err != nil {
		t.Fatal(err)
	}
	instances, err := m.Instances(4)
	if err != nil {
		t.Fatal(err)
	}
	every := slices.Collect(maps.Keys(deviceNodes(t, m)))
	for name, ids := range map[string][]string{
		"all": every, m.UUID(1): {m.UUID(1)}, "0": {m.UUID(0)}, instances[2]: {instances[2]}, "4:1": {instances[1]},
	} {
		s := podman.probe(t, m, "--device="+cdiKind+"="+name)
		s.checkNodes(t, m, ids)
		s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", void)
		s.checkLibrary(t, true)
	}
}

// checkInjection runs a pod with two GPUs, and one whose container has two resources.
func (c *cluster) checkInjection(t *testing.T, m *simdriver.Machine, i injection) {
	t.Helper()
	env := map[string]string{}
	if i.own != "" {
		env["NVIDIA_VISIBLE_DEVICES"] = i.own
	}
	pods := map[string]map[string]int{
		i.name + "-gpus": {gpuResource: 2},
		i.name + "-two":  {gpuResource: 1, migResource: 1},
	}
	for name, limits := range pods {
		c.probe(t, m, name, limits, env)
	}
	for name, limits := range pods {
		p, s := c.awaitProbe(t, name, 2)
		s.checkNodes(t, m, p.ids())
		s.checkLibrary(t, i.libraries)
		if i.mounts && !slices.Equal(s.mounts, p.ids()) || !i.mounts && len(s.mounts) > 0 {
			t.Errorf("pod %s has %q, and mounts %q", name, p.ids(), s.mounts)
		}
		// Of several resources kubelet takes the variable of any one.
		if want := cmp.Or(i.visible, strings.Join(p.ids(), ",")); i.visible != "" || len(limits) == 1 {
			s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", want)
		}
		c.remove(t, name)
	}
}
