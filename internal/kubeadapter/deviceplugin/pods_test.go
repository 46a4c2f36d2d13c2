package deviceplugin

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
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
)

const h100 = "nvidia.com/h100"

// oneElsewhere is two GPUs, of which GPU 1 is in the pool h100.
func oneElsewhere() *inventory.Allocatable {
	c := core.DefaultConfig()
	c.Policy.Rules = []inventory.Rule{{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(1)}}, Pool: "h100"}}
	return buildInventory(coretest.GPUs(2), c)
}

// allElsewhere is two GPUs in the pool h100.
func allElsewhere() *inventory.Allocatable {
	c := core.DefaultConfig()
	c.Policy.Rules = []inventory.Rule{{Pool: "h100"}}
	return buildInventory(coretest.GPUs(2), c)
}

// tracking are the parts of the plugins that read the kubelet's records, before they run.
type tracking struct {
	timings trackerTimings
	pods    podresources.Timings
	store   AllocationStore
	inPod   bool
}

// fastPods are short, except for what the kubelet may take on a busy machine: without its answer nothing is refused.
var fastPods = podresources.Timings{
	Query: 20 * time.Second, Get: 20 * time.Second, MinInterval: time.Millisecond, MaxInterval: 20 * time.Millisecond,
	Active: 100 * time.Millisecond,
}

// newPodRig returns a rig with a running kubelet and its pod-resources API.
func newPodRig(t *testing.T) (*rig, *kubelettest.PodResources) {
	t.Helper()
	r := newRig(t)
	r.startKubelet()
	p, err := kubelettest.ServePodResources(r.podSocket())
	check.NoError(r, err)
	t.Cleanup(p.Close)
	return r, p
}

func (r *rig) podSocket() string { return filepath.Join(r.dir, "pod-resources", "kubelet.sock") }

// startTracking runs plugins that query the pod-resources API.
func (r *rig) startTracking(inv *inventory.Allocatable, change ...func(*tracking)) {
	t := tracking{timings: defaultTrackerTimings, pods: fastPods}
	t.timings.resend = 10 * time.Millisecond
	for _, c := range change {
		c(&t)
	}
	r.start(inv, func(p *Plugins) {
		if t.store != nil {
			p.opts.AllocationStore = t.store
		}
		p.pods = podresources.NewWithTimings(podresources.Options{
			Socket: r.podSocket(), Checkpoint: filepath.Join(r.dir, podresources.CheckpointName), InPod: t.inPod, Log: p.opts.Log,
		}, t.pods)
		p.tracker = newTracker(p.src, p.opts, p.pods)
		p.tracker.timings = t.timings
	})
}

// newTracking returns a rig with plugins that offer two GPUs to a kubelet, and query its pod-resources API.
func newTracking(t *testing.T, change ...func(*tracking)) (*rig, *kubelettest.PodResources) {
	t.Helper()
	r, pods := newPodRig(t)
	r.startTracking(gpus(2), change...)
	r.awaitHealthy(kubeadapter.GPUResource, 2)
	return r, pods
}

// allocate allocates devices to a pod, which the pod-resources API lists.
func (r *rig) allocate(p *kubelettest.PodResources, pod, resource string, ids ...string) {
	r.Helper()
	_, err := r.kubelet.Allocate(r.ctx, resource, ids...)
	check.NoError(r, err)
	p.Hold(pod, resource, ids...)
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
	check.Until(r, id+" is "+want+" as "+resource, func() bool { d := r.listed(resource, id); return d != nil && d.GetHealth() == want })
}

// awaitQueries requests readings and waits for three of them.
func (r *rig) awaitQueries(p *kubelettest.PodResources) {
	r.Helper()
	before := p.Lists()
	check.Until(r, "three readings", func() bool { r.plugins.pods.Request(); return p.Lists() >= before+3 })
}

