//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// twoNodes is a cluster of a machine with eight GPUs, whose kubelet aligns CPUs and GPUs, and one with divided and shared GPUs.
type twoNodes struct {
	*cluster
	second *kubeNode
	m1, m2 *simdriver.Machine
}

// TestTwoNodes has the orchestrator place and move work between nodes, and kubelets place it on NUMA nodes.
func TestTwoNodes(t *testing.T) {
	m1 := install(t, "h100x8")
	c := startClusterOn(t, containerd2Aligned, pluginImage(), probeImage(t))
	second, m2 := c.addNode(t, containerd2, "a100-mig")
	n := &twoNodes{cluster: c, second: second, m1: m1, m2: m2}
	installHook(t, m1)
	installHook(t, m2)
	render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(m1)})
	policy := shippedPart(t, "policy")
	render(t, "policies/twonodes.yaml", nil)
	if err := os.Rename(filepath.Join(stateDir(), "policies/twonodes.yaml"), filepath.Join(stateDir(), policy, "policy.yaml")); err != nil {
		t.Fatal(err)
	}
	c.deployPlugin(t, m1.Root, "k8s-history", policy, shippedPart(t, "mig"), "parts/cdi")
	step(t, "both nodes show what their machines have", n.offered)
	step(t, "pods open their GPUs, shares and MIG instances on both", n.work)
	step(t, "kubelet gives GPUs and CPUs of one NUMA node, or refuses the pod", n.aligned)
	step(t, "a quota refuses the pod beyond", n.quota)
	step(t, "a node is drained: its pods get GPUs on the other one, the agent stays", n.drained)
	checkDriver(t, m1)
	checkDriver(t, m2)
}

func (n *twoNodes) offered(t *testing.T) {
	for node, want := range map[*kubeNode]string{
		n.kubeNode: "8 of 8 nvidia.com/gpu",
		n.second: "1 of 1 nvidia.com/mig-1g.10gb.me\n1 of 1 nvidia.com/mig-2g.20gb\n1 of 1 nvidia.com/mig-3g.40gb\n" +
			"1 of 1 nvidia.com/mig-7g.80gb\n2 of 2 nvidia.com/gpu\n8 of 8 nvidia.com/gpu.shared\n8 of 8 nvidia.com/mig-1g.10gb",
	} {
		await(t, node.name+" to show\n"+want, 60*time.Second, func() error {
			got, err := node.offers()
			if err == nil && got != want {
				err = fmt.Errorf("it shows\n%s", got)
			}
			return err
		})
	}
}

// on is a pod on a node, with these resources and as many CPUs as it may use alone.
func on(t *testing.T, node *kubeNode, m *simdriver.Machine, name string, limits map[string]int) map[string]any {
	t.Helper()
	spec := probeSpec(t, m, limits, nil)
	spec["nodeSelector"] = map[string]any{"kubernetes.io/hostname": node.name}
	return map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name}, "spec": spec}
}

func (n *twoNodes) work(t *testing.T) {
	pods := []struct {
		name     string
		node     *kubeNode
		machine  *simdriver.Machine
		resource string
		count    int
	}{
		{"first", n.kubeNode, n.m1, gpuResource, 2},
		{"second", n.second, n.m2, gpuResource, 2},
		{"share", n.second, n.m2, "nvidia.com/gpu.shared", 1},
		{"instance", n.second, n.m2, migResource, 1},
	}
	for _, p := range pods {
		n.apply(t, on(t, p.node, p.machine, p.name, map[string]int{p.resource: p.count}))
	}
	for _, p := range pods {
		pod, seen := n.awaitProbe(t, p.name, p.count)
		seen.checkNodes(t, p.machine, devicesOf(pod.ids()))
		seen.checkLibrary(t, true)
		if pod.Spec.NodeName != p.node.name {
			t.Errorf("pod %s is on %s", p.name, pod.Spec.NodeName)
		}
	}
	n.remove(t, "first", "second", "share", "instance")
}

