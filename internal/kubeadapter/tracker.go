package kubeadapter

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/watch"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// trackerTimings are the durations of a tracker.
type trackerTimings struct {
	queryTimeout time.Duration // of one query to the kubelet
	checkTimeout time.Duration // of one within an Allocate, which waits for it
	loadTimeout  time.Duration // of the store; then devices are offered without the stored allocations
	minInterval  time.Duration // between two queries
	maxInterval  time.Duration // between two queries, grows to this after each request
	active       time.Duration // after a request; then the kubelet is queried only while the offer depends on pods
	startup      time.Duration // of a kubelet: until then it may not have all pods from the API server
	stale        time.Duration // after the latest answer, or the start; then none is expected

	allocateToList time.Duration // after an Allocate, until the kubelet's answers have it
	retention      time.Duration // of a withdrawn ID while the kubelet can't be queried
}

var defaultTrackerTimings = trackerTimings{
	queryTimeout: 2 * time.Second, checkTimeout: 5 * time.Second, loadTimeout: 2 * time.Second, minInterval: 100 * time.Millisecond, maxInterval: time.Minute,
	active: 5 * time.Minute, startup: podresources.Startup, stale: 5 * time.Minute,
	allocateToList: 10 * time.Second, retention: 24 * time.Hour,
}

// tracker publishes the offer: the inventory of the source, corrected by the allocations that pods may hold. It learns of
// allocations from Allocate calls, from the store of an earlier agent and from the kubelet's pod-resources API, which it
// queries after each change of the offered units and after each new ListAndWatch stream.
type tracker struct {
	source  Source
	socket  string // of the pod-resources API; "" = no queries
	store   AllocationStore
	log     *slog.Logger
	timings trackerTimings

	offers  *watch.Value[*offer]
	queries chan struct{}     // capacity 1: a query is requested
	unsaved chan struct{}     // capacity 1: the store is out of date
	loaded  chan struct{}     // closed when the store is loaded
	logged  map[string]string // retained IDs in the log; of the goroutine that queries

	mu          sync.Mutex
	inventory   *inventory.Inventory // of the source, the latest that awaits no CDI specification
	units       map[deviceKey]int    // NUMA nodes of the units of inventory; never changed
	allocations *allocations
	served      map[string]bool // resources that this agent has offered
	started     time.Time
	answered    time.Time // latest answer of the kubelet; zero = none
	complete    time.Time // latest one that had all pods; zero = none
	unavailable bool      // the latest query failed
}

func newTracker(src Source, o Options) *tracker {
	t := &tracker{
		source: src, socket: o.PodResourcesSocket, store: o.AllocationStore, log: o.Log, timings: defaultTrackerTimings,
		queries: make(chan struct{}, 1), unsaved: make(chan struct{}, 1), loaded: make(chan struct{}),
		inventory: src.Current(), allocations: &allocations{byKey: map[deviceKey]allocation{}},
		served: map[string]bool{}, started: time.Now(),
	}
	if t.socket != "" { // stored allocations may conflict until the kubelet has answered
		t.allocations.verified = map[deviceKey]int{}
	}
	for _, resource := range o.Handover.offered() {
		t.served[resource] = true
	}
	t.offers = watch.NewValue(newOffer(t.inventory, t.allocations))
	return t
}

// requestQuery requests a query of the kubelet. It never blocks.
func (t *tracker) requestQuery() { watch.Notify(t.queries) }

// publish replaces the offer. The caller holds mu.
func (t *tracker) publish() { t.offers.Store(newOffer(t.inventory, t.allocations)) }

// refresh publishes the present offer again.
func (t *tracker) refresh() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.publish()
}

// withhold returns an inventory with the units as unhealthy that must not be allocated because of pods.
func (t *tracker) withhold(inv *inventory.Inventory) *inventory.Inventory {
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
		if t.allocations.add(k, u.Device.NUMANode, now) {
			watch.Notify(t.unsaved)
		}
		if _, offered := t.units[k]; !offered {
			withdrawn = true
		}
	}
	if withdrawn { // during the Allocate: the IDs stay listed
		t.publish()
	}
}

// start loads the stored allocations and queries the kubelet, before anything is offered. It waits for either no longer than
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
	t.query(ctx)
	return done
}

// follow publishes an offer for each inventory of the source, except as in setInventory, until ctx ends.
func (t *tracker) follow(ctx context.Context) {
	for inv := range t.source.Watch(ctx) {
		t.setInventory(inv)
	}
}