// An ID that is no longer offered stays in the list as unhealthy, with its NUMA node, while a pod holds it: kubelet 1.37
// dereferences nil when it makes topology hints for a pod with an ID that is not in the list.
func TestHeldIDStaysListed(t *testing.T) {
	gone := gpuIDs(1)[0]
	onlyFirst := coretest.GPUs(2)
	onlyFirst.Devices, onlyFirst.Links = onlyFirst.Devices[:1], nil
	for name, then := range map[string]*inventory.Allocatable{
		"GPU removed":            buildInventory(gpu.NewSnapshot(onlyFirst), core.DefaultConfig()),
		"GPU in another pool":    oneElsewhere(),
		"GPU cut into instances": migGPU(),
	} {
		t.Run(name, func(t *testing.T) {
			r, pods := newTracking(t)
			r.allocate(pods, "default/holder", kubeadapter.GPUResource, gone)
			r.src.Set(then)
			r.awaitListed(kubeadapter.GPUResource, gone, v1beta1.Unhealthy)
			r.awaitQueries(pods)
			r.awaitListed(kubeadapter.GPUResource, gone, v1beta1.Unhealthy)
			if nodes := r.listed(kubeadapter.GPUResource, gone).GetTopology().GetNodes(); len(nodes) != 1 || nodes[0].GetID() != 1 {
				t.Errorf("on NUMA nodes %v, was on 1", nodes)
			}
			if warnings := problem.Lines(r.plugins.Problems()); len(warnings) != 1 || !strings.Contains(warnings[0], "default/holder") {
				t.Errorf("warnings: %q", warnings)
			}
			pods.Forget("default/holder")
			check.Until(r, "the end of the listing", func() bool { return r.listed(kubeadapter.GPUResource, gone) == nil })
			if warnings := problem.Lines(r.plugins.Problems()); len(warnings) != 0 {
				t.Errorf("warnings: %q", warnings)
			}
		})
	}
}

// A device that a pod holds under one resource is never allocated under another one, until the pod ends. An error of the API
// does not mean that it has.
func TestHeldDeviceIsWithheld(t *testing.T) {
	r, pods := newTracking(t)
	id := gpuIDs(1)[0]
	r.allocate(pods, "default/holder", kubeadapter.GPUResource, id)
	then := oneElsewhere()
	r.src.Set(then)
	r.awaitListed(h100, id, v1beta1.Unhealthy)
	r.awaitQueries(pods)
	if _, err := r.kubelet.Allocate(r.ctx, h100, id); err == nil || !strings.Contains(err.Error(), "held (by other work)") {
		t.Errorf("allocated twice, or the error names the pod of another tenant: %v", err)
	}
	if u, _ := r.plugins.Withhold(then).Unit(inventory.UnitID(id)); u.Health.Reason != health.ReasonHeld || u.Health.Detail != "by pod default/holder under "+kubeadapter.GPUResource {
		t.Errorf("reported as %s", u.Health)
	}
	pods.Fail(errors.New("unavailable"))
	r.awaitQueries(pods)
	pods.Forget("default/holder")
	r.awaitQueries(pods)
	for _, list := range r.kubelet.Lists(h100) {
		if list[0].GetHealth() == v1beta1.Healthy {
			t.Error("listed as healthy while a pod held it")
		}
	}
	pods.Fail(nil)
	r.awaitListed(h100, id, v1beta1.Healthy)
	_, err := r.kubelet.Allocate(r.ctx, h100, id)
	check.NoError(r, err)
}

// A device that no pod holds changes its resource immediately.
func TestFreeDeviceChangesResource(t *testing.T) {
	r, _ := newTracking(t, func(t *tracking) { t.pods.MaxInterval, t.pods.Active = time.Hour, time.Hour })
	r.src.Set(oneElsewhere())
	r.awaitHealthy(h100, 1)
	check.Until(r, "one GPU less", func() bool { n, _ := r.kubelet.Capacity(kubeadapter.GPUResource); return n == 1 })
}

// An API that never answers delays neither the start nor Allocate. A device that was allocated is withheld when it changes its resource: a pod
// may have it.
func TestPodResourcesHang(t *testing.T) {
	r, pods := newPodRig(t)
	pods.Hang(true)
	r.startTracking(gpus(2), func(t *tracking) { t.pods.Query, t.pods.Get = 500*time.Millisecond, 500*time.Millisecond })
	r.awaitHealthy(kubeadapter.GPUResource, 2)
	began := time.Now()
	_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, gpuIDs(1)[0])
	check.NoError(r, err)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("Allocate took %v", took)
	}
	r.src.Set(allElsewhere())
	r.awaitHealthy(h100, 1)
	r.awaitListed(h100, gpuIDs(1)[0], v1beta1.Unhealthy)
	r.awaitListed(kubeadapter.GPUResource, gpuIDs(1)[0], v1beta1.Unhealthy)
	pods.Hold("default/holder", kubeadapter.GPUResource, gpuIDs(1)[0])
	pods.Hang(false)
	check.Until(r, "the name of the pod", func() bool {
		return strings.Contains(strings.Join(problem.Lines(r.plugins.Problems()), ""), "default/holder")
	})
	pods.Forget("default/holder")
	r.awaitHealthy(h100, 2)
}

// A kubelet that has just started, or that does not list the pod of the agent, may not have received the pods from the API server.
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
			r, pods := newPodRig(t)
			pods.Hold("default/holder", kubeadapter.GPUResource, gpuIDs(1)[0])
			r.startTracking(oneElsewhere(), func(t *tracking) { t.pods.Startup, t.inPod = c.young, true })
			r.awaitListed(h100, gpuIDs(1)[0], v1beta1.Unhealthy)
			pods.Forget(c.gone...)
			r.awaitQueries(pods)
			r.awaitListed(h100, gpuIDs(1)[0], v1beta1.Unhealthy)
		})
	}
}

