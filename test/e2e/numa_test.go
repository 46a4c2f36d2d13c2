//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"testing"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// systemNodes is where kubelet finds the NUMA nodes of a machine.
const systemNodes = "/sys/devices/system/node"

// alignment has kubelet give a container CPUs and devices of one NUMA node. Of half a CPU that is reserved it makes a whole one, CPU 0.
const alignment = `
topologyManagerPolicy: single-numa-node
cpuManagerPolicy: static
kubeReserved: {cpu: 500m}
`

// numaOfCPU is the NUMA node that simulateNUMA puts a CPU on: even and odd numbers.
func numaOfCPU(cpu int64) int64 { return cpu % 2 }

// simulateNUMA gives the node the two NUMA nodes that the simulated machine has, in place of those of the real one.
func (n *kubeNode) simulateNUMA(t *testing.T) {
	t.Helper()
	dir := filepath.Join(n.dir, "numa")
	var err error
	for numa := range int64(2) {
		node := filepath.Join(dir, fmt.Sprintf("node%d", numa))
		distance := []string{"10 21\n", "21 10\n"}[numa]
		err = errors.Join(err, os.MkdirAll(filepath.Join(node, "hugepages"), 0o755),
			os.WriteFile(filepath.Join(node, "distance"), []byte(distance), 0o644))
		for cpu := range int64(goruntime.NumCPU()) {
			if numaOfCPU(cpu) == numa {
				name := fmt.Sprintf("cpu%d", cpu)
				err = errors.Join(err, os.Symlink("/sys/devices/system/cpu/"+name, filepath.Join(node, name)))
			}
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	must(t, slices.Concat(n.enter, []string{"mount", "--bind", filepath.Join(stateDir(), "numa"), systemNodes})...)
}

// aligned expects what the policy single-numa-node does on a machine with four GPUs on each of two NUMA nodes. kubelet keeps CPU 0 for
// itself, so that on a machine with two CPUs a pod with a CPU of its own gets CPU 1, of the other NUMA node.
func (b *comeBack) aligned(t *testing.T) {
	b.awaitGPUs(t, 8, 8)
	b.checkNUMA(t)
	b.probe(t, b.Machine, "four", map[string]int{gpuResource: 4}, nil)
	four, _ := b.awaitProbe(t, "four", 4)
	numa := b.numaOf(t, four.ids()[0])
	for _, id := range four.ids() {
		if b.numaOf(t, id) != numa {
			t.Errorf("pod four has %q, which are of both NUMA nodes", four.ids())
		}
	}
	b.remove(t, "four")
	b.probe(t, b.Machine, "five", map[string]int{gpuResource: 5}, nil)
	b.awaitRejected(t, "five", "TopologyAffinityError", "Resources cannot be allocated with Topology locality")
	b.remove(t, "five")
	b.probe(t, b.Machine, "cpu", map[string]int{gpuResource: 2, "cpu": 1, "memory": 64 << 20}, nil)
	withCPU, _ := b.awaitProbe(t, "cpu", 2)
	cpus := b.exclusiveCPUs(t, "cpu")
	t.Logf("pod cpu has CPUs %v and GPUs of NUMA nodes %s, %s", cpus, b.numaOf(t, withCPU.ids()[0]), b.numaOf(t, withCPU.ids()[1]))
	for _, id := range withCPU.ids() {
		if want := fmt.Sprint(numaOfCPU(cpus[0])); len(cpus) != 1 || b.numaOf(t, id) != want {
			t.Errorf("pod cpu has CPUs %v of NUMA node %s, and %s of NUMA node %s", cpus, want, id, b.numaOf(t, id))
		}
	}
	b.remove(t, "cpu")
}

func (b *comeBack) numaOf(t *testing.T, id string) string {
	t.Helper()
	numa, err := b.Get(slotOf(t, b.Machine, id), "numa")
	if err != nil {
		t.Fatal(err)
	}
	return numa
}

// checkNUMA fails unless kubelet lists each GPU with its NUMA node.
func (b *comeBack) checkNUMA(t *testing.T) {
	t.Helper()
	err := b.askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
		answer, err := kubelet.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		listed := 0
		for _, d := range answer.GetDevices() {
			for _, id := range d.GetDeviceIds() {
				listed++
				nodes := d.GetTopology().GetNodes()
				if len(nodes) != 1 || fmt.Sprint(nodes[0].GetID()) != b.numaOf(t, id) {
					err = errors.Join(err, fmt.Errorf("%s has the NUMA nodes %v, want %s", id, nodes, b.numaOf(t, id)))
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
func (b *comeBack) exclusiveCPUs(t *testing.T, name string) (cpus []int64) {
	t.Helper()
	err := b.askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
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
