//go:build !before1.37

package scheduling

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/kubernetes/pkg/controller/devicetainteviction"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	devices "github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
)

// kept is how long a pod is watched that nothing deletes.
const kept = time.Hour

// evicting is the device taint eviction controller with a pod that uses the first GPU.
type evicting struct {
	testing.TB
	client *fake.Clientset
}

// startEviction starts the controller. It ends with ctx.
func startEviction(ctx context.Context, t testing.TB, pod *v1.Pod, claim *resourceapi.ResourceClaim, slices []*resourceapi.ResourceSlice) *evicting {
	t.Helper()
	client := fake.NewClientset(pod, claim, slices[0])
	all := informers.NewSharedInformerFactory(client, 0)
	resources := all.Resource().V1()
	controller := devicetainteviction.New(client, all.Core().V1().Pods(), resources.ResourceClaims(), resources.ResourceSlices(), resources.DeviceTaintRules(), resources.DeviceClasses(), "eviction")
	all.Start(ctx.Done())
	all.WaitForCacheSync(ctx.Done())
	go func() { _ = controller.Run(ctx, 1) }() // the end of ctx is its error
	return &evicting{t, client}
}

// deletedAfter returns after what time the pod is deleted; kept if it is not.
func (e *evicting) deletedAfter(limit time.Duration) time.Duration {
	e.Helper()
	start := time.Now()
	for time.Since(start) < limit {
		synctest.Wait()
		_, err := e.client.CoreV1().Pods("default").Get(e.Context(), "pod", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return time.Since(start).Truncate(time.Second)
		}
		if err != nil {
			e.Fatal(err)
		}
		time.Sleep(time.Second / 4)
	}
	return kept
}

// podWith returns a pod with a claim, which has the first GPU.
func podWith(tolerations ...resourceapi.DeviceToleration) (*v1.Pod, *resourceapi.ResourceClaim) {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "pod", Namespace: "default", UID: "pod-uid"},
		Spec:       v1.PodSpec{NodeName: node, ResourceClaims: []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("claim")}}},
	}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "claim", Namespace: "default", UID: "claim-uid"},
		Status: resourceapi.ResourceClaimStatus{
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod.Name, UID: pod.UID}},
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "gpu", Driver: devices.Driver, Pool: node, Device: devices.DeviceName(inventory.Unit{Device: coretest.GPUs(1).Devices[0]}), Tolerations: tolerations,
			}}}},
		},
	}
	return pod, claim
}

// observed returns the devices of a node whose first GPU has had a fault for some time.
func observed(o health.Observation, since time.Duration) devices.Input {
	if o.At == (gpu.Placement{}) {
		o.At = gpu.WholeGPU(coretest.GPU(0))
	}
	l := health.Ledger{}.Apply(health.DefaultPolicy(), time.Now().Add(-since), o)
	return devices.Input{Allocatable: core.Build(coretest.GPUs(2), l, config()).WithoutHost(), Evict: true}
}