// aligned expects what the policy single-numa-node does on a machine with four GPUs on each of two NUMA nodes. kubelet keeps CPU 0 for
// itself, so that on a machine with two CPUs a pod with a CPU of its own gets CPU 1, of the other NUMA node.
func (n *twoNodes) aligned(t *testing.T) {
	n.checkNUMA(t)
	n.apply(t, on(t, n.kubeNode, n.m1, "four", map[string]int{gpuResource: 4}))
	four, _ := n.awaitProbe(t, "four", 4)
	side := n.numaOf(t, four.ids()[0])
	for _, id := range four.ids() {
		if n.numaOf(t, id) != side {
			t.Errorf("pod four has %q, which are of both NUMA nodes", four.ids())
		}
	}
	n.remove(t, "four")
	n.apply(t, on(t, n.kubeNode, n.m1, "five", map[string]int{gpuResource: 5}))
	n.awaitRejected(t, "five", "TopologyAffinityError", "Resources cannot be allocated with Topology locality")
	n.remove(t, "five")
	n.apply(t, on(t, n.kubeNode, n.m1, "cpu", map[string]int{gpuResource: 2, "cpu": 1, "memory": 64 << 20}))
	withCPU, _ := n.awaitProbe(t, "cpu", 2)
	cpus := n.exclusiveCPUs(t, "cpu")
	t.Logf("pod cpu has CPUs %v and GPUs of NUMA nodes %s, %s", cpus, n.numaOf(t, withCPU.ids()[0]), n.numaOf(t, withCPU.ids()[1]))
	for _, id := range withCPU.ids() {
		if want := fmt.Sprint(numaOfCPU(cpus[0])); len(cpus) != 1 || n.numaOf(t, id) != want {
			t.Errorf("pod cpu has CPUs %v of NUMA node %s, and %s of NUMA node %s", cpus, want, id, n.numaOf(t, id))
		}
	}
	n.remove(t, "cpu")
}

func (n *twoNodes) numaOf(t *testing.T, id string) string {
	t.Helper()
	numa, err := n.m1.Get(slotOf(t, n.m1, id), "numa")
	if err != nil {
		t.Fatal(err)
	}
	return numa
}

// checkNUMA fails unless kubelet lists each GPU with its NUMA node.
func (n *twoNodes) checkNUMA(t *testing.T) {
	t.Helper()
	err := n.askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
		answer, err := kubelet.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		listed := 0
		for _, d := range answer.GetDevices() {
			for _, id := range d.GetDeviceIds() {
				listed++
				nodes := d.GetTopology().GetNodes()
				if len(nodes) != 1 || fmt.Sprint(nodes[0].GetID()) != n.numaOf(t, id) {
					err = errors.Join(err, fmt.Errorf("%s has the NUMA nodes %v, want %s", id, nodes, n.numaOf(t, id)))
				}
			}
		}
		if listed != 8 {
			err = errors.Join(err, fmt.Errorf("it lists %d", listed))
		}
		return err
	})
	if err != nil {
		t.Errorf("GetAllocatableResources: %v", err)
	}
}

// exclusiveCPUs are those that kubelet gave the pod for itself.
func (n *twoNodes) exclusiveCPUs(t *testing.T, name string) (cpus []int64) {
	t.Helper()
	err := n.askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
		answer, err := kubelet.Get(ctx, &podresources.GetPodResourcesRequest{PodName: name, PodNamespace: "default"})
		for _, container := range answer.GetPodResources().GetContainers() {
			cpus = append(cpus, container.GetCpuIds()...)
		}
		return err
	})
	if err != nil || len(cpus) == 0 {
		t.Fatalf("CPUs of pod %s: %v, error %v", name, cpus, err)
	}
	return cpus
}

