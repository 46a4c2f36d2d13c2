package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
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

func (m *memory) Missing() bool { return false }

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
// restarts needs it, and their devices are withheld. Without the API the pod may have ended, and they are not.
func TestAllocationsAreRestored(t *testing.T) {
	for name, healthy := range map[string]int{"with pod-resources API": 1, "without": 2} {
		t.Run(name, func(t *testing.T) {
			r, pods := newPodRig(t)
			if healthy == 2 {
				pods.Close()
				check.NoError(r, os.Remove(filepath.Dir(r.podSocket())))
			}
			store := &memory{}
			keep := func(t *tracking) { t.store = store }
			r.startTracking(gpus(2), keep)
			r.awaitHealthy(kubeadapter.GPUResource, 2)
			id := gpuIDs(1)[0]
			r.allocate(pods, "default/holder", kubeadapter.GPUResource, id)
			check.Until(r, "it is stored", func() bool { return len(store.contents()) == 1 })
			r.stop()

			r.src = coretest.NewSource()
			r.startTracking(allElsewhere(), keep)
			r.awaitHealthy(h100, healthy)
			r.awaitListed(kubeadapter.GPUResource, id, v1beta1.Unhealthy)
			r.awaitReady()
			check.Until(r, "one of the old resource, unhealthy", func() bool {
				n, healthy := r.kubelet.Capacity(kubeadapter.GPUResource)
				return n == 1 && healthy == 0
			})
		})
	}
}

// Without the API an allocated ID stays listed for the retention time. Others are removed.
func TestRetentionWithoutPodResources(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	r.startTracking(gpus(2), func(t *tracking) { t.timings.retention = 400 * time.Millisecond })
	r.awaitHealthy(kubeadapter.GPUResource, 2)
	id := gpuIDs(0, 1)
	_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, id[1])
	check.NoError(r, err)
	began := time.Now()
	r.src.Set(allElsewhere())
	r.awaitHealthy(h100, 2)
	check.Until(r, "only the allocated ID", func() bool { // also if it was removed since
		return slices.ContainsFunc(r.kubelet.Lists(kubeadapter.GPUResource), func(list []*v1beta1.Device) bool { return slices.Equal(ids(list), id[1:]) })
	})
	check.Until(r, "nothing", func() bool { n, _ := r.kubelet.Capacity(kubeadapter.GPUResource); return n == 0 })
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
	r.startTracking(gpus(2), func(t *tracking) { t.store, t.timings.loadTimeout = store, 50*time.Millisecond })
	r.awaitHealthy(kubeadapter.GPUResource, 2)
	_, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, gpuIDs(1)[0])
	check.NoError(r, err)
	r.stopInTime()
}

// nowhere is the placements of a node without devices.
func nowhere() map[gpu.DeviceID]gpu.Placement { return nil }

// Above the limit the allocations that were withdrawn first are deleted, except those that pods hold.
func TestLimitOfAllocations(t *testing.T) {
	a := &allocations{byKey: map[deviceKey]allocation{}}
	old := time.Now().Add(-time.Hour)
	for i := range maxAllocations + 10 {
		k := deviceKey{kubeadapter.GPUResource, inventory.UnitID(coretest.GPU(i))}
		one := allocation{withdrawnAt: old.Add(time.Duration(i))}
		if i < 5 {
			one.pods = []string{"a/b"}
		}
		a.byKey[k] = one
	}
	next := a.apply(update{now: time.Now(), driverReady: true, placements: nowhere}, defaultTrackerTimings)
	if len(next.byKey) != maxAllocations {
		t.Errorf("%d allocations", len(next.byKey))
	}
	for i, want := range map[int]bool{0: true, 4: true, 5: false, 14: false, 15: true} {
		if _, ok := next.byKey[deviceKey{kubeadapter.GPUResource, inventory.UnitID(coretest.GPU(i))}]; ok != want {
			t.Errorf("allocation of ID %d: %t", i, ok)
		}
	}
}

