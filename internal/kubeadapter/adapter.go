package kubeadapter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Source is what the adapter needs to know of the machine.
type Source interface {
	Current() *core.Inventory
	Watch(context.Context) iter.Seq[*core.Inventory]
}

// Options say where the kubelet is and how things are named.
type Options struct {
	KubeletSocket string       // the registration socket; "" = serve, but register nowhere
	DevRoot       string       // the host's folder that holds dev/nvidia0 ...; "" = "/"
	MPSRoot       string       // the host's folder of the MPS control daemons; needed if anything is shared by MPS
	Log           *slog.Logger // nil = no log

	// Reserved is told which devices an Allocate gave to new work. It is called while the kubelet waits, from
	// several goroutines at once, and must not block; nil = nobody is told.
	Reserved func([]core.Device)

	// Offered are the resources that an adapter before this one offered. Those that have no unit any more are
	// offered as empty lists: a kubelet counts a resource whose plugin went away for five minutes more.
	Offered []string

	// PodResourcesSocket is where the kubelet says which pods hold which devices; "" = it is not asked.
	PodResourcesSocket string

	// Grants keeps which device IDs were handed out; nil = a restart forgets them.
	Grants GrantStore

	Watchdog *watchdog.Registry // where the adapter's loops beat; nil = nowhere
}

// Adapter offers the units of a source to the kubelet. Make one with New, then call Run once; the
// other methods are safe for concurrent use before, during and after Run.
type Adapter struct {
	src     Source
	opts    Options
	kubelet *kubelet
	pace    pace
	held    *tracker
	lister  lister

	mu        sync.Mutex
	endpoints []*endpoint // by resource name; never dropped: a resource without units is an empty list
}

// pace holds the times that nobody needs to configure.
type pace struct {
	register  time.Duration // limit of Register; the kubelet itself waits 10 s for the dial back
	open      time.Duration // from Register to ListAndWatch, before the registration counts as lost
	settle    time.Duration // between the end of an incarnation that a kubelet may know and the next
	retry     time.Duration // first rest after a failure, which then grows by half
	retryMax  time.Duration // longest rest: a kubelet keeps a connection open for each Register that fails
	stable    time.Duration // an incarnation watched for so long was a success
	heartbeat time.Duration // between lists that say nothing new: the kubelet itself never asks
	quiet     time.Duration // least time between two changes; the kubelet writes a file for each list
	look      time.Duration // between looks at the sockets when no file event comes
	poll      time.Duration // between looks when none can come
}

var defaultPace = pace{
	register: 15 * time.Second, open: 10 * time.Second,
	settle: time.Second, retry: 100 * time.Millisecond, retryMax: 30 * time.Second, stable: 10 * time.Second,
	heartbeat: 30 * time.Second, quiet: time.Second, look: time.Second, poll: 200 * time.Millisecond,
}

// New returns an adapter that does nothing yet.
func New(src Source, o Options) *Adapter {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	dir := v1beta1.DevicePluginPath
	if o.KubeletSocket != "" {
		dir = filepath.Dir(o.KubeletSocket)
	}
	held := newTracker(src, o)
	return &Adapter{
		src: src, opts: o, pace: defaultPace,
		kubelet: newKubelet(dir, o.KubeletSocket, o.Log), held: held, lister: lister{held: held},
	}
}

// Run offers every resource that has a unit, from the first time it has one, those of Options.Offered and those of
// which pods hold device IDs, until ctx ends. Nothing less ends it: without a driver or a kubelet it waits. It returns
// when every socket is gone.
func (a *Adapter) Run(ctx context.Context) error {
	a.kubelet.sweep()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	saved := a.held.begin(ctx)
	defer finish(cancel, saved)
	running.Go(func() { a.kubelet.watch(ctx, a.pace, a.opts.Watchdog.Register("kubelet's folder")) })
	running.Go(func() { a.held.run(ctx, a.opts.Watchdog.Register("pods that hold devices")) })
	changed := make(chan struct{}, 1)
	running.Go(func() { a.held.follow(ctx, changed) })
	for {
		heard := a.held.bell.heard()
		for _, resource := range a.wanted() {
			if e, ok := a.add(resource); ok {
				running.Go(func() { e.run(ctx) })
			}
		}
		select {
		case <-changed:
		case <-heard:
		case <-ctx.Done():
			return nil
		}
	}
}

