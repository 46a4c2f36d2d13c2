//go:build before1.37

package dra

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// deviceManager has the methods of 1.37.
type deviceManager struct{ *devicemanager.ManagerImpl }

func newDeviceManager(klog.Logger) (*deviceManager, error) {
	m, err := devicemanager.NewManagerImpl(nil, topologymanager.NewFakeManager())
	return &deviceManager{m}, err
}

func allocate(_ context.Context, m *deviceManager, p *v1.Pod, c *v1.Container) error {
	return m.Allocate(p, c)
}

func (m *deviceManager) GetCapacity(klog.Logger) (capacity, allocatable v1.ResourceList, removed []string) {
	return m.ManagerImpl.GetCapacity()
}

func (d nodeDevices) UpdateAllocatedDevices() { d.b.devices.UpdateAllocatedDevices() }

func (nodeDevices) GetAllocatableDevices() []*podresourcesapi.ContainerDevices { return nil }

func (c nodeClaims) GetDynamicResources(p *v1.Pod, container *v1.Container) []*podresourcesapi.DynamicResource {
	return c.of(p, container)
}

func (noCPUs) GetCPUs(string, string) []int64 { return nil }

func (noMemory) GetMemory(string, string) []*podresourcesapi.ContainerMemory { return nil }
func (noMemory) GetAllocatableMemory() []*podresourcesapi.ContainerMemory    { return nil }
