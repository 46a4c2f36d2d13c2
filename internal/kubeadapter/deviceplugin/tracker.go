package deviceplugin

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// trackerTimings are the durations of a tracker.
type trackerTimings struct {
	loadTimeout time.Duration // of the store; then devices are offered without the stored allocations
	resend      time.Duration // between two lists that are sent only for the kubelet's checkpoint
	retention   time.Duration // of a withdrawn ID of which nothing shows whether a pod has it
}

var defaultTrackerTimings = trackerTimings{loadTimeout: 2 * time.Second, resend: 500 * time.Millisecond, retention: 24 * time.Hour}

// tracker publishes the device list: the inventory of the source, corrected by the allocations that pods have or may have. It has these from
// Allocate calls, from the store of an earlier agent, and from the kubelet's records, which a poller reads after each change of the offered
// units, each Allocate and each new ListAndWatch stream.
type tracker struct {
	source  Source
	pods    *podresources.Poller
	store   AllocationStore
	log     *slog.Logger
	timings trackerTimings

	published *watch.Value[*deviceList]
	resend    chan struct{}     // capacity 1: the kubelet is to write its checkpoint, as it does for each list; one stream takes it
	unsaved   chan struct{}     // capacity 1: the store is out of date
	loaded    chan struct{}     // closed when the store is loaded
	logged    map[string]string // retained IDs in the log; of the goroutine that follows the readings

	mu          sync.Mutex
	allocatable *inventory.Allocatable // of the source, the latest that is offered: see setInventory
	units       map[deviceKey]int      // NUMA nodes of the units of inventory; never changed
	allocations *allocations
	served      map[string]bool // resources that this agent has offered
	applied     time.Time       // when the latest reading began that was applied
	resent      time.Time       // when a list was last requested for the checkpoint
}

func newTracker(src Source, o Options, pods *podresources.Poller) *tracker {
	t := &tracker{
		source: src, pods: pods, store: o.AllocationStore, log: o.Log, timings: defaultTrackerTimings,
		resend: make(chan struct{}, 1), unsaved: make(chan struct{}, 1), loaded: make(chan struct{}),
		allocatable: src.Current(), allocations: &allocations{byKey: map[deviceKey]allocation{}, unread: !pods.Configured()}, served: map[string]bool{},
	}
	for _, resource := range o.Handover.offered() {
		t.served[resource] = true
	}
	t.published = watch.NewValue(newDeviceList(t.allocatable, t.allocations))
	return t
}

// publish replaces the device list. The caller holds mu.
func (t *tracker) publish() { t.published.Store(newDeviceList(t.allocatable, t.allocations)) }

// refresh publishes the present device list again.
func (t *tracker) refresh() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.publish()
}

// withhold returns an inventory with the units as unhealthy that must not be allocated because of pods.
func (t *tracker) withhold(inv *inventory.Allocatable) *inventory.Allocatable {
	t.mu.Lock()
	withheld := t.allocations.withheld(inv)
	t.mu.Unlock()
	return inv.Withhold(withheld)
}

// allocated records an Allocate of units. The kubelet waits for it, so it does not wait for the store.
func (t *tracker) allocated(units []inventory.Unit) {
	if len(units) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now, withdrawn := time.Now(), false
	for i := range units {
		u := &units[i]
		k := keyOf(*u)
		t.allocations.add(k, u.Device, now)
		if _, offered := t.units[k]; !offered {
			withdrawn = true
		}
	}
	watch.Notify(t.unsaved)
	if withdrawn { // during the Allocate: the IDs stay listed
		t.publish()
	}
	t.pods.Request() // for the name of the pod
}

// start loads the stored allocations and reads the kubelet's records, before anything is offered. It waits for either no longer than
// its timeout. Saving continues until ctx ends; saved is closed after the last write.
func (t *tracker) start(ctx context.Context) (saved <-chan struct{}) {
	done := make(chan struct{})
	go func() { // not waited for: the disk may hang
		defer close(done)
		t.persist(ctx)
	}()
	if !watch.Await(ctx, t.loaded, t.timings.loadTimeout) && ctx.Err() == nil {
		t.log.Warn("stored allocations not loaded in time, devices are offered without them: does the disk hang?",
			"timeout", t.timings.loadTimeout)
	}
	t.setInventory(t.source.Current())
	t.apply(t.pods.Read(ctx))
	return done
}

