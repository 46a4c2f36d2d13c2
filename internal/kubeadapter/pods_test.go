package kubeadapter

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/watch"
)

const h100 = "nvidia.com/h100"

// fastTrackerTimings are short, in the same order as defaultTrackerTimings, except retention.
var fastTrackerTimings = trackerTimings{
	queryTimeout: 500 * time.Millisecond, loadTimeout: time.Second,
	minInterval: time.Millisecond, maxInterval: 20 * time.Millisecond, active: 100 * time.Millisecond,
	stale: time.Second, allocateToList: 300 * time.Millisecond, retention: 24 * time.Hour,
}

// pods serves the kubelet's pod-resources API until the end of the test.
func (r *rig) pods() *kubelettest.PodResources {
	r.Helper()
	p, err := kubelettest.ServePodResources(r.podSocket())
	r.must(err)
	r.Cleanup(p.Close)
	return p
}

func (r *rig) podSocket() string { return filepath.Join(r.dir, "pod-resources", "kubelet.sock") }

// startTracking runs an adapter that queries the pod-resources API.
func (r *rig) startTracking(change ...func(*tracker)) {
	r.start(func(a *Adapter) {
		a.opts.PodResourcesSocket = r.podSocket()
		a.tracker = newTracker(a.src, a.opts)
		a.tracker.timings = fastTrackerTimings
		for _, c := range change {
			c(a.tracker)
		}
	})
}

// newTracking returns a rig with an adapter that offers two GPUs to a kubelet, and queries its pod-resources API.
func newTracking(t *testing.T, change ...func(*tracker)) (*rig, *kubelettest.PodResources) {
	t.Helper()
	r := newRig(t)
	r.startKubelet()
	pods := r.pods()
	r.offer(coretest.GPUs(2))
	r.startTracking(change...)
	r.awaitHealthy(GPUResource, 2)
	return r, pods
}

// oneElsewhere puts GPU 1 into another pool.
func oneElsewhere() core.Config {
	c := core.DefaultConfig()
	c.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(1)}}, Pool: "h100"}}
	return c
}

// allocate allocates devices to a pod, which the pod-resources API lists.
func (r *rig) allocate(p *kubelettest.PodResources, pod, resource string, ids ...string) {
	r.Helper()
	p.Hold(pod, resource, ids...)
	_, err := r.kubelet.Allocate(r.ctx, resource, ids...)
	r.must(err)
}

// listed returns a device of the kubelet's list; nil if it is not in the list.
func (r *rig) listed(resource, id string) *v1beta1.Device {
	devices, _ := r.kubelet.Devices(resource)
	if i := slices.IndexFunc(devices, func(d *v1beta1.Device) bool { return d.GetID() == id }); i >= 0 {
		return devices[i]
	}
	return nil
}

func (r *rig) awaitListed(resource, id, want string) {
	r.Helper()
	r.await(id+" is "+want+" as "+resource, func() bool { d := r.listed(resource, id); return d != nil && d.GetHealth() == want })
}

// awaitQueries waits for three more queries.
func (r *rig) awaitQueries(p *kubelettest.PodResources) {
	r.Helper()
	for before := p.Lists(); p.Lists() < before+3; {
		r.await("a query", func() bool { return p.Lists() > before })
	}
}

// An ID that is no longer offered stays in the list as unhealthy, with its NUMA node, while a pod holds it: kubelet 1.37
// dereferences nil when it makes topology hints for a pod with an ID that is not in the list.
func TestHeldIDStaysListed(t *testing.T) {
	gone := gpuIDs(1)[0]
	for _, c := range []struct {
		name string
		then *inventory.Inventory
	}{
		{"GPU removed", buildInventory(onlyFirst(), core.DefaultConfig())},
		{"GPU in another pool", buildInventory(coretest.GPUs(2), oneElsewhere())},
		{"GPU cut into instances", buildInventory(coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb"), mixedConfig())},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, pods := newTracking(t)
			r.allocate(pods, "default/holder", GPUResource, gone)
			r.src.Set(c.then)
			r.awaitListed(GPUResource, gone, v1beta1.Unhealthy)
			r.awaitQueries(pods)
			r.awaitListed(GPUResource, gone, v1beta1.Unhealthy)
			if nodes := r.listed(GPUResource, gone).GetTopology().GetNodes(); len(nodes) != 1 || nodes[0].GetID() != 1 {
				t.Errorf("on NUMA nodes %v, was on 1", nodes)
			}
			if warnings := r.adapter.Warnings(); len(warnings) != 1 || !strings.Contains(warnings[0], "default/holder") {
				t.Errorf("warnings: %q", warnings)
			}
			pods.Forget("default/holder")
			r.await("the end of the listing", func() bool { return r.listed(GPUResource, gone) == nil })
			if warnings := r.adapter.Warnings(); len(warnings) != 0 {
				t.Errorf("warnings: %q", warnings)
			}
		})
	}
}

// onlyFirst is the first of two GPUs.
func onlyFirst() gpu.Snapshot {
	s := coretest.GPUs(2)
	s.Devices, s.Links = s.Devices[:1], nil
	return gpu.NewSnapshot(s)
}

