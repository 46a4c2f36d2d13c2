//go:build before1.37

package dra

import (
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// repeatsDevices is whether a kubelet that prepares a pod again adds the devices of the answer to those that it has.
const repeatsDevices = true

func (r *registrations) ValidatePlugin(name, endpoint string, versions []string) error {
	err := r.PluginHandler.ValidatePlugin(name, endpoint, versions)
	return r.validated(endpoint, versions, err)
}

func (r *registrations) RegisterPlugin(name, endpoint string, versions []string, timeout *time.Duration) error {
	err := r.PluginHandler.RegisterPlugin(name, endpoint, versions, timeout)
	return r.registered(endpoint, versions, err)
}

func (r *registrations) DeRegisterPlugin(name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(name, endpoint)
	r.deregistered(endpoint)
}

func (k *kubelet) updateStatus(_ klog.Logger, pod *v1.Pod, status *v1.PodStatus) {
	k.UpdateAllocatedResourcesStatus(pod, status)
}
