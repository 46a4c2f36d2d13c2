//go:build before1.35

package dra

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

// pastForgiven is whether the device manager leaves a name that it knows from a device plugin to DRA, where the scheduler did.
const pastForgiven = false

func (m *deviceManager) Start(_ klog.Logger, pods devicemanager.ActivePodsFunc, ready config.SourcesReady, containers containermap.ContainerMap, running sets.Set[string]) error {
	return m.ManagerImpl.Start(pods, ready, containers, running)
}

func (m *deviceManager) Stop(klog.Logger) error { return m.ManagerImpl.Stop() }

func (m *deviceManager) GetDeviceRunContainerOptions(_ context.Context, pod *v1.Pod, c *v1.Container) (*devicemanager.DeviceRunContainerOptions, error) {
	return m.ManagerImpl.GetDeviceRunContainerOptions(pod, c)
}