// For an allocation in doubt the kubelet is asked for its checkpoint for a while, and not for ever: it may be unable to write one.
func TestTheCheckpointIsAwaitedForAWhile(t *testing.T) {
	k := deviceKey{kubeadapter.GPUResource, "GPU-1"}
	began := time.Now()
	for name, versions := range map[string]uint64{"no version without it": 1, "one": 2} {
		a := &allocations{byKey: map[deviceKey]allocation{}}
		a.add(k, gpu.Device{}, began)
		for i := range 600 { // ten minutes, a reading each second
			now := began.Add(time.Duration(i+1) * time.Second)
			r := podresources.Reading{Began: now, AnsweredAt: now, Complete: true, Checkpoint: podresources.Checkpoint{Version: min(uint64(i+1), versions)}}
			if r.Checkpoint.Version == 1 {
				r.Checkpoint.Devices = []podresources.CheckpointDevice{{PodUID: "uid", Container: "init", Resource: k.resource, ID: string(k.id)}}
			}
			a = a.apply(update{now: now, reading: r, placements: nowhere}, defaultTrackerTimings)
			if waits := a.awaitsCheckpoint(now); i < 2 && !waits || i > 10 && waits {
				t.Fatalf("%s: after %d s: %t", name, i, waits)
			}
		}
		if len(slices.Collect(a.held())) != 1 {
			t.Errorf("%s: the end of the pod is taken for known", name)
		}
	}
}

// Before the driver was read no unit counts as withdrawn. Since when an earlier process allocated one is recorded.
func TestNothingIsWithdrawnBeforeTheDriverIsRead(t *testing.T) {
	id, at := coretest.GPU(0), time.Date(2026, 11, 20, 3, 0, 0, 0, time.UTC)
	store := &memory{saved: []StoredAllocation{{Resource: kubeadapter.GPUResource, ID: inventory.UnitID(id), AllocatedAt: at}}}
	r := newRig(t)
	r.startKubelet()
	r.startTracking(r.src.Current(), func(t *tracking) { t.store = store })
	check.Until(r, "the stored allocations", func() bool { return len(r.plugins.tracker.stored()) == 1 })
	watch.Sleep(context.Background(), 100*time.Millisecond)
	if n := len(r.kubelet.Attempts()); n != 0 {
		t.Errorf("%d registrations", n)
	}
	var record holders.Record
	if r.plugins.tracker.began(&record); !record.HeldSince[id].Equal(at) || !r.plugins.tracker.stored()[0].AllocatedAt.Equal(at) {
		t.Errorf("held since %v, want %v", record.HeldSince, at)
	}
	r.src.Set(gpus(2))
	r.awaitHealthy(kubeadapter.GPUResource, 2)
}

