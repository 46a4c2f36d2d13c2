package dra

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
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/config"

	"github.com/tandem-gpu/tandem/test/conformance/sandbox"
)

const extended = "nvidia.com/gpu"

// deviceManagerHome is for one test at a time: the device manager's directory is a constant.
var deviceManagerHome sync.Mutex

// bothNode is a node whose kubelet has its device manager, too, and the pod-resources API over both managers.
type bothNode struct {
	*node
	devices *deviceManager
	stopAPI func()
}

func newBothNode(t *testing.T, machine string) *bothNode {
	t.Helper()
	deviceManagerHome.Lock()
	t.Cleanup(deviceManagerHome.Unlock)
	b := &bothNode{node: newNode(t, machine)}
	b.kubeletDir = sandbox.KubeletHome
	b.Must(os.RemoveAll(b.stateDir))
	entries, err := os.ReadDir(sandbox.KubeletHome)
	b.Must(err)
	for _, e := range entries {
		b.Must(os.RemoveAll(filepath.Join(sandbox.KubeletHome, e.Name())))
	}
	b.addPod(b.extendedPod("system", 0)) // a node has pods
	t.Cleanup(b.stopKubelets)
	return b
}

// startKubelets starts both managers and the pod-resources API.
func (b *bothNode) startKubelets() {
	b.Helper()
	m, err := newDeviceManager(b.logger)
	b.Must(err)
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	b.Must(m.Start(b.logger, b.activePods, ready, containermap.NewContainerMap(), sets.New[string]()))
	b.devices = m
	b.startKubelet()
	b.servePodResources()
}

func (b *bothNode) stopKubelets() {
	if b.devices == nil {
		return
	}
	b.stopAPI()
	if err := b.devices.Stop(b.logger); err != nil {
		b.Error(err)
	}
	b.devices = nil
	b.kubelet.stop()
}

func (b *bothNode) podResourcesSocket() string {
	return filepath.Join(sandbox.KubeletHome, "pod-resources", "kubelet.sock")
}

func (b *bothNode) servePodResources() {
	b.Helper()
	b.Must(os.MkdirAll(filepath.Dir(b.podResourcesSocket()), 0o750))
	_ = os.Remove(b.podResourcesSocket())
	l, err := net.Listen("unix", b.podResourcesSocket())
	b.Must(err)
	began := time.Now().Add(-time.Hour)
	b.Must(os.Chtimes(b.podResourcesSocket(), began, began)) // a kubelet that started an hour ago has all its pods
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(context.Background(), podresources.PodResourcesProviders{
		Pods: nodePods{b}, Devices: nodeDevices{b}, Cpus: noCPUs{}, Memory: noMemory{}, DynamicResources: nodeClaims{b},
	}))
	go func() { _ = server.Serve(l) }()
	b.stopAPI = server.Stop
}

// startAgentOf starts the agent for an API of Kubernetes.
func (b *bothNode) startAgentOf(api string, args ...string) *agent {
	b.Helper()
	return b.startAgent(append([]string{
		"--api=" + api, "--kubelet-socket=" + filepath.Join(sandbox.KubeletHome, "device-plugins", "kubelet.sock"),
		"--pod-resources-socket=" + b.podResourcesSocket(),
	}, args...)...)
}

// capacity is what the kubelet would write into the node's status.
func (b *bothNode) capacity() (capacity, allocatable int64) {
	c, a, _ := b.devices.GetCapacity(b.logger)
	total, healthy := c[extended], a[extended]
	return total.Value(), healthy.Value()
}

func (b *bothNode) awaitCapacity(capacity, allocatable int64) {
	b.Helper()
	b.Await("capacity of "+extended, func() bool {
		c, a := b.capacity()
		return c == capacity && a == allocatable
	})
}

// extendedPod makes a pod that requests GPUs by their extended name.
func (b *bothNode) extendedPod(name string, count int64) *v1.Pod {
	limits := v1.ResourceList{extended: *resource.NewQuantity(count, resource.DecimalSI)}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-of-pod-" + name)},
		Spec: v1.PodSpec{NodeName: nodeName, Containers: []v1.Container{
			{Name: "app", Resources: v1.ResourceRequirements{Limits: limits, Requests: limits}},
		}},
		Status: v1.PodStatus{Phase: v1.PodRunning},
	}
}

// allocate admits a pod whose GPUs come from the device plugin.
func (b *bothNode) allocate(p *v1.Pod) error {
	b.addPod(p)
	err := allocate(b.Context(), b.devices, p, &p.Spec.Containers[0])
	if err != nil {
		b.removePod(p)
	}
	return err
}

// held are the GPUs that a pod has from the device plugin.
func (b *bothNode) held(p *v1.Pod) (ids []string) {
	for id := range b.devices.GetDevices(string(p.UID), "app")[extended] {
		ids = append(ids, id)
	}
	return ids
}

type nodePods struct{ b *bothNode }

func (p nodePods) GetActivePods() []*v1.Pod { return p.b.activePods() }
func (p nodePods) GetPods() []*v1.Pod       { return p.b.activePods() }
func (p nodePods) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	pods := p.b.activePods()
	i := slices.IndexFunc(pods, func(pod *v1.Pod) bool { return pod.Namespace == namespace && pod.Name == name })
	if i < 0 {
		return nil, false
	}
	return pods[i], true
}

// nodeDevices is what pkg/kubelet/cm/container_manager.go makes of the device manager.
type nodeDevices struct{ b *bothNode }

func (d nodeDevices) GetDevices(pod, container string) (all []*podresourcesapi.ContainerDevices) {
	for name, devices := range d.b.devices.GetDevices(pod, container) {
		for id := range devices {
			all = append(all, &podresourcesapi.ContainerDevices{ResourceName: name, DeviceIds: []string{id}})
		}
	}
	return all
}

// nodeClaims is what pkg/kubelet/cm/container_manager_linux.go makes of the DRA manager.
type nodeClaims struct{ b *bothNode }

func (c nodeClaims) of(p *v1.Pod, container *v1.Container) (all []*podresourcesapi.DynamicResource) {
	infos, err := c.b.kubelet.GetContainerClaimInfos(p, container)
	if err != nil {
		return nil
	}
	for _, info := range infos {
		dynamic := &podresourcesapi.DynamicResource{ClaimName: info.ClaimName, ClaimNamespace: info.Namespace}
		for driver, state := range info.DriverState {
			for _, d := range state.Devices {
				one := &podresourcesapi.ClaimResource{DriverName: driver, PoolName: d.PoolName, DeviceName: d.DeviceName}
				for _, name := range d.CDIDeviceIDs {
					one.CdiDevices = append(one.CdiDevices, &podresourcesapi.CDIDevice{Name: name})
				}
				dynamic.ClaimResources = append(dynamic.ClaimResources, one)
			}
		}
		all = append(all, dynamic)
	}
	return all
}

type (
	noCPUs   struct{}
	noMemory struct{}
)

func (noCPUs) GetAllocatableCPUs() []int64 { return nil }