// Resources of other plugins are not registered, although pods hold devices of them.
func TestResourcesOfOtherPlugins(t *testing.T) {
	r, pods := newPodRig(t)
	pods.Hold("default/vm", "nvidia.com/GH100_H100L_80GB", "47", gpuIDs(1)[0])
	pods.Hold("default/nic", "nvidia.com/hostdev", "0000:3b:00.0")
	r.startTracking(gpus(2))
	r.awaitListed(kubeadapter.GPUResource, gpuIDs(1)[0], v1beta1.Unhealthy) // the same GPU, allocated by another plugin
	r.awaitHealthy(kubeadapter.GPUResource, 1)
	r.awaitQueries(pods)
	for _, a := range r.kubelet.Attempts() {
		if a.Resource != kubeadapter.GPUResource {
			t.Errorf("registered %s", a.Resource)
		}
	}
}

// The API is queried only after a change of the units, then several times, or while the device list depends on pods.
func TestQueriesNeedAReason(t *testing.T) {
	r, pods := newTracking(t, func(t *tracking) { t.pods.Active = 3 * fastPods.Active })
	quiet := func() (n int) {
		for n = -1; n != pods.Lists(); {
			n = pods.Lists()
			watch.Sleep(r.ctx, 5*fastPods.Active)
		}
		return n
	}
	// queries returns how many there are because of an inventory. The units before are those of two GPUs.
	queries := func(inv *inventory.Allocatable, healthy int) int {
		r.src.Set(gpus(2))
		r.awaitHealthy(kubeadapter.GPUResource, 2)
		before := quiet()
		r.src.Set(inv)
		r.awaitHealthy(kubeadapter.GPUResource, healthy)
		return quiet() - before
	}
	// On a busy machine a reading can come after the quiet, and the time after a request can pass before the second one. Not each time.
	const tries = 4
	lost := func() int { return queries(gpus(2, 1), 1) } // the same units
	if all := until(tries, lost, func(n int) bool { return n == 0 }); len(all) == tries {
		t.Errorf("%d queries because a GPU is lost", all)
	}
	added := func() int { return queries(gpus(3), 3) }
	if all := until(tries, added, func(n int) bool { return n >= 2 }); len(all) == tries {
		t.Errorf("%d queries after a change", all)
	}
}

// until returns the numbers before the first one that is right, of n at most.
func until(n int, next func() int, right func(int) bool) (wrong []int) {
	for range n {
		one := next()
		if right(one) {
			break
		}
		wrong = append(wrong, one)
	}
	return wrong
}

// The GPU of an instance that a pod holds is not given out whole while the pod runs, also when the instance is not listed any
// more, and also by the next process.
func TestGPUOfAHeldInstanceThatIsGone(t *testing.T) {
	const profile = "nvidia.com/mig-3g.40gb"
	cut := buildInventory(coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb"), mixedConfig())
	uncut := buildInventory(coretest.GPUs(2), mixedConfig())
	whole, instance := gpuIDs(1)[0], string(coretest.Instance(1, 0))
	store := &memory{}
	r, pods := newPodRig(t)
	r.startTracking(cut, func(t *tracking) { t.store = store })
	r.awaitListed(profile, instance, v1beta1.Healthy)
	r.allocate(pods, "default/first", profile, instance)
	r.awaitQueries(pods)

	withheld := func(when string) {
		t.Helper()
		check.Until(r, "a holder of the GPU "+when, func() bool { return len(r.holdersOn(gpu.WholeGPU(coretest.GPU(1)))) > 0 })
		r.awaitListed(kubeadapter.GPUResource, gpuIDs(0)[0], v1beta1.Healthy)
		r.awaitListed(kubeadapter.GPUResource, whole, v1beta1.Unhealthy)
		if _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, whole); err == nil {
			t.Errorf("%s: the GPU is given out", when)
		}
	}
	r.src.Set(uncut)
	withheld("without the instance")
	r.awaitQueries(pods)
	withheld("after readings")
	check.Until(r, "the place of the instance in the store", func() bool {
		return slices.ContainsFunc(store.Load(), func(s StoredAllocation) bool { return s.At.GPU == coretest.GPU(1) })
	})
	r.stopInTime()
	r.startTracking(uncut, func(t *tracking) { t.store = store })
	withheld("in the next process")
	pods.Forget("default/first")
	r.awaitListed(kubeadapter.GPUResource, whole, v1beta1.Healthy)
}