// setInventory publishes an offer of inv. It requests a query if the units or their resources differ from those before. Nothing is
// offered until it is known whether CDI can be used: an Allocate in between would give a container another way to its devices.
func (t *tracker) setInventory(inv *inventory.Inventory) {
	if inv.AwaitsCDI() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	units := make(map[deviceKey]int, inv.Len())
	var pool, resource string
	for u := range inv.Units() {
		if !ofDevicePlugin(u.API) {
			continue
		}
		if resource == "" || u.Pool != pool {
			pool, resource = u.Pool, ResourceOf(u)
			t.served[resource] = true
		}
		units[deviceKey{resource, u.ID}] = u.Device.NUMANode
	}
	if !maps.Equal(units, t.units) {
		t.requestQuery()
	}
	t.inventory, t.units = inv, units
	t.publish()
}

// run queries the kubelet on request, and regularly while the offer depends on pods, until ctx ends.
func (t *tracker) run(ctx context.Context, task *watchdog.Task) {
	defer task.Done()
	requested := time.Now() // the latest time
	for {
		wait := t.untilQuery(time.Since(requested))
		task.Heartbeat(wait)
		var due <-chan time.Time
		if wait > 0 {
			due = time.After(wait)
		}
		select {
		case <-t.queries:
			requested = time.Now()
		case <-due:
		case <-ctx.Done():
			return
		}
		task.Heartbeat(t.timings.queryTimeout + t.timings.minInterval)
		t.query(ctx)
		if !watch.Sleep(ctx, t.timings.minInterval) {
			return
		}
	}
}

// untilQuery returns the time to the next query, given the time since the latest request; 0 = wait for a request.
func (t *tracker) untilQuery(sinceRequest time.Duration) time.Duration {
	switch {
	case t.socket != "" && sinceRequest < t.timings.active:
		return min(max(sinceRequest, t.timings.minInterval), t.timings.maxInterval)
	case t.offers.Load().dependsOnPods():
		return t.timings.maxInterval
	default:
		return 0
	}
}

// query queries the kubelet for what pods hold and updates the allocations. Without a socket only time has passed for them.
func (t *tracker) query(ctx context.Context) {
	t.mu.Lock()
	u := update{offered: t.units, driverReady: t.inventory.Driver().State == gpu.DriverReady}
	t.mu.Unlock()
	if t.socket == "" {
		u.now = time.Now()
		t.apply(u)
		return
	}
	limit, cancel := context.WithTimeout(ctx, t.timings.queryTimeout)
	answer, err := podresources.List(limit, t.socket)
	cancel()
	if ctx.Err() != nil {
		return
	}
	u.now = time.Now()
	if err == nil {
		u.answer, u.partial = &answer, answer.Partial(u.now, t.timings.startup)
	}
	t.recordAnswer(&u, err)
	t.apply(u)
}

// recordAnswer records whether the kubelet answered, logs a change of that, and decides whether an answer is to be expected.
func (t *tracker) recordAnswer(u *update, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		if t.unavailable || t.answered.IsZero() {
			t.log.Info("pod-resources API available", "socket", t.socket)
		}
		t.answered, t.unavailable = u.now, false
		if !u.partial {
			t.complete = u.now
		}
		return
	}
	if !t.unavailable {
		t.log.Info("pod-resources API unavailable: devices that pods hold are not known", "socket", t.socket, "error", err)
	}
	latest := t.started
	if t.answered.After(latest) {
		latest = t.answered
	}
	t.unavailable = true
	u.unavailable = errors.Is(err, podresources.ErrNoDirectory) || u.now.Sub(latest) >= t.timings.stale
}

// apply updates the allocations, and publishes an offer if they differ.
func (t *tracker) apply(u update) {
	t.mu.Lock()
	previous := t.allocations
	u.served = t.served
	t.allocations = previous.apply(u, t.timings)
	if !t.allocations.equivalent(previous) {
		t.publish()
	}
	stored := func(a, b allocation) bool { return a.numaNode == b.numaNode && a.withdrawnAt.Equal(b.withdrawnAt) }
	if !maps.EqualFunc(previous.byKey, t.allocations.byKey, stored) {
		watch.Notify(t.unsaved)
	}
	t.mu.Unlock()
	t.logRetained(u.driverReady)
}

// logRetained logs the retained IDs of the resources whose IDs, or pods, differ from those in the log.
func (t *tracker) logRetained(driverReady bool) {
	retained := t.offers.Load().retainedIDs()
	for resource, ids := range retained {
		if driverReady && t.logged[resource] != ids {
			t.log.Info(retainedText, "resource", resource, "ids", ids)
		}
	}
	t.logged = retained
}
