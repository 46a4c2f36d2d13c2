//go:build !before1.37

package dra

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

type deviceManager = devicemanager.ManagerImpl

func newDeviceManager(logger klog.Logger) (*deviceManager, error) {
	return devicemanager.NewManagerImpl(logger, nil, topologymanager.NewFakeManager(logger))
}

func allocate(ctx context.Context, m *deviceManager, p *v1.Pod, c *v1.Container) error {
	return m.Allocate(ctx, p, c, lifecycle.AddOperation)
}

func (d nodeDevices) UpdateAllocatedDevices(logger klog.Logger) {
	d.b.devices.UpdateAllocatedDevices(logger)
}

func (nodeDevices) GetAllocatableDevices(klog.Logger) []*podresourcesapi.ContainerDevices { return nil }

func (c nodeClaims) GetDynamicResources(_ klog.Logger, p *v1.Pod, container *v1.Container) []*podresourcesapi.DynamicResource {
	return c.of(p, container)
}

func (noCPUs) GetCPUs(*v1.Pod, *v1.Container) []int64 { return nil }
func (noCPUs) GetPodCPUs(string) []int64              { return nil }

func (noMemory) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesapi.ContainerMemory {
	return nil
}
func (noMemory) GetPodMemory(klog.Logger, string) []*podresourcesapi.ContainerMemory { return nil }
func (noMemory) GetAllocatableMemory(klog.Logger) []*podresourcesapi.ContainerMemory { return nil }