// A device that a pod holds under one resource is never allocated under another one, until the pod ends.
func TestHeldDeviceIsWithheld(t *testing.T) {
	r, pods := newTracking(t)
	id := gpuIDs(1)[0]
	r.allocate(pods, "default/holder", GPUResource, id)
	then := buildInventory(coretest.GPUs(2), oneElsewhere())
	r.src.Set(then)
	r.awaitListed(h100, id, v1beta1.Unhealthy)
	r.awaitQueries(pods)
	if _, err := r.kubelet.Allocate(r.ctx, h100, id); err == nil || !strings.Contains(err.Error(), "by pod default/holder under "+GPUResource) {
		t.Errorf("allocated twice: %v", err)
	}
	if u, _ := r.adapter.Withhold(then).Unit(inventory.UnitID(id)); u.Health.Reason != health.ReasonHeld {
		t.Errorf("reported as %s", u.Health)
	}
	for _, list := range r.kubelet.Lists(h100) {
		if list[0].GetHealth() == v1beta1.Healthy {
			t.Error("listed as healthy while a pod held it")
		}
	}
	pods.Forget("default/holder")
	r.awaitListed(h100, id, v1beta1.Healthy)
	_, err := r.kubelet.Allocate(r.ctx, h100, id)
	r.must(err)
}

// A device that no pod holds changes its resource immediately.
func TestFreeDeviceChangesResource(t *testing.T) {
	r, _ := newTracking(t, func(t *tracker) { t.timings.maxInterval, t.timings.active = time.Hour, time.Hour })
	r.src.Set(buildInventory(coretest.GPUs(2), oneElsewhere()))
	r.awaitHealthy(h100, 1)
	r.await("one GPU less", func() bool { n, _ := r.kubelet.Capacity(GPUResource); return n == 1 })
}

// An API that never answers delays neither the start nor Allocate. A device that changes its resource is withheld until no
// answer is expected.
func TestPodResourcesHang(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	pods := r.pods()
	pods.Hang(true)
	r.offer(coretest.GPUs(2))
	r.startTracking()
	r.awaitHealthy(GPUResource, 2)
	began := time.Now()
	_, err := r.kubelet.Allocate(r.ctx, GPUResource, gpuIDs(1)[0])
	r.must(err)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("Allocate took %v", took)
	}
	r.src.Set(buildInventory(coretest.GPUs(2), oneElsewhere()))
	r.awaitHealthy(h100, 1)
	r.awaitListed(GPUResource, gpuIDs(1)[0], v1beta1.Unhealthy)
}

// An error of the API does not mean that a pod has ended.
func TestPodResourcesError(t *testing.T) {
	r, pods := newTracking(t, func(t *tracker) { t.timings.stale = time.Hour })
	id := gpuIDs(1)[0]
	r.allocate(pods, "default/holder", GPUResource, id)
	pods.Fail(errors.New("unavailable"))
	r.src.Set(buildInventory(coretest.GPUs(2), oneElsewhere()))
	r.awaitListed(h100, id, v1beta1.Unhealthy)
	r.awaitQueries(pods)
	r.awaitListed(h100, id, v1beta1.Unhealthy)
	pods.Forget("default/holder")
	pods.Fail(nil)
	r.awaitListed(h100, id, v1beta1.Healthy)
}

// A kubelet that has just started, or that lists no pod, may not have received the pods from the API server.
func TestIncompletePodResources(t *testing.T) {
	for _, c := range []struct {
		name  string
		young time.Duration
		gone  []string
	}{
		{"just started", 24 * time.Hour, []string{"default/holder"}},
		{"no pod at all", 0, []string{"default/holder", "kube-system/agent"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.startKubelet()
			pods := r.pods()
			pods.Hold("default/holder", GPUResource, gpuIDs(1)[0])
			r.src.Set(buildInventory(coretest.GPUs(2), oneElsewhere()))
			r.startTracking(func(t *tracker) { t.timings.startup = c.young })
			r.awaitListed(h100, gpuIDs(1)[0], v1beta1.Unhealthy)
			pods.Forget(c.gone...)
			r.awaitQueries(pods)
			r.awaitListed(h100, gpuIDs(1)[0], v1beta1.Unhealthy)
		})
	}
}

// Resources of other plugins are not registered, although pods hold devices of them.
func TestResourcesOfOtherPlugins(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	pods := r.pods()
	pods.Hold("default/vm", "nvidia.com/GH100_H100L_80GB", "47", gpuIDs(1)[0])
	pods.Hold("default/nic", "nvidia.com/hostdev", "0000:3b:00.0")
	r.offer(coretest.GPUs(2))
	r.startTracking()
	r.awaitListed(GPUResource, gpuIDs(1)[0], v1beta1.Unhealthy) // the same GPU, allocated by another plugin
	r.awaitHealthy(GPUResource, 1)
	r.awaitQueries(pods)
	for _, a := range r.kubelet.Attempts() {
		if a.Resource != GPUResource {
			t.Errorf("registered %s", a.Resource)
		}
	}
}

// The API is queried only after a change of the units, or while the offer depends on pods.
func TestQueriesNeedAReason(t *testing.T) {
	r, pods := newTracking(t)
	quiet := func() (n int) {
		for n = -1; n != pods.Lists(); {
			n = pods.Lists()
			watch.Sleep(r.ctx, 5*fastTrackerTimings.active)
		}
		return n
	}
	before := quiet()
	r.offer(coretest.GPUs(2), 1) // lost: the same units
	r.awaitHealthy(GPUResource, 1)
	if n := quiet(); n != before {
		t.Errorf("%d queries because a GPU is lost", n-before)
	}
	r.offer(coretest.GPUs(3))
	r.awaitHealthy(GPUResource, 3)
	if n := quiet(); n == before {
		t.Error("no query after a change")
	}
}
