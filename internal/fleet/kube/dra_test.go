package kube

import (
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const draDriver = "gpu.nvidia.com"

// newDRACluster has nodes whose GPUs are in slices, and the class of GPUs.
func newDRACluster(t *testing.T, gpus ...int) *cluster {
	c := newTestCluster(t, gpus...)
	for i, n := range c.nodes {
		delete(n.Status.Allocatable, gpuResource)
		delete(n.Status.Capacity, gpuResource)
		s := &resourcev1.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "slice-" + n.Name},
			Spec:       resourcev1.ResourceSliceSpec{Driver: draDriver, NodeName: new(n.Name), Pool: resourcev1.ResourcePool{Name: n.Name, Generation: 1, ResourceSliceCount: 1}},
		}
		for g := range gpus[i] {
			s.Spec.Devices = append(s.Spec.Devices, draGPU(n.Name, g))
		}
		c.slices = append(c.slices, s)
	}
	c.classes = []*resourcev1.DeviceClass{{
		ObjectMeta: metav1.ObjectMeta{Name: draDriver},
		Spec:       resourcev1.DeviceClassSpec{Selectors: cel("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'")},
	}}
	return c
}

func draGPU(node string, n int) resourcev1.Device {
	name := node + string(rune('0'+n))
	return resourcev1.Device{Name: "gpu-" + name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{
		"uuid": {StringValue: new("GPU-" + name)}, "type": {StringValue: new("gpu")}, "parentUUID": {StringValue: new("")}, "profile": {StringValue: new("")},
	}}
}

func cel(expressions ...string) (all []resourcev1.DeviceSelector) {
	for _, e := range expressions {
		all = append(all, resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: e}})
	}
	return all
}

// claim has a pod run by a claim of its own for devices of its node.
func (c *cluster) claim(name, node string, devices ...int) (*corev1.Pod, *resourcev1.ResourceClaim) {
	p := c.run(name, node)
	delete(p.Spec.Containers[0].Resources.Requests, gpuResource)
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpus", ResourceClaimTemplateName: new("t")}}
	p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpus", ResourceClaimName: new(name + "-gpus")}}
	one := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name + "-gpus"}}
	one.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: draDriver, Count: int64(len(devices))}}}
	one.Status.Allocation = &resourcev1.AllocationResult{}
	for _, d := range devices {
		one.Status.Allocation.Devices.Results = append(one.Status.Allocation.Devices.Results, resourcev1.DeviceRequestAllocationResult{
			Request: "r", Driver: draDriver, Pool: node, Device: draGPU(node, d).Name,
		})
	}
	one.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: p.UID}}
	c.claims = append(c.claims, one)
	return p, one
}

