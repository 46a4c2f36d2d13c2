package kubelettest

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Attempts are all calls of Register, in order.
func (k *Kubelet) Attempts() []Registration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.attempts)
}

// Registrations are all that were accepted, in order.
func (k *Kubelet) Registrations() []Registration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.accepted)
}

// Lists are all that were received for a resource, over all streams.
func (k *Kubelet) Lists(resource string) [][]*v1beta1.Device {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.lists[resource])
}

// Connected are the socket names of the plugins of a resource that the running kubelet has, in the order in
// which they registered.
func (k *Kubelet) Connected(resource string) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var names []string
	if k.process != nil {
		for _, c := range k.process.books.clients[resource] {
			names = append(names, filepath.Base(c.path))
		}
	}
	return names
}

// Listed is when the first list came from the plugin that calls of a resource go to; zero if none did.
func (k *Kubelet) Listed(resource string) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.called(resource); c != nil {
		return c.listed
	}
	return time.Time{}
}

// Leaked counts the open connections that are not in the books of the running kubelet, as a registration that
// fails leaves one.
func (k *Kubelet) Leaked() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.process == nil {
		return 0
	}
	kept := 0
	for _, clients := range k.process.books.clients {
		kept += len(clients)
	}
	return len(k.process.open) - kept
}

// Devices are what the running kubelet has of a resource now; false if no plugin is connected, and then
// they are unhealthy.
func (k *Kubelet) Devices(resource string) ([]*v1beta1.Device, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.process == nil {
		return nil, false
	}
	return slices.Clone(k.process.books.devices[resource]), k.called(resource) != nil
}

// Capacity counts a resource as the node's status does: all devices, and the healthy ones.
func (k *Kubelet) Capacity(resource string) (capacity, allocatable int) {
	devices, _ := k.Devices(resource)
	for _, d := range devices {
		if d.GetHealth() == v1beta1.Healthy {
			allocatable++
		}
	}
	return len(devices), allocatable
}

// Await waits until ok holds, looking again whenever something changes.
func (k *Kubelet) Await(ctx context.Context, what string, ok func() bool) error {
	for {
		k.mu.Lock()
		changed := k.changed
		k.mu.Unlock()
		if ok() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, ctx.Err())
		}
	}
}

// AwaitHealthy waits until n devices of a resource are healthy.
func (k *Kubelet) AwaitHealthy(ctx context.Context, resource string, n int) error {
	return k.Await(ctx, fmt.Sprintf("%d healthy %s", n, resource), func() bool {
		_, allocatable := k.Capacity(resource)
		return allocatable == n
	})
}

// Allocate asks for one container, as the kubelet does at pod admission.
func (k *Kubelet) Allocate(ctx context.Context, resource string, ids ...string) (*v1beta1.ContainerAllocateResponse, error) {
	plugin, err := k.Plugin(resource)
	if err != nil {
		return nil, err
	}
	r, err := plugin.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, err
	}
	if len(r.GetContainerResponses()) != 1 {
		return nil, fmt.Errorf("%d responses for one container", len(r.GetContainerResponses()))
	}
	return r.GetContainerResponses()[0], nil
}

// Prefer asks which n of the available units to take.
func (k *Kubelet) Prefer(ctx context.Context, resource string, available, required []string, n int) ([]string, error) {
	plugin, err := k.Plugin(resource)
	if err != nil {
		return nil, err
	}
	r, err := plugin.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: available, MustIncludeDeviceIDs: required, AllocationSize: int32(n),
		}},
	})
	if err != nil {
		return nil, err
	}
	if len(r.GetContainerResponses()) != 1 {
		return nil, fmt.Errorf("%d responses for one container", len(r.GetContainerResponses()))
	}
	return r.GetContainerResponses()[0].GetDeviceIDs(), nil
}

// Plugin is the connected plugin of a resource, for any call.
func (k *Kubelet) Plugin(resource string) (v1beta1.DevicePluginClient, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.called(resource)
	if c == nil {
		return nil, fmt.Errorf("no device plugin for %s", resource)
	}
	return c.plugin, nil
}
