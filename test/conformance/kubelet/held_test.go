package kubelet

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

const lastInAnotherPool = `
version: v1
policy:
  rules:
    - {select: {index: 7}, name: nvidia.com/special}
`

// A pod holds eight GPUs when a policy moves one of them to another resource. kubelet 1.37 dereferences nil when such a
// pod is resized in place or admitted again, unless the ID stays in the list of the resource that it was allocated under.
func TestResizeAfterADeviceMovedToAnotherResource(t *testing.T) {
	n := newNode(t, "h100x8")
	n.startKubelet("best-effort")
	option := n.policy("version: v1\n")
	a := n.startAgent(option)
	n.awaitCapacity(gpus, 8, 8)
	p := n.pod("holder", nil, 8)
	n.must(n.allocate(p))
	n.must(os.WriteFile(strings.TrimPrefix(option, configFile), []byte(lastInAnotherPool), 0o600))
	n.must(a.cmd.Process.Signal(syscall.SIGHUP))
	n.awaitLog(a, "policy applied")
	n.await("GPU 7 under its new name", func() bool { c, _ := n.capacity("nvidia.com/special"); return c == 1 })
	n.await("the IDs that no longer take work", func() bool { _, healthy := n.capacity(gpus); return healthy == 7 })
	pause := time.NewTimer(3 * time.Second) // longer than any ID that nobody holds stays listed
	<-pause.C
	admit := func(op lifecycle.Operation) (ok bool, reason string) {
		defer func() {
			if r := recover(); r != nil {
				t.Errorf("kubelet panics: %v", r)
			}
		}()
		r := n.admit.Admit(n.Context(), &lifecycle.PodAdmitAttributes{Pod: p, Operation: op})
		return r.Admit, r.Reason + " " + r.Message
	}
	if ok, reason := admit(lifecycle.ResizeOperation); !ok {
		t.Errorf("resize in place is refused: %s", reason)
	}
	if got := n.held(p, "app0"); !slices.Equal(got, slices.Sorted(slices.Values(n.uuids()))) {
		t.Errorf("the pod holds %v", got)
	}
}

// The same with the kubelet's own pod-resources API: the GPU is withheld under its new name until the pod ends, and then
// leaves the old one.
func TestADeviceThatAPodHoldsIsNotGivenOutUnderAnotherResource(t *testing.T) {
	const special v1.ResourceName = "nvidia.com/special"
	n := newNode(t, "h100x8")
	n.startKubelet()
	n.servePodResources()
	option := n.policy("version: v1\n")
	a := n.startAgent(option)
	n.awaitCapacity(gpus, 8, 8)
	p := n.pod("holder", nil, 8)
	n.must(n.allocate(p))
	n.must(os.WriteFile(strings.TrimPrefix(option, configFile), []byte(lastInAnotherPool), 0o600))
	n.must(a.cmd.Process.Signal(syscall.SIGHUP))
	n.awaitLog(a, "still listed as unhealthy because pods may hold them")
	n.awaitCapacity(string(special), 1, 0)
	n.awaitCapacity(gpus, 8, 7)
	if err := n.allocate(podOf(special, "thief", nil, 1)); err == nil {
		t.Error("a GPU that a pod holds is given to another")
	}
	n.remove(p)
	n.awaitCapacity(string(special), 1, 1)
	n.awaitCapacity(gpus, 7, 7)
	n.must(n.allocate(podOf(special, "next", nil, 1)))
}

// servePodResources serves the kubelet's API over this node's device manager, as a kubelet that started an hour ago.
func (n *node) servePodResources() {
	n.Helper()
	socket := filepath.Join(filepath.Dir(pluginDir), "pod-resources", "kubelet.sock")
	n.must(os.MkdirAll(filepath.Dir(socket), 0o750))
	l, err := net.Listen("unix", socket)
	n.must(err)
	began := time.Now().Add(-time.Hour)
	n.must(os.Chtimes(socket, began, began))
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(context.Background(), podresources.PodResourcesProviders{
		Pods: nodePods{n}, Devices: nodeDevices{n}, Cpus: noCPUs{}, Memory: noMemory{}, DynamicResources: noClaims{},
	}))
	n.mu.Lock()
	n.pods = append(n.pods, n.pod("agent", nil, 0)) // a node has pods
	n.mu.Unlock()
	go func() { _ = server.Serve(l) }()
	n.Cleanup(func() {
		server.Stop()
		_ = os.RemoveAll(filepath.Dir(socket)) // without the folder the API is not to be expected
	})
}

type nodePods struct{ n *node }

func (p nodePods) GetActivePods() []*v1.Pod                    { return p.n.activePods() }
func (p nodePods) GetPods() []*v1.Pod                          { return p.n.activePods() }
func (p nodePods) GetPodByName(string, string) (*v1.Pod, bool) { return nil, false }

// nodeDevices is what pkg/kubelet/cm/container_manager.go makes of the device manager.
type nodeDevices struct{ n *node }

func (d nodeDevices) UpdateAllocatedDevices(logger klog.Logger) {
	d.n.manager.UpdateAllocatedDevices(logger)
}

func (d nodeDevices) GetDevices(pod, container string) (all []*podresourcesapi.ContainerDevices) {
	for resource, devices := range d.n.manager.GetDevices(pod, container) {
		for id := range devices {
			all = append(all, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
		}
	}
	return all
}

func (d nodeDevices) GetAllocatableDevices(klog.Logger) []*podresourcesapi.ContainerDevices {
	return nil
}

type noCPUs struct{}

func (noCPUs) GetCPUs(*v1.Pod, *v1.Container) []int64 { return nil }
func (noCPUs) GetPodCPUs(string) []int64              { return nil }
func (noCPUs) GetAllocatableCPUs() []int64            { return nil }

type noMemory struct{}

func (noMemory) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesapi.ContainerMemory {
	return nil
}
func (noMemory) GetPodMemory(klog.Logger, string) []*podresourcesapi.ContainerMemory { return nil }
func (noMemory) GetAllocatableMemory(klog.Logger) []*podresourcesapi.ContainerMemory { return nil }

type noClaims struct{}

func (noClaims) GetDynamicResources(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesapi.DynamicResource {
	return nil
}
