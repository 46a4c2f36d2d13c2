// Package kubelet runs the built k8s-gpu under the kubelet's own device manager, in process: the code that registers plugins,
// records devices and admits pods on a node. It is a module of its own, since k8s.io/kubernetes is not a library: nothing else
// of the project builds against it.
//
// The tests are named by the cases of the kubelet contract's checklist. The device manager has a constant directory,
// /var/lib/kubelet/device-plugins: the tests run as root, in a mount namespace with an empty directory there.
package kubelet

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"

	"github.com/tandem-gpu/tandem/test/conformance/sandbox"
)

func TestMain(m *testing.M) { sandbox.Main(m, func() {}) }

// newReady returns a node with a kubelet that lists the eight GPUs of an agent.
func newReady(t *testing.T, args ...string) (*node, *agent) {
	t.Helper()
	n := newNode(t, "h100x8")
	n.startKubelet()
	a := n.startAgent(args...)
	n.awaitCapacity(gpus, 8, 8)
	return n, a
}

// servePodResources serves the kubelet's API over this node's device manager, as a kubelet that started an hour ago.
func (n *node) servePodResources() {
	n.Helper()
	socket := n.podResourcesSocket()
	n.Must(os.MkdirAll(filepath.Dir(socket), 0o750))
	l, err := net.Listen("unix", socket)
	n.Must(err)
	began := time.Now().Add(-time.Hour)
	n.Must(os.Chtimes(socket, began, began))
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(context.Background(), podresources.PodResourcesProviders{
		Pods: nodePods{n}, Devices: nodeDevices{n}, Cpus: noCPUs{}, Memory: noMemory{}, DynamicResources: noClaims{},
	}))
	go func() { _ = server.Serve(l) }()
	n.stopPodResources = sync.OnceFunc(server.Stop)
	n.Cleanup(func() {
		n.stopPodResources()
		_ = os.RemoveAll(filepath.Dir(socket)) // without the directory no answer is expected
	})
}

func (n *node) podResourcesSocket() string {
	return filepath.Join(filepath.Dir(pluginDir), "pod-resources", "kubelet.sock")
}

type nodePods struct{ n *node }

func (p nodePods) GetActivePods() []*v1.Pod { return p.n.activePods() }
func (p nodePods) GetPods() []*v1.Pod       { return p.n.activePods() }
func (p nodePods) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	pods := p.n.activePods()
	i := slices.IndexFunc(pods, func(pod *v1.Pod) bool { return pod.Namespace == namespace && pod.Name == name })
	if i < 0 {
		return nil, false
	}
	return pods[i], true
}

// nodeDevices is what pkg/kubelet/cm/container_manager.go makes of the device manager.
type nodeDevices struct{ n *node }

func (d nodeDevices) GetDevices(pod, container string) (all []*podresourcesapi.ContainerDevices) {
	for resource, devices := range d.n.current().GetDevices(pod, container) {
		for id := range devices {
			all = append(all, &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
		}
	}
	return all
}

type (
	noCPUs   struct{}
	noMemory struct{}
	noClaims struct{}
)

func (noCPUs) GetAllocatableCPUs() []int64 { return nil }