// wanted are the resources to offer by now.
func (a *Adapter) wanted() []string {
	inv := a.src.Current()
	resources := slices.Sorted(maps.Keys(a.lister.all(inv)))
	if !inv.Provisional() { // else an empty list would say that its units are gone
		resources = append(resources, a.opts.Offered...)
	}
	return resources
}

// View is an inventory of the source as the kubelet is told of it: without what pods hold under other names.
func (a *Adapter) View(inv *core.Inventory) *core.Inventory { return a.lister.offered(inv) }

// Warnings say in a line each what is listed for the sake of pods only.
func (a *Adapter) Warnings() []string {
	held := a.held.now()
	return held.notes(held.vanished(listings(a.src.Current())))
}

// Offered are the resources that this adapter or those before it offered, sorted: the Options.Offered of the next.
func (a *Adapter) Offered() []string {
	names := slices.Clone(a.opts.Offered)
	for _, e := range a.list() {
		names = append(names, e.resource)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// add returns the endpoint of a resource that has none yet.
func (a *Adapter) add(resource string) (*endpoint, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	i, known := slices.BinarySearchFunc(a.endpoints, resource, func(e *endpoint, r string) int {
		return cmp.Compare(e.resource, r)
	})
	if known {
		return nil, false
	}
	e := &endpoint{
		resource: resource, src: a.src, opts: a.opts, kubelet: a.kubelet, pace: a.pace, lister: &a.lister,
		log: a.opts.Log.With("resource", resource),
	}
	e.enter("", "starting")
	a.endpoints = slices.Insert(a.endpoints, i, e)
	return e, true
}

func (a *Adapter) list() []*endpoint {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.endpoints)
}

// IdleError says why there is nothing to offer: a state of the node, not a failure of the agent.
type IdleError struct{ Reason string }

func (e *IdleError) Error() string { return e.Reason }

// Ready is nil when the kubelet watches every resource. It is an *IdleError when no unit was ever seen
// on a machine whose driver could be asked, or that has none.
func (a *Adapter) Ready() error {
	endpoints := a.list()
	if len(endpoints) == 0 {
		return idle(a.src.Current())
	}
	var errs []error
	for _, e := range endpoints {
		if why := e.status().Why; why != "" {
			errs = append(errs, fmt.Errorf("%s: %s", e.resource, why))
		}
	}
	return errors.Join(errs...)
}

func idle(inv *core.Inventory) error {
	switch d := inv.Driver(); d.State {
	case core.DriverPending:
		return errors.New("the driver has not answered yet")
	case core.DriverAbsent:
		return &IdleError{"no driver: " + strings.TrimPrefix(d.Reason, core.ErrNoDriver.Error()+": ")}
	case core.DriverFailed:
		return &IdleError{"driver not usable: " + d.Reason}
	case core.DriverReleased:
		return &IdleError{d.Reason}
	case core.DriverReady:
	}
	reasons := []string{}
	for _, e := range inv.Excluded() {
		reasons = append(reasons, fmt.Sprintf("GPU %d: %s", e.Index, e.Reason))
	}
	if len(reasons) == 0 {
		return &IdleError{"no GPU"}
	}
	return &IdleError{"no GPU to offer: " + strings.Join(reasons, "; ")}
}

// Alive calls every endpoint over its own socket, as the kubelet would. It is an error only if an
// endpoint that should answer does not.
func (a *Adapter) Alive(ctx context.Context) error {
	var errs []error
	for _, e := range a.list() {
		if path := e.status().Socket; path != "" {
			if err := answers(ctx, path); err != nil && e.status().Socket == path {
				errs = append(errs, fmt.Errorf("%s: %w", e.resource, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Stats returns the standing and the counters of every resource, by name.
func (a *Adapter) Stats() []ResourceStats {
	endpoints := a.list()
	stats := make([]ResourceStats, len(endpoints))
	for i, e := range endpoints {
		stats[i] = e.stats()
	}
	return stats
}
