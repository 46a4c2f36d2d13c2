//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// draCluster is a cluster with the agent in mode dra on each node.
type draCluster struct {
	*cluster
	machines map[string]*simdriver.Machine // by name of the node
}

// startDRA starts a cluster of one node, of which nothing of this project runs yet, with the images for GPU pods.
func startDRA(t *testing.T, machine string, images ...string) *draCluster {
	t.Helper()
	return startDRAOn(t, install(t, machine), images...)
}

func startDRAOn(t *testing.T, m *simdriver.Machine, images ...string) *draCluster {
	t.Helper()
	installHook(t, m)
	probe := buildProbe(t)
	smi := filepath.Join(filepath.Dir(probe), "nvidia-smi")
	must(t, "cp", probe, smi)
	images = append(images, pluginImage(),
		saveImageWith(t, "localhost/probe:1", []string{"NVIDIA_VISIBLE_DEVICES=all"}, nil, probe),
		saveImageWith(t, "docker.io/library/ubuntu:24.04", []string{"NVIDIA_VISIBLE_DEVICES=all"}, nil, smi))
	c := startClusterOn(t, containerd2Eager, images...)
	return &draCluster{cluster: c, machines: map[string]*simdriver.Machine{c.name: m}}
}

// machine is that of the first node.
func (c *draCluster) machine() *simdriver.Machine { return c.machines[c.name] }

// deploy deploys k8s-gpu in mode dra, as it is shipped, with more parts.
func (c *draCluster) deploy(t *testing.T, parts ...string) {
	t.Helper()
	m := c.machine()
	render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(m)})
	c.deployPlugin(t, m.Root, "k8s-history", append(parts, shippedPart(t, "dra"), "parts/cdi")...)
}

// awaitDevices waits until the agent of the node has published so many devices, and so many of them have a taint.
func (n *kubeNode) awaitDevices(t *testing.T, all, tainted int) {
	t.Helper()
	began := time.Now()
	await(t, fmt.Sprintf("%d devices of %s in slices, %d with a taint", all, n.name, tainted), 60*time.Second, func() error {
		devices, err := n.published()
		with := 0
		for _, d := range devices {
			with += min(1, len(d.Taints))
		}
		if err == nil && (len(devices) != all || with != tainted) {
			err = fmt.Errorf("%d devices, %d with a taint: %+v", len(devices), with, devices)
		}
		return err
	})
	t.Logf("%s: %d devices in slices, %d with a taint, after %v", n.name, all, tainted, time.Since(began).Round(time.Millisecond))
}

// draWork is what the containers of some pods got, by "<pod>/<container>".
type draWork struct {
	pods map[string]pod
	gpus map[string][]string // UUIDs
	seen map[string]seen
}

// gpusOf are those of one container of the pod, or of the deployment's pods.
func (w draWork) gpusOf(t *testing.T, container string) []string {
	t.Helper()
	gpus, found := w.gpus[container]
	if !found {
		t.Fatalf("no container %s among %q", container, slices.Sorted(maps.Keys(w.gpus)))
	}
	return gpus
}

// work waits until the pods outside of kube-system are so many and run, and returns what their containers got. Each has the nodes of the
// devices that its claims have, and no others.
func (c *draCluster) work(t *testing.T, count int) (w draWork) {
	t.Helper()
	var pods []pod
	await(t, fmt.Sprintf("%d pods to run", count), 60*time.Second, func() (err error) {
		pods, err = c.workPods()
		running := slices.DeleteFunc(slices.Clone(pods), func(p pod) bool { return p.Status.Phase != "Running" })
		if err == nil && (len(running) != count || len(pods) != count) {
			err = fmt.Errorf("they are %+v", pods)
		}
		return err
	})
	w = draWork{pods: map[string]pod{}, gpus: map[string][]string{}, seen: map[string]seen{}}
	for _, p := range pods {
		w.pods[p.Metadata.Name] = p
		devices, err := p.devicesOfContainers()
		if err != nil {
			t.Fatal(err)
		}
		for _, container := range p.Spec.Containers {
			key := p.Metadata.Name + "/" + container.Name
			w.gpus[key] = c.uuidsOf(t, p.Spec.NodeName, devices[container.Name])
			w.seen[key] = c.awaitSeen(t, p, container.Name)
			t.Logf("%s has %q and sees %v", key, w.gpus[key], w.seen[key])
			c.checkSeen(t, p, w.gpus[key], w.seen[key])
		}
	}
	return w
}

// workPods are the pods outside of kube-system.
func (c *cluster) workPods() ([]pod, error) {
	var list struct{ Items []pod }
	err := c.get("/api/v1/pods?fieldSelector=metadata.namespace!=kube-system", &list)
	return list.Items, err
}

// uuidsOf are those of devices in the node's slices.
func (c *draCluster) uuidsOf(t *testing.T, node string, devices []string) (ids []string) {
	t.Helper()
	for uuid := range deviceNodes(t, c.machines[node]) {
		if slices.Contains(devices, deviceName(uuid)) {
			ids = append(ids, uuid)
		}
	}
	slices.Sort(ids)
	if len(ids) != len(slices.Compact(slices.Sorted(slices.Values(devices)))) {
		t.Fatalf("devices %q of %s are %q", devices, node, ids)
	}
	return ids
}

