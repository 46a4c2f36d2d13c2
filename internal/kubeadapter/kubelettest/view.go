package kubelettest

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Attempts returns all Register calls, in order.
func (k *Kubelet) Attempts() []Registration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.attempts)
}

// Registrations returns the Register calls that succeeded, in order.
func (k *Kubelet) Registrations() []Registration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.accepted)
}

// Lists returns the ListAndWatch responses for a resource, of all streams.
func (k *Kubelet) Lists(resource string) [][]*v1beta1.Device {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.lists[resource])
}

// Connected returns the socket names of the plugins of a resource that are connected, in the order of their registration.
func (k *Kubelet) Connected(resource string) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var names []string
	if k.process != nil {
		for _, c := range k.process.manager.clients[resource] {
			names = append(names, filepath.Base(c.path))
		}
	}
	return names
}

// Listed returns when the plugin of a resource that is called sent its first list; zero if it has not.
func (k *Kubelet) Listed(resource string) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.endpoint(resource); c != nil {
		return c.listed
	}
	return time.Time{}
}

// Devices returns the devices of a resource, and whether a plugin is connected. Otherwise they are unhealthy.
func (k *Kubelet) Devices(resource string) ([]*v1beta1.Device, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.process == nil {
		return nil, false
	}
	return slices.Clone(k.process.manager.devices[resource]), k.endpoint(resource) != nil
}

// Capacity returns the number of devices and of healthy devices of a resource, as in the status of a node.
func (k *Kubelet) Capacity(resource string) (capacity, allocatable int) {
	devices, _ := k.Devices(resource)
	for _, d := range devices {
		if d.GetHealth() == v1beta1.Healthy {
			allocatable++
		}
	}
	return len(devices), allocatable
}

// Await waits until ok returns true. It calls ok after each change.
func (k *Kubelet) Await(ctx context.Context, what string, ok func() bool) error {
	for {
		_, changed := k.changes.LoadNext()
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

// Allocate calls Allocate for one container, as the kubelet does at the admission of a pod.
func (k *Kubelet) Allocate(ctx context.Context, resource string, ids ...string) (*v1beta1.ContainerAllocateResponse, error) {
	plugin, err := k.Plugin(resource)
	if err != nil {
		return nil, err
	}
	r, err := plugin.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err == nil {
		k.mu.Lock()
		err = k.writeCheckpoint()
		k.mu.Unlock()
	}
	return single(r.GetContainerResponses(), err)
}

// Prefer calls GetPreferredAllocation for n of the available devices.
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
	c, err := single(r.GetContainerResponses(), err)
	return c.GetDeviceIDs(), err
}

// single returns the response for the only container of a request.
func single[T any](responses []*T, err error) (*T, error) {
	if err == nil && len(responses) != 1 {
		err = fmt.Errorf("%d responses for one container", len(responses))
	}
	if err != nil {
		return nil, err
	}
	return responses[0], nil
}

// Plugin returns a client of the plugin of a resource that is called.
func (k *Kubelet) Plugin(resource string) (v1beta1.DevicePluginClient, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.endpoint(resource)
	if c == nil {
		return nil, fmt.Errorf("no device plugin for %s", resource)
	}
	return c.plugin, nil
}