func (n *twoNodes) quota(t *testing.T) {
	must(t, "kubectl", "create", "quota", "gpus", "--hard=requests.nvidia.com/gpu=2")
	await(t, "the quota to count", 30*time.Second, func() error {
		used, err := command("kubectl", "get", "quota", "gpus", "-o", `jsonpath={.status.used.requests\.nvidia\.com/gpu}`)
		if err == nil && used != "0" {
			err = fmt.Errorf("it counts %q", used)
		}
		return err
	})
	n.apply(t, on(t, n.kubeNode, n.m1, "within", map[string]int{gpuResource: 2}))
	n.awaitProbe(t, "within", 2)
	beyond := write(t, "object.json", encode(t, on(t, n.second, n.m2, "beyond", map[string]int{gpuResource: 1})))
	err := try("kubectl", "apply", "-f", beyond)
	const why = "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=2, limited: requests.nvidia.com/gpu=2"
	if err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("a pod beyond the quota: %v, want %q", err, why)
	}
	n.remove(t, "within")
	must(t, "kubectl", "apply", "-f", beyond)
	n.awaitProbe(t, "beyond", 1)
	n.remove(t, "beyond")
	must(t, "kubectl", "delete", "quota", "gpus")
}

// drained has pods of a deployment move. The second node has two whole GPUs.
func (n *twoNodes) drained(t *testing.T) {
	agent := n.plugin(t)
	must(t, "kubectl", "cordon", n.second.name)
	n.deployProbe(t, n.m2, "moving", 2) // the second machine's numbers include the first one's
	for _, p := range n.awaitOn(t, n.kubeNode, "moving", 2) {
		n.checkDevices(t, p, n.m1)
	}
	must(t, "kubectl", "uncordon", n.second.name)
	t.Log(must(t, "kubectl", "drain", n.name, "--ignore-daemonsets", "--timeout=50s"))
	for _, p := range n.awaitOn(t, n.second, "moving", 2) {
		n.checkDevices(t, p, n.m2)
	}
	if now := n.plugin(t); now.identity() != agent.identity() {
		t.Errorf("the agent of the drained node was %s, it is %s", agent.identity(), now.identity())
	}
	n.awaitGPUs(t, 8, 8)
	must(t, "kubectl", "scale", "deployment", "moving", "--replicas=3")
	n.awaitUnschedulable(t, "moving")
	must(t, "kubectl", "uncordon", n.name)
	for _, p := range n.awaitOn(t, n.kubeNode, "moving", 1) {
		n.checkDevices(t, p, n.m1)
	}
	must(t, "kubectl", "delete", "deployment", "moving")
}

// checkDevices fails unless the pod has one whole GPU of the machine, which it can open.
func (n *twoNodes) checkDevices(t *testing.T, p pod, m *simdriver.Machine) {
	t.Helper()
	p, seen := n.awaitProbe(t, p.Metadata.Name, 1)
	seen.checkNodes(t, m, p.ids())
}

// awaitOn waits until so many pods of an app run on the node, and returns them.
func (c *cluster) awaitOn(t *testing.T, node *kubeNode, app string, count int) (pods []pod) {
	t.Helper()
	await(t, fmt.Sprintf("%d pods of %s on %s", count, app, node.name), 60*time.Second, func() error {
		all, err := c.podsOf(app)
		pods = slices.DeleteFunc(all, func(p pod) bool { return p.Spec.NodeName != node.name || p.Status.Phase != "Running" })
		if err == nil && len(pods) != count {
			err = fmt.Errorf("they are %+v", all)
		}
		return err
	})
	return pods
}

// awaitUnschedulable waits until a pod of an app finds no node.
func (c *cluster) awaitUnschedulable(t *testing.T, app string) {
	t.Helper()
	await(t, "a pod of "+app+" to be unschedulable", 60*time.Second, func() error {
		pods, err := c.podsOf(app)
		for _, p := range pods {
			if p.insufficient(gpuResource) {
				return nil
			}
		}
		return errors.Join(fmt.Errorf("they are %+v", pods), err)
	})
}