// follow publishes a device list for each inventory of the source, except as in setInventory, until ctx ends.
func (t *tracker) follow(ctx context.Context) {
	for inv := range t.source.Watch(ctx) {
		t.setInventory(inv)
	}
}

// setInventory publishes a device list of inv. It requests a reading if the units or their resources differ from those before. Nothing is
// offered until it is known whether CDI can be used: an Allocate in between would give a container another way to its devices; nor
// until the devices are claimed: the kubelet would refuse pods that it starts again because of unhealthy devices. But devices of an
// earlier driver are not offered any longer: its specification may have other device numbers. They are unhealthy then.
func (t *tracker) setInventory(inv *inventory.Allocatable) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ofEarlierDriver := t.allocatable.Driver().State == gpu.DriverReady && t.allocatable.Incarnation() != inv.Incarnation()
	if inv.AwaitsFirstPass() && !ofEarlierDriver {
		return
	}
	units := make(map[deviceKey]int, inv.Len())
	var pool, resource string
	for u := range inv.Units() {
		if !ofDevicePlugin(u.API) {
			continue
		}
		if resource == "" || u.Pool != pool {
			pool, resource = u.Pool, kubeadapter.ResourceOf(u)
			t.served[resource] = true
		}
		units[deviceKey{resource, u.ID}] = u.Device.NUMANode
	}
	if !maps.Equal(units, t.units) {
		t.pods.Request()
	}
	t.allocatable, t.units = inv, units
	t.publish()
}

// followReadings applies each reading of the kubelet's records until ctx ends.
func (t *tracker) followReadings(ctx context.Context) {
	for {
		r, next := t.pods.LoadNext()
		t.apply(r)
		t.logRetained()
		select {
		case <-next:
		case <-ctx.Done():
			return
		}
	}
}

// dependsOnPods reports whether the device list, or what is known of an allocation, may change when a pod ends.
func (t *tracker) dependsOnPods() bool {
	if t.published.Load().dependsOnPods() {
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.allocations.uncertain() && !t.allocations.unread
}

// apply updates the allocations by a reading, unless a later one was applied, and publishes a device list if they differ.
func (t *tracker) apply(r podresources.Reading) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Began.Before(t.applied) || r.Began.IsZero() {
		return
	}
	t.applied = r.Began
	previous := t.allocations
	t.allocations = previous.apply(update{
		now: time.Now(), offered: t.units, driverReady: t.allocatable.Driver().State == gpu.DriverReady, served: t.served,
		reading: r, unread: t.pods.Absent(), placements: sync.OnceValue(t.allocatable.Placements),
	}, t.timings)
	if !t.allocations.equivalent(previous) {
		t.publish()
	}
	if now := time.Now(); r.CheckpointErr == nil && t.allocations.awaitsCheckpoint(now) && now.Sub(t.resent) >= t.timings.resend {
		t.resent = now
		watch.Notify(t.resend)
		t.pods.Request()
	}
	stored := func(a, b allocation) bool {
		return a.numaNode == b.numaNode && a.at == b.at && a.withdrawnAt.Equal(b.withdrawnAt) && a.kept() == b.kept()
	}
	if !maps.EqualFunc(previous.byKey, t.allocations.byKey, stored) {
		watch.Notify(t.unsaved)
	}
}

// logRetained logs the retained IDs of the resources whose IDs, or pods, differ from those in the log.
func (t *tracker) logRetained() {
	latest := t.published.Load()
	retained, driverReady := latest.retained, latest.allocatable.Driver().State == gpu.DriverReady
	for resource, ids := range retained {
		if driverReady && t.logged[resource] != ids {
			t.log.Info(retainedText, "resource", resource, "ids", ids)
		}
	}
	t.logged = retained
}
