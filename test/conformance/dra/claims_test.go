package dra

import (
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

// result is a device that the scheduler has allocated for a request.
func result(request, device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: nodeName, Device: device}
}

// deviceName is the name of a GPU in slices.
func deviceName(uuid string) string { return strings.ToLower(uuid) }

// claim makes an allocated claim.
func claim(name string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-of-" + name)},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: results},
		}},
	}
}

// pod makes a pod with claims and stores them in the API, reserved for it. Its container uses all of them.
func (n *node) pod(name string, claims ...*resourceapi.ResourceClaim) *v1.Pod {
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-of-pod-" + name)},
		Spec:       v1.PodSpec{NodeName: nodeName, Containers: []v1.Container{{Name: "app"}}},
		Status:     v1.PodStatus{Phase: v1.PodRunning},
	}
	for _, c := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: c.Name, ResourceClaimName: ptr.To(c.Name)})
		p.Spec.Containers[0].Resources.Claims = append(p.Spec.Containers[0].Resources.Claims, v1.ResourceClaim{Name: c.Name})
		// As for a claim of a template: kubelets of 1.35 have no health of others.
		p.Status.ResourceClaimStatuses = append(p.Status.ResourceClaimStatuses, v1.PodResourceClaimStatus{Name: c.Name, ResourceClaimName: ptr.To(c.Name)})
		c = c.DeepCopy()
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: p.UID})
		n.api.putClaim(c)
	}
	n.addPod(p)
	return p
}

// prepare is what the kubelet does before it creates the pod's sandbox.
func (n *node) prepare(p *v1.Pod) error { return n.kubelet.PrepareResources(n.Context(), p) }

// run prepares a pod and returns the CDI devices of its container, sorted.
func (n *node) run(p *v1.Pod) []string {
	n.Helper()
	n.Must(n.prepare(p))
	return n.cdi(p)
}

// cdi are the CDI devices that the container runtime gets for a pod's container, sorted.
func (n *node) cdi(p *v1.Pod) (names []string) {
	n.Helper()
	info, err := n.kubelet.GetResources(p, &p.Spec.Containers[0])
	n.Must(err)
	for _, d := range info.CDIDevices {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	if repeatsDevices {
		names = slices.Compact(names)
	}
	return names
}

// finish is what the kubelet does after the pod's containers ended.
func (n *node) finish(p *v1.Pod) error {
	err := n.kubelet.UnprepareResources(n.Context(), p)
	if err == nil {
		n.removePod(p)
	}
	return err
}

// request is a claim in a call of the kubelet.
func request(c *resourceapi.ResourceClaim) *drapb.Claim {
	return claimMessage(c.Namespace, c.Name, string(c.UID))
}

// health is what the kubelet writes about a pod's devices into its status: "Unhealthy: text" by resource ID.
func (n *node) health(p *v1.Pod) map[string]string {
	status := v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: "app"}}}
	n.kubelet.updateStatus(n.logger, p, &status)
	texts := map[string]string{}
	for _, s := range status.ContainerStatuses[0].AllocatedResourcesStatus {
		for _, r := range s.Resources {
			texts[string(r.ResourceID)] = fmt.Sprintf("%s: %s", r.Health, statusMessage(r))
		}
	}
	return texts
}

// since is a duration for messages and measurements.
func since(t time.Time) time.Duration { return time.Since(t).Round(time.Millisecond) }
