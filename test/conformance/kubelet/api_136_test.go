//go:build before1.37

package kubelet

import (
	"context"
	"encoding/json"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// operation is of no account before 1.37: every admission is treated as that of a new pod.
type operation struct{}

var add, resize operation

const resizesWithUnhealthy = false

// skipIfOneProcess skips a test in which two processes serve one resource: the kubelet takes the end of a stream for that of the
// plugin which registered last. deploy/daemonset.yaml has no maxSurge for that reason.
func skipIfOneProcess(t *testing.T) {
	t.Skip("kubelets up to 1.36 confuse two processes that serve one resource")
}

// deviceManager has the methods of 1.37.
type deviceManager struct{ *devicemanager.ManagerImpl }

func newManagers(logger klog.Logger, policy string) (*deviceManager, topologymanager.Manager, error) {
	nodes, err := numaNodes(topologymanager.NewManager)
	if err != nil {
		return nil, nil, err
	}
	store := topologymanager.NewFakeManager()
	if policy != "" {
		if store, err = topologymanager.NewManager(nodes, policy, "container", nil); err != nil {
			return nil, nil, err
		}
	}
	m, err := devicemanager.NewManagerImpl(nodes, store)
	if err != nil || policy == "" {
		return &deviceManager{m}, nil, err
	}
	addHints(logger, store, m)
	return &deviceManager{m}, store, nil
}

// numaNodes returns two nodes for a function of the kubelet. Their type is in a module that the present version does not have,
// and which go.mod must not require for this file.
func numaNodes[Node any](func([]Node, string, string, map[string]string) (topologymanager.Manager, error)) ([]Node, error) {
	var nodes []Node
	err := json.Unmarshal([]byte(`[{"node_id": 0}, {"node_id": 1}]`), &nodes)
	return nodes, err
}

func admitPod(_ context.Context, m topologymanager.Manager, pod *v1.Pod, _ operation) lifecycle.PodAdmitResult {
	return m.Admit(&lifecycle.PodAdmitAttributes{Pod: pod})
}

func (m *deviceManager) Allocate(_ context.Context, pod *v1.Pod, c *v1.Container, _ operation) error {
	return m.ManagerImpl.Allocate(pod, c)
}

func (m *deviceManager) GetCapacity(klog.Logger) (capacity, allocatable v1.ResourceList, removed []string) {
	return m.ManagerImpl.GetCapacity()
}

func (m *deviceManager) GetAllocatableDevices(klog.Logger) devicemanager.ResourceDeviceInstances {
	return m.ManagerImpl.GetAllocatableDevices()
}

func (m *deviceManager) UpdateAllocatedDevices(klog.Logger) { m.ManagerImpl.UpdateAllocatedDevices() }

func (m *deviceManager) UpdateAllocatedResourcesStatus(_ klog.Logger, pod *v1.Pod, status *v1.PodStatus) {
	m.ManagerImpl.UpdateAllocatedResourcesStatus(pod, status)
}

func (m *deviceManager) GetTopologyHints(_ klog.Logger, pod *v1.Pod, c *v1.Container, _ operation) map[string][]topologymanager.TopologyHint {
	return m.ManagerImpl.GetTopologyHints(pod, c)
}

func (d nodeDevices) UpdateAllocatedDevices() { d.n.current().UpdateAllocatedDevices(d.n.logger) }

func (nodeDevices) GetAllocatableDevices() []*podresourcesapi.ContainerDevices { return nil }

func (noCPUs) GetCPUs(string, string) []int64 { return nil }

func (noMemory) GetMemory(string, string) []*podresourcesapi.ContainerMemory { return nil }
func (noMemory) GetAllocatableMemory() []*podresourcesapi.ContainerMemory    { return nil }

func (noClaims) GetDynamicResources(*v1.Pod, *v1.Container) []*podresourcesapi.DynamicResource {
	return nil
}
