//go:build !before1.37

package kubelet

import (
	"context"
	"testing"

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// The tests call the kubelet as version 1.37 has it. The files api_*_test.go give older versions the same names: make matrix
// runs the tests with the module of another version, and with a tag before1.N for each version N that is newer.

const (
	add    = lifecycle.AddOperation
	resize = lifecycle.ResizeOperation
)

func skipIfOneProcess(*testing.T) {}

// resizesWithUnhealthy is whether a pod that holds a device which is no longer healthy can be resized in place.
const resizesWithUnhealthy = true

type deviceManager = devicemanager.ManagerImpl

// newManagers returns the managers of a node with two NUMA nodes; without a policy no topology manager.
func newManagers(logger klog.Logger, policy string) (*deviceManager, topologymanager.Manager, error) {
	nodes := []cadvisor.Node{{Id: 0}, {Id: 1}}
	if policy == "" {
		m, err := devicemanager.NewManagerImpl(logger, nodes, topologymanager.NewFakeManager(logger))
		return m, nil, err
	}
	topology, err := topologymanager.NewManager(logger, nodes, policy, "container", nil)
	if err != nil {
		return nil, nil, err
	}
	m, err := devicemanager.NewManagerImpl(logger, nodes, topology)
	if err == nil {
		topology.AddHintProvider(logger, m)
	}
	return m, topology, err
}

func admitPod(ctx context.Context, m topologymanager.Manager, pod *v1.Pod, operation lifecycle.Operation) lifecycle.PodAdmitResult {
	return m.Admit(ctx, &lifecycle.PodAdmitAttributes{Pod: pod, Operation: operation})
}

// What the pod-resources API has of this node, beside pods.

func (d nodeDevices) UpdateAllocatedDevices(logger klog.Logger) {
	d.n.current().UpdateAllocatedDevices(logger)
}

func (nodeDevices) GetAllocatableDevices(klog.Logger) []*podresourcesapi.ContainerDevices { return nil }

func (noCPUs) GetCPUs(*v1.Pod, *v1.Container) []int64 { return nil }
func (noCPUs) GetPodCPUs(string) []int64              { return nil }

func (noMemory) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesapi.ContainerMemory {
	return nil
}
func (noMemory) GetPodMemory(klog.Logger, string) []*podresourcesapi.ContainerMemory { return nil }
func (noMemory) GetAllocatableMemory(klog.Logger) []*podresourcesapi.ContainerMemory { return nil }

func (noClaims) GetDynamicResources(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesapi.DynamicResource {
	return nil
}