// awaitSeen waits until the container has printed what it sees.
func (c *cluster) awaitSeen(t *testing.T, p pod, container string) (s seen) {
	t.Helper()
	await(t, "the log of "+p.Metadata.Name+"/"+container, 90*time.Second, func() (err error) {
		s, err = parseOr(command("kubectl", "logs", "--namespace="+p.Metadata.Namespace, p.Metadata.Name, "--container="+container))
		return err
	})
	return s
}

// checkSeen fails unless a container sees the devices and no others. Those that were told the numbers of all devices have tried to make nodes
// of the others.
func (c *draCluster) checkSeen(t *testing.T, p pod, gpus []string, s seen) {
	t.Helper()
	m := c.machines[p.Spec.NodeName]
	if len(s.made) > 0 {
		s.checkNodes(t, m, gpus)
		s.checkLibrary(t, true)
		s.checkVariable(t, "NVIDIA_VISIBLE_DEVICES", void)
		return
	}
	s.checkPresent(t, m, gpus)
}

// draExample is a file with pods, and what their containers should get.
type draExample struct {
	file  string // of testdata/dra, or, as it is shipped, of deploy/dra/examples
	pods  int
	check func(*testing.T, draWork)
}

// shippedExamples is the folder of the examples that users get.
const shippedExamples = "../../deploy/dra/examples/"

// run applies the file, checks what its containers get, and deletes everything of it.
func (e draExample) run(t *testing.T, c *draCluster) {
	t.Helper()
	path := e.path(t, c)
	must(t, "kubectl", "apply", "-f", path)
	e.check(t, c.work(t, e.pods))
	c.clear(t, "-f", path)
}

func (e draExample) path(t *testing.T, c *draCluster) string {
	t.Helper()
	if _, err := os.Stat(shippedExamples + e.file); err == nil {
		return shippedExamples + e.file
	}
	return render(t, "dra/"+e.file, map[string]string{"RUN": c.runProbe(t)})
}

// runProbe is the image and the command of a container that runs the probe, on any of the machines.
func (c *draCluster) runProbe(t *testing.T) string {
	t.Helper()
	most := c.machine()
	for _, m := range c.machines {
		if len(numbers(t, m)) > len(numbers(t, most)) {
			most = m
		}
	}
	return fmt.Sprintf("image: localhost/probe:1, imagePullPolicy: Never, command: %s", encode(t, probeCommand(t, most)))
}

// clear deletes what a file has, and waits until no pod and no claim is left. The containers are killed: a shell takes the 30 s that a pod
// has by default.
func (c *draCluster) clear(t *testing.T, argv ...string) {
	t.Helper()
	must(t, append([]string{"kubectl", "delete", "--wait=false"}, argv...)...)
	await(t, "the end of all pods and claims", 60*time.Second, func() error {
		pods, err := c.workPods()
		for _, p := range pods {
			for _, n := range c.nodes {
				for _, id := range p.containers() {
					if p.Metadata.DeletionTimestamp != "" && p.Spec.NodeName == n.name && id != "" {
						_, _ = n.ctr("tasks", "kill", "--signal", "SIGKILL", id) // it may be gone
					}
				}
			}
		}
		var claims struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		err = errors.Join(err, c.get("/apis/resource.k8s.io/v1/resourceclaims", &claims))
		if err == nil && len(pods)+len(claims.Items) > 0 {
			err = fmt.Errorf("pods %+v, claims %+v", pods, claims.Items)
		}
		return err
	})
}

// removeAll deletes all pods and claims of the default namespace.
func (c *draCluster) removeAll(t *testing.T) {
	t.Helper()
	c.clear(t, "pods,resourceclaims", "--all")
}

// distinct fails unless the containers have so many GPUs together, of which none belongs to two.
func distinct(t *testing.T, w draWork, count int, containers ...string) {
	t.Helper()
	var all []string
	for _, container := range containers {
		all = append(all, w.gpusOf(t, container)...)
	}
	if slices.Sort(all); len(all) != count || len(slices.Compact(slices.Clone(all))) != count {
		t.Errorf("%q have %q, want %d that differ", containers, all, count)
	}
}

// same fails unless the containers have the same so many GPUs.
func same(t *testing.T, w draWork, count int, containers ...string) {
	t.Helper()
	for _, container := range containers {
		if gpus := w.gpusOf(t, container); len(gpus) != count || !slices.Equal(gpus, w.gpusOf(t, containers[0])) {
			t.Errorf("%s has %q, %s %q; want %d, the same", container, gpus, containers[0], w.gpusOf(t, containers[0]), count)
		}
	}
}

// within fails unless the first container has GPUs, all of which the second has, too.
func within(t *testing.T, w draWork, count int, part, whole string) {
	t.Helper()
	gpus := w.gpusOf(t, part)
	for _, gpu := range gpus {
		if !slices.Contains(w.gpusOf(t, whole), gpu) {
			t.Errorf("%s has %s, %s has %q", part, gpu, whole, w.gpusOf(t, whole))
		}
	}
	if len(gpus) != count {
		t.Errorf("%s has %q, want %d", part, gpus, count)
	}
}

// ofPods are the containers of pods whose names begin so.
func (w draWork) ofPods(prefix string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(w.gpus)), func(key string) bool { return !strings.HasPrefix(key, prefix) })
}
