package kubeadapter

import (
	"context"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// memory is a store in memory. It blocks until hang is closed, if that is not nil.
type memory struct {
	mu    sync.Mutex
	saved []StoredAllocation
	hang  chan struct{}
}

func (m *memory) Load() []StoredAllocation {
	if m.hang != nil {
		<-m.hang
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.saved
}

func (m *memory) Save(g []StoredAllocation) {
	if m.hang != nil {
		<-m.hang
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.saved = g
}

func (m *memory) contents() []StoredAllocation {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.saved
}

// After a restart with another policy the resource of which pods hold devices is registered again, because a container that
// restarts needs it, and their devices are withheld.
func TestAllocationsAreRestored(t *testing.T) {
	for _, readable := range []bool{true, false} {
		t.Run(map[bool]string{true: "with pod-resources API", false: "without"}[readable], func(t *testing.T) {
			r := newRig(t)
			r.startKubelet()
			pods := &kubelettest.PodResources{}
			if readable {
				pods = r.pods()
			}
			store := &memory{}
			keep := func(t *tracker) { t.store = store }
			r.offer(coretest.GPUs(2))
			r.startTracking(keep)
			r.awaitHealthy(GPUResource, 2)
			id := gpuIDs(1)[0]
			if readable {
				pods.Hold("default/holder", GPUResource, id)
			}
			_, err := r.kubelet.Allocate(r.ctx, GPUResource, id)
			r.must(err)
			r.await("it is stored", func() bool { return len(store.contents()) == 1 })
			r.stop()

			r.src = coretest.NewSource()
			all := core.DefaultConfig()
			all.Policy.Rules = []inventory.Rule{{Pool: "h100"}}
			r.src.Set(buildInventory(coretest.GPUs(2), all))
			r.startTracking(keep)
			r.awaitHealthy(h100, map[bool]int{true: 1, false: 2}[readable]) // without the API the pod may have ended
			r.awaitListed(GPUResource, id, v1beta1.Unhealthy)
			r.awaitReady()
			r.await("one of the old resource, unhealthy", func() bool {
				n, healthy := r.kubelet.Capacity(GPUResource)
				return n == 1 && healthy == 0
			})
		})
	}
}

// Without the API an allocated ID stays listed for the retention time. Others are removed.
func TestRetentionWithoutPodResources(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.offer(coretest.GPUs(2))
	r.startTracking(func(t *tracker) { t.timings.retention = 400 * time.Millisecond })
	r.awaitHealthy(GPUResource, 2)
	id := gpuIDs(0, 1)
	_, err := r.kubelet.Allocate(r.ctx, GPUResource, id[1])
	r.must(err)
	c := core.DefaultConfig()
	c.Policy.Rules = []inventory.Rule{{Pool: "h100"}}
	began := time.Now()
	r.src.Set(buildInventory(coretest.GPUs(2), c))
	r.awaitHealthy(h100, 2)
	r.await("only the allocated ID", func() bool { return r.listed(GPUResource, id[0]) == nil && r.listed(GPUResource, id[1]) != nil })
	r.await("nothing", func() bool { n, _ := r.kubelet.Capacity(GPUResource); return n == 0 })
	if took := time.Since(began); took < 400*time.Millisecond {
		t.Errorf("removed after %v", took)
	}
}

// A store that blocks delays the start and the end by its timeouts, and Allocate not at all.
func TestStoreHangs(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	store := &memory{hang: make(chan struct{})}
	t.Cleanup(func() { close(store.hang) })
	r.offer(coretest.GPUs(2))
	r.startTracking(func(t *tracker) { t.store, t.timings.loadTimeout = store, 50*time.Millisecond })
	r.awaitHealthy(GPUResource, 2)
	_, err := r.kubelet.Allocate(r.ctx, GPUResource, gpuIDs(1)[0])
	r.must(err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.stop()
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the adapter does not end")
	}
}

// Above the limit the allocations that were withdrawn first are deleted, except those that pods hold.
func TestLimitOfAllocations(t *testing.T) {
	a := &allocations{byKey: map[deviceKey]allocation{}, pods: map[deviceKey]string{}}
	old := time.Now().Add(-time.Hour)
	for i := range maxAllocations + 10 {
		k := deviceKey{GPUResource, inventory.UnitID(coretest.GPU(i))}
		a.byKey[k] = allocation{withdrawnAt: old.Add(time.Duration(i))}
		if i < 5 {
			a.pods[k] = "a/b"
		}
	}
	next := a.apply(update{now: time.Now(), driverReady: true}, defaultTrackerTimings)
	if len(next.byKey) != maxAllocations {
		t.Errorf("%d allocations", len(next.byKey))
	}
	for i, want := range map[int]bool{0: true, 4: true, 5: false, 14: false, 15: true} {
		if _, ok := next.byKey[deviceKey{GPUResource, inventory.UnitID(coretest.GPU(i))}]; ok != want {
			t.Errorf("allocation of ID %d: %t", i, ok)
		}
	}
}

// Before the driver was read no unit counts as withdrawn.
func TestNothingIsWithdrawnBeforeTheDriverIsRead(t *testing.T) {
	store := &memory{saved: []StoredAllocation{{Resource: GPUResource, ID: inventory.UnitID(coretest.GPU(0))}}}
	r := newRig(t)
	r.startKubelet()
	r.startTracking(func(t *tracker) { t.store = store })
	r.await("the stored allocations", func() bool { return len(r.adapter.tracker.stored()) == 1 })
	watch.Sleep(context.Background(), 100*time.Millisecond)
	if n := len(r.kubelet.Attempts()); n != 0 {
		t.Errorf("%d registrations", n)
	}
	r.offer(coretest.GPUs(2))
	r.awaitHealthy(GPUResource, 2)
}

// The units that must not be allocated while a pod holds a device ID.
func TestConflicts(t *testing.T) {
	cut := coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb")
	whole, instance := gpuIDs(1)[0], string(coretest.Instance(1, 0))
	renamed := renamedShares(2)
	for _, c := range []struct {
		name, resource, held string
		now                  *inventory.Inventory
		want                 int // units withheld
	}{
		{"the same", GPUResource, whole, buildInventory(coretest.GPUs(2), core.DefaultConfig()), 0},
		{"another pool", GPUResource, whole, buildInventory(coretest.GPUs(2), oneElsewhere()), 1},
		{"another plugin's name", "nvidia.com/theirs", whole, buildInventory(coretest.GPUs(2), core.DefaultConfig()), 1},
		{"shared now", GPUResource, whole, buildInventory(coretest.GPUs(2), shared(inventory.TimeSlicing, 3)), 3},
		{"shared under another name", GPUResource, whole, buildInventory(coretest.GPUs(2), renamed), 2},
		{"no longer shared", GPUResource, whole + "::1", buildInventory(coretest.GPUs(2), core.DefaultConfig()), 1},
		{"shared by more", GPUResource, whole + "::1", buildInventory(coretest.GPUs(2), shared(inventory.TimeSlicing, 4)), 0},
		{"shared by fewer", GPUResource, whole + "::3", buildInventory(coretest.GPUs(2), shared(inventory.TimeSlicing, 2)), 0},
		{"cut into instances", GPUResource, whole, buildInventory(cut, mixedConfig()), 2},
		{"the same instance", "nvidia.com/mig-3g.40gb", instance, buildInventory(cut, mixedConfig()), 0},
		{"an instance that is no more", "nvidia.com/mig-1g.10gb", "MIG-gone", buildInventory(cut, mixedConfig()), 0},
		{"the other GPU", GPUResource, gpuIDs(0)[0], buildInventory(cut, mixedConfig()), 0},
	} {
		a := allocations{pods: map[deviceKey]string{{c.resource, inventory.UnitID(c.held)}: "a/b"}}
		if got := a.withheld(c.now); len(got) != c.want {
			t.Errorf("%s: withheld %v, want %d", c.name, got, c.want)
		}
	}
}
