//go:build !before1.37

package dra

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// The tests call the kubelet as version 1.37 has it. The files api_*_test.go give older versions the same names: make matrix
// runs the tests with the module of another version, and with a tag before1.N for each version N that is newer.

// repeatsDevices is whether a kubelet that prepares a pod again adds the devices of the answer to those that it has.
const repeatsDevices = false

func (r *registrations) ValidatePlugin(ctx context.Context, name, endpoint string, versions []string) error {
	err := r.PluginHandler.ValidatePlugin(ctx, name, endpoint, versions)
	return r.validated(endpoint, versions, err)
}

func (r *registrations) RegisterPlugin(ctx context.Context, name, endpoint string, versions []string, timeout *time.Duration) error {
	err := r.PluginHandler.RegisterPlugin(ctx, name, endpoint, versions, timeout)
	return r.registered(endpoint, versions, err)
}

func (r *registrations) DeRegisterPlugin(ctx context.Context, name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(ctx, name, endpoint)
	r.deregistered(endpoint)
}

func (k *kubelet) updateStatus(logger klog.Logger, pod *v1.Pod, status *v1.PodStatus) {
	k.UpdateAllocatedResourcesStatus(logger, pod, status)
}