// Case 42: Kubernetes deletes a pod of an unhealthy device only where the operator has asked for that, and after the time that its claim
// tolerates the taint, from the beginning of the fault. Degraded, unknown and withdrawn devices never cost a pod.
func TestEviction(t *testing.T) {
	const (
		unhealthy = uint64(95)
		degraded  = uint64(94)
	)
	tolerate := func(seconds int64) resourceapi.DeviceToleration {
		return resourceapi.DeviceToleration{Key: "gpu.nvidia.com/xid", Operator: resourceapi.DeviceTolerationOpExists, Effect: resourceapi.DeviceTaintEffectNoExecute, TolerationSeconds: &seconds}
	}
	xid := func(code uint64) health.Observation { return health.Observation{Kind: health.XID, Code: code} }
	without := func(in devices.Input) devices.Input { in.Evict = false; return in }
	for about, tc := range map[string]struct {
		in          func() devices.Input
		tolerations []resourceapi.DeviceToleration
		want        time.Duration
	}{
		"unhealthy":             {func() devices.Input { return observed(xid(unhealthy), time.Minute) }, nil, 0},
		"unhealthy, by default": {func() devices.Input { return without(observed(xid(unhealthy), time.Minute)) }, nil, kept},
		"degraded":              {func() devices.Input { return observed(xid(degraded), time.Minute) }, nil, kept},
		"unknown": {func() devices.Input {
			return observed(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverFailed)}, time.Minute)
		}, nil, kept},
		"lost":                               {func() devices.Input { return observed(health.Observation{Kind: health.Lost}, time.Minute) }, nil, 0},
		"tolerated for a while":              {func() devices.Input { return observed(xid(unhealthy), 100*time.Second) }, []resourceapi.DeviceToleration{tolerate(300)}, 200 * time.Second},
		"tolerated for less than it is old":  {func() devices.Input { return observed(xid(unhealthy), time.Hour) }, []resourceapi.DeviceToleration{tolerate(300)}, 0},
		"another cause is tolerated":         {func() devices.Input { return observed(health.Observation{Kind: health.Lost}, time.Minute) }, []resourceapi.DeviceToleration{tolerate(300)}, 0},
		"withdrawn, though the agent evicts": {func() devices.Input { in := observed(xid(degraded), 0); in.Cordoned = "test"; return in }, nil, kept},
		"of another agent":                   {func() devices.Input { return hostClaimed(observed(xid(degraded), 0)) }, nil, kept},
	} {
		t.Run(about, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer synctest.Wait()
				defer cancel()
				pod, claim := podWith(tc.tolerations...)
				all := publish(t, devices.Devices(tc.in()))
				if len(all[0].Spec.Devices[0].Taints) == 0 {
					t.Fatal("no taint")
				}
				e := startEviction(ctx, t, pod, claim, all)
				if got := e.deletedAfter(30 * time.Minute); got != tc.want {
					t.Errorf("deleted after %v, want %v", got, tc.want)
				}
			})
		})
	}
}

// hostClaimed returns the devices of a node on which another agent offers the first GPU.
func hostClaimed(in devices.Input) devices.Input {
	in.Allocatable = in.Allocatable.WithHost(inventory.Host{Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(0)), Earlier: true}}}, inventory.OverlapRefuse)
	return in
}

// Case 42: a recovery within the tolerated time cancels the deletion. The controller does not look at pods that request an extended
// resource, which have no claim in their spec: they stay.
func TestEvictionSpares(t *testing.T) {
	seconds := int64(300)
	tolerated := resourceapi.DeviceToleration{Operator: resourceapi.DeviceTolerationOpExists, Effect: resourceapi.DeviceTaintEffectNoExecute, TolerationSeconds: &seconds}
	start := func(t *testing.T, extended bool) (*evicting, *resourceapi.ResourceSlice, context.CancelFunc) {
		ctx, cancel := context.WithCancel(t.Context())
		pod, claim := podWith(tolerated)
		if extended {
			pod.Spec.ResourceClaims = nil
			pod.Status.ExtendedResourceClaimStatus = &v1.PodExtendedResourceClaimStatus{ResourceClaimName: "claim"}
		}
		slices := publish(t, devices.Devices(observed(health.Observation{Kind: health.XID, Code: 95}, 100*time.Second)))
		return startEviction(ctx, t, pod, claim, slices), slices[0], cancel
	}
	t.Run("recovered in time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			e, slice, cancel := start(t, false)
			defer synctest.Wait()
			defer cancel()
			if got := e.deletedAfter(150 * time.Second); got != kept {
				t.Fatalf("deleted after %v", got)
			}
			healthy := publish(t, build(coretest.GPUs(2), config(), health.Ledger{}))[0]
			healthy.ResourceVersion = slice.ResourceVersion
			if _, err := e.client.ResourceV1().ResourceSlices().Update(t.Context(), healthy, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if got := e.deletedAfter(30 * time.Minute); got != kept {
				t.Errorf("deleted after the recovery, in %v", got)
			}
		})
	})
	t.Run("an extended resource", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			e, _, cancel := start(t, true)
			defer synctest.Wait()
			defer cancel()
			if got := e.deletedAfter(30 * time.Minute); got != kept {
				t.Errorf("deleted after %v", got)
			}
		})
	})
}