func (c *cluster) taint(node string, device int) {
	for _, s := range c.slices {
		if *s.Spec.NodeName == node {
			s.Spec.Devices[device].Taints = []resourcev1.DeviceTaint{{Key: "gpu.nvidia.com/XID_95", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
		}
	}
}

// What is decided about a pod with a faulty GPU by a claim.
func TestDecisionDRA(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(c *cluster, p *corev1.Pod, claim *resourcev1.ResourceClaim)
		want   string
	}{
		"moves":           {func(*cluster, *corev1.Pod, *resourcev1.ResourceClaim) {}, "act default/p"},
		"on its own node": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) { c.claim("q", "b", 0, 1) }, "act default/p"},
		"no place": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) {
			c.claim("q", "b", 0, 1)
			c.claim("r", "a", 1)
		}, "wait default/p NO_PLACE"},
		"two devices, of which one is healthy": {func(c *cluster, p *corev1.Pod, one *resourcev1.ResourceClaim) {
			c.pods, c.claims = nil, nil
			c.claim("p", "a", 0, 1)
			c.claim("q", "b", 0)
		}, "wait default/p NO_PLACE"},
		"no taint": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) {
			c.slices[0].Spec.Devices[0].Taints = nil
		}, "DEVICE_NOT_SHOWN"},
		"claim that is made by a person": {func(_ *cluster, p *corev1.Pod, one *resourcev1.ResourceClaim) {
			p.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: "gpus", ResourceClaimName: new(one.Name)}
		}, "it is not known which devices default/p asks for"},
		"claim of two pods": {func(_ *cluster, _ *corev1.Pod, one *resourcev1.ResourceClaim) {
			one.Status.ReservedFor = append(one.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{UID: "x"})
		}, "it is not known which devices"},
		"claim that is not shown": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) { c.claims = nil }, "not by the servers' record"},
		"class that is not shown": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) { c.classes = nil }, "it is not known which devices"},
		"selector that is understood": {func(_ *cluster, _ *corev1.Pod, one *resourcev1.ResourceClaim) {
			one.Spec.Devices.Requests[0].Exactly.Selectors = cel(`device.attributes["gpu.nvidia.com"].uuid == "GPU-b1"`)
		}, "act default/p"},
		"selector of the faulty device": {func(_ *cluster, _ *corev1.Pod, one *resourcev1.ResourceClaim) {
			one.Spec.Devices.Requests[0].Exactly.Selectors = cel(`device.attributes["gpu.nvidia.com"].uuid == "GPU-a0"`)
		}, "wait default/p NO_PLACE"},
		"selector that is not understood": {func(_ *cluster, _ *corev1.Pod, one *resourcev1.ResourceClaim) {
			one.Spec.Devices.Requests[0].Exactly.Selectors = cel("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('79Gi')) >= 0")
		}, "it is not known which devices"},
		"alternatives": {func(_ *cluster, _ *corev1.Pod, one *resourcev1.ResourceClaim) {
			one.Spec.Devices.Requests[0] = resourcev1.DeviceRequest{Name: "r", FirstAvailable: []resourcev1.DeviceSubRequest{{Name: "x"}}}
		}, "it is not known which devices"},
		"constraints": {func(_ *cluster, _ *corev1.Pod, one *resourcev1.ResourceClaim) {
			one.Spec.Devices.Constraints = []resourcev1.DeviceConstraint{{}}
		}, "it is not known which devices"},
		"slices that are not complete": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) {
			c.claim("r", "a", 1)
			c.slices[1].Spec.Pool.ResourceSliceCount = 2
		}, "wait default/p NO_PLACE"},
		"slices of before": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) {
			old := c.slices[0].DeepCopy()
			old.Name, old.Spec.Pool.Generation = "old", 0
			old.Spec.Devices[0].Taints = nil
			c.slices = append(c.slices, old)
		}, "act default/p"},
		"the device is not in a slice": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) {
			c.slices[0].Spec.Devices = c.slices[0].Spec.Devices[1:]
		}, "HOLDERS_UNKNOWN"},
		"fault that the taints do not show yet on the other node": {func(c *cluster, _ *corev1.Pod, _ *resourcev1.ResourceClaim) {
			c.claim("r", "a", 1)
			c.report("b", start, xid("GPU-b0"), xid("GPU-b1"))
		}, "wait default/p NO_PLACE"},
		"extended resource of a class": {func(c *cluster, p *corev1.Pod, one *resourcev1.ResourceClaim) {
			c.classes[0].Spec.ExtendedResourceName = new(gpuResource)
			p.Spec.ResourceClaims, p.Status.ResourceClaimStatuses = nil, nil
			p.Spec.Containers[0].Resources.Requests[gpuResource] = *resource.NewQuantity(1, resource.DecimalSI)
			p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
				ResourceClaimName: one.Name, RequestMappings: []corev1.ContainerExtendedResourceRequest{{ContainerName: "c", ResourceName: gpuResource, RequestName: "r"}},
			}
			c.claim("q", "b", 0)
		}, "act default/p"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newDRACluster(t, 2, 2)
			p, one := c.claim("p", "a", 0)
			c.taint("a", 0)
			c.report("a", start, xid("GPU-a0", "uid-p"))
			tc.change(c, p, one)
			got := strings.Join(outcome(c.decide()), "\n")
			if !strings.Contains(got, tc.want) {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}

// MIG instances are on the GPU of their slice; which of its instances they are, their pods' faults tell.
func TestInstancesDRA(t *testing.T) {
	c := newDRACluster(t, 2)
	for i := range c.slices[0].Spec.Devices {
		d := &c.slices[0].Spec.Devices[i]
		d.Attributes["uuid"] = resourcev1.DeviceAttribute{StringValue: new("MIG-" + string(rune('0'+i)))}
		d.Attributes["parentUUID"] = resourcev1.DeviceAttribute{StringValue: new("GPU-P")}
	}
	c.claim("p", "a", 0)
	c.claim("q", "a", 1)
	c.taint("a", 0)
	f := xid("GPU-P", "uid-p")
	f.GI = new(uint32(3))
	c.report("a", start, f)
	s := c.seen(start)
	for _, d := range s.Nodes[0].Devices {
		if hit := f.Placement().Overlaps(d.At); hit != (d.ID == "MIG-0" || strings.Contains(string(d.ID), "GI 3")) {
			t.Errorf("%+v: hit %t", d, hit)
		}
	}
	whole := xid("GPU-P", "uid-p", "uid-q")
	c.report("a", start, whole)
	hit := 0
	for _, d := range c.seen(start).Nodes[0].Devices {
		if strings.HasPrefix(string(d.ID), "MIG-") && whole.Placement().Overlaps(d.At) {
			hit++
		}
	}
	if hit != 2 {
		t.Errorf("%d instances have the fault of their GPU", hit)
	}
}

// What is understood of CEL, and that nothing else is.
func TestConditions(t *testing.T) {
	for text, want := range map[string][]condition{
		`device.driver == 'gpu.nvidia.com'`:                           {{"", "gpu.nvidia.com"}},
		`device.driver == "a" && device.attributes["d.e"].t == 'x y'`: {{"", "a"}, {"d.e/t", "x y"}},
		`device.driver != 'gpu.nvidia.com'`:                           nil,
		`device.driver == 'a' || device.driver == 'b'`:                nil,
		`!(device.driver == 'a')`:                                     nil,
		`device.attributes['d'].t == 'a' + 'b'`:                       nil,
		`device.attributes['d'].t == '\x61'`:                          nil,
		`device.attributes['d'].t.startsWith('a')`:                    nil,
		`device.attributes['d'].n == 3`:                               nil,
		``:                                                            nil,
	} {
		got, ok := conditions([]string{text})
		if ok != (want != nil) || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v %t", text, got, ok)
		}
	}
}