// The units that must not be allocated while a pod holds a device ID.
func TestConflicts(t *testing.T) {
	uncut := gpus(2)
	cut := buildInventory(coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb"), mixedConfig())
	by := func(replicas int) *inventory.Allocatable { return buildInventory(coretest.GPUs(2), shared(replicas)) }
	whole, instance := gpuIDs(1)[0], string(coretest.Instance(1, 0))
	places := buildInventory(coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb", "1g.10gb"), mixedConfig()).Placements()
	for _, c := range []struct {
		name, resource, held string
		now                  *inventory.Allocatable
		want                 int // units withheld
	}{
		{"the same", kubeadapter.GPUResource, whole, uncut, 0},
		{"another pool", kubeadapter.GPUResource, whole, oneElsewhere(), 1},
		{"another plugin's name", "nvidia.com/theirs", whole, uncut, 1},
		{"shared now", kubeadapter.GPUResource, whole, by(3), 3},
		{"shared under another name", kubeadapter.GPUResource, whole, buildInventory(coretest.GPUs(2), renamedShares(2)), 2},
		{"no longer shared", kubeadapter.GPUResource, whole + "::1", uncut, 1},
		{"shared by more", kubeadapter.GPUResource, whole + "::1", by(4), 0},
		{"shared by fewer", kubeadapter.GPUResource, whole + "::3", by(2), 0},
		{"cut into instances", kubeadapter.GPUResource, whole, cut, 2},
		{"the same instance", "nvidia.com/mig-3g.40gb", instance, cut, 0},
		{"an instance that is no more", "nvidia.com/mig-3g.40gb", instance, uncut, 1},
		{"an instance that is no more, beside others", "nvidia.com/mig-1g.10gb", string(coretest.Instance(1, 2)), cut, 0},
		{"an instance that was never listed", "nvidia.com/mig-1g.10gb", "MIG-gone", cut, 0},
		{"the other GPU", kubeadapter.GPUResource, gpuIDs(0)[0], cut, 0},
	} {
		device, _ := inventory.UnitID(c.held).Split()
		one := allocation{pods: []string{"a/b"}, at: places[device]}
		a := allocations{byKey: map[deviceKey]allocation{{c.resource, inventory.UnitID(c.held)}: one}}
		if got := a.withheld(c.now); len(got) != c.want {
			t.Errorf("%s: withheld %v, want %d", c.name, got, c.want)
		}
	}
}

// A MIG instance may get the ID of the one that was in its place, and a GPU in another pool has the same ID. The plugin of
// the old resource does not allocate it, and lists it as unhealthy before it is removed.
func TestSameIDInAnotherResource(t *testing.T) {
	reconfigured := coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb", "2g.20gb", "1g.10gb")
	for _, c := range []struct {
		name, was, is, id string
		before, after     *inventory.Allocatable
		left              []string // of the old resource
	}{
		{"another profile", "nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-2g.20gb", string(coretest.Instance(1, 1)),
			migGPU(), buildInventory(reconfigured, mixedConfig()), []string{}},
		{"another pool", kubeadapter.GPUResource, h100, gpuIDs(1)[0], gpus(2), oneElsewhere(), gpuIDs(0)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := startRig(t, c.before)
			r.awaitListed(c.was, c.id, v1beta1.Healthy)
			old, err := r.kubelet.Plugin(c.was)
			check.NoError(r, err)
			r.src.Set(c.after)
			r.awaitHealthy(c.is, 1)
			_, err = old.Allocate(r.ctx, allocateRequest([]string{c.id}))
			if err == nil || !strings.Contains(err.Error(), c.id+": belongs to "+c.is+" now, not "+c.was) {
				t.Errorf("the old resource allocates it: %v", err)
			}
			check.Until(r, "the old resource without it", func() bool {
				devices, connected := r.kubelet.Devices(c.was)
				return connected && slices.Equal(ids(devices), c.left)
			})
			r.assertUnhealthyBeforeRemoval(c.was)
			if _, err := r.kubelet.Allocate(r.ctx, c.is, c.id); err != nil {
				t.Errorf("the new resource: %v", err)
			}
		})
	}
}

// GPUs become shared, in the same pool or another: no ID is removed while it is healthy, and a pool without units is an empty
// list, also for the next kubelet, whose checkpoint may have pods with such a unit.
func TestSharesInPlaceOfGPUs(t *testing.T) {
	r := newRunning(t, 2)
	r.src.Set(buildInventory(coretest.GPUs(2), shared(3)))
	r.awaitHealthy(kubeadapter.GPUResource, 6)
	check.Until(r, "shared units only", func() bool { n, _ := r.kubelet.Capacity(kubeadapter.GPUResource); return n == 6 })

	r.src.Set(buildInventory(coretest.GPUs(2), renamedShares(3)))
	r.awaitHealthy("nvidia.com/gpu.shared", 6)
	r.awaitEmpty(kubeadapter.GPUResource)
	r.assertUnhealthyBeforeRemoval(kubeadapter.GPUResource)
	if _, err := r.kubelet.Allocate(r.ctx, kubeadapter.GPUResource, replica(0, 0)); err == nil {
		t.Error("the old resource allocates what is in another pool")
	}
	if n := len(r.kubelet.Registrations()); n != 2 {
		t.Errorf("%d registrations, want 2", n)
	}
	r.restartKubelet(true)
	r.awaitHealthy("nvidia.com/gpu.shared", 6)
	r.awaitEmpty(kubeadapter.GPUResource)
}

// assertUnhealthyBeforeRemoval fails if a unit was removed from the lists of a resource while it was healthy.
func (r *rig) assertUnhealthyBeforeRemoval(resource string) {
	r.Helper()
	var before []*v1beta1.Device
	for _, list := range r.kubelet.Lists(resource) {
		now := ids(list)
		for _, d := range before {
			if d.GetHealth() == v1beta1.Healthy && !slices.Contains(now, d.GetID()) {
				r.Errorf("%s was dropped while it was healthy", d.GetID())
			}
		}
		before = list
	}
}

// The next plugins offer resources without units as empty lists, after the driver was read.
func TestResourcesOfEarlierPlugins(t *testing.T) {
	r := newRunning(t, 2)
	before := r.plugins.opts.Handover
	r.stop()

	r.src = coretest.NewSource() // the driver has not been read yet
	history := core.Restore(core.DefaultConfig(), core.Checkpoint{BootID: "boot", Devices: coretest.GPUs(1).Devices}, "boot")
	r.src.Set(history.ListPrior(core.DefaultConfig(), time.Now()).Allocatable) // one of which is not in the history
	r.start(r.src.Current(), func(p *Plugins) { p.opts.Handover = before })
	watch.Sleep(r.ctx, 100*time.Millisecond)
	if n, _ := r.kubelet.Capacity(kubeadapter.GPUResource); n != 2 || len(r.sockets()) > 0 {
		t.Errorf("%d GPUs, sockets %v before the driver was read", n, r.sockets())
	}
	r.src.Set(buildInventory(coretest.GPUs(2), renamedShares(2)))
	r.awaitHealthy("nvidia.com/gpu.shared", 4)
	r.awaitEmpty(kubeadapter.GPUResource)
	if got, want := fmt.Sprint(r.plugins.resources()), "[nvidia.com/gpu nvidia.com/gpu.shared]"; got != want {
		t.Errorf("offered: %s, want %s", got, want)
	}
}

// What ends an allocation that no list has shown: a complete list without it, and then two versions of the checkpoint, one after the other. An older
// version may be written late, a partial list may lack pods, and an error shows nothing.
func TestEvidenceOfTheEnd(t *testing.T) {
	k := deviceKey{kubeadapter.GPUResource, "GPU-1"}
	granted := time.Date(2026, 11, 23, 10, 0, 0, 0, time.UTC)
	version := uint64(0)
	reading := func(seconds int, complete bool, err error, has ...string) podresources.Reading {
		at := granted.Add(time.Duration(seconds) * time.Second)
		r := podresources.Reading{Began: at, Err: err, Complete: complete, AnsweredAt: at, Checkpoint: podresources.Checkpoint{Version: version}}
		for _, uid := range has {
			r.Checkpoint.Devices = append(r.Checkpoint.Devices, podresources.CheckpointDevice{PodUID: uid, Container: "init", Resource: k.resource, ID: string(k.id)})
		}
		return r
	}
	failed, kubelet := errors.New("unavailable"), statefile.IdentityOf(".")
	for name, c := range map[string]struct {
		readings func(next func(podresources.Reading)) // each with the next version of the checkpoint
		held     bool
	}{
		"one version": {func(next func(podresources.Reading)) {
			next(reading(1, true, nil, "uid"))
			next(reading(2, true, nil))
		}, true},
		"two versions": {func(next func(podresources.Reading)) {
			next(reading(1, true, nil, "uid"))
			next(reading(2, true, nil))
			next(reading(3, true, nil))
		}, false},
		"the same version again": {func(next func(podresources.Reading)) {
			next(reading(1, true, nil, "uid"))
			next(reading(2, true, nil))
			version--
			next(reading(3, true, nil))
		}, true},
		"it comes again in between": {func(next func(podresources.Reading)) {
			next(reading(1, true, nil))
			next(reading(2, true, nil))
			next(reading(3, true, nil, "uid"))
			next(reading(4, true, nil))
		}, true},
		"no complete list": {func(next func(podresources.Reading)) {
			for i := range 5 {
				next(reading(i, false, nil))
			}
		}, true},
		"no answer": {func(next func(podresources.Reading)) {
			for i := range 5 {
				next(reading(i, false, failed))
			}
		}, true},
		"a list that began before the Allocate": {func(next func(podresources.Reading)) {
			for range 5 {
				next(reading(-1, true, nil))
			}
		}, true},
		"an earlier list with the pod before": {func(next func(podresources.Reading)) {
			before := reading(-1, true, nil, "uid")
			before.Kubelet, before.Answer.Devices = kubelet, []podresources.Device{{Pod: "default/before", Resource: k.resource, ID: string(k.id)}}
			next(before)
			after := reading(1, true, nil, "uid")
			after.Kubelet = kubelet
			next(after)
		}, true},
		"no answer after a complete list": {func(next func(podresources.Reading)) {
			next(reading(1, true, nil, "uid"))
			next(reading(2, false, failed))
			next(reading(3, false, failed))
		}, false},
	} {
		a := &allocations{byKey: map[deviceKey]allocation{}}
		a.add(k, gpu.Device{}, granted)
		version = 0
		c.readings(func(r podresources.Reading) {
			version++
			r.Checkpoint.Version = version
			a = a.apply(update{now: r.Began, reading: r, placements: nowhere}, defaultTrackerTimings)
		})
		if held := len(slices.Collect(a.held())) > 0; held != c.held {
			t.Errorf("%s: held %t", name, held)
		}
	}
}
