package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Source is the inventory of the node. Watch yields the present inventory and then each newer one until ctx ends.
type Source interface {
	Current() *inventory.Allocatable
	Watch(context.Context) iter.Seq[*inventory.Allocatable]
}

// Options configure Plugins.
type Options struct {
	KubeletSocket string       // the kubelet's registration socket; "" = serve without registration
	DevRoot       string       // directory of the host that holds dev/nvidia0 ...; "" = "/"
	MPSRoot       string       // directory of the host with the MPS control daemons' pipes; required for MPS sharing
	Lists         DeviceLists  // how containers get their devices
	Log           *slog.Logger // nil = no log

	// Check is called with the units of each container of an Allocate before it succeeds. It returns what is logged, or an error that
	// fails the Allocate. It must be safe for concurrent use and must not block; nil = no calls.
	Check func([]inventory.Unit) ([]inventory.Finding, error)

	// Reserved is called with the devices of each Allocate, while the kubelet waits. It must be safe for concurrent use and
	// must not block; nil = no calls.
	Reserved func([]gpu.Device)

	// Observe is called with the duration of each Allocate and GetPreferredAllocation, without the socket. It must be safe for concurrent
	// use and must not block; nil = no calls.
	Observe func(method string, took time.Duration)

	// Lock is held in Allocate while it is checked that the device was not given out, and recorded that these plugins have; nil = no other
	// API of this process gives devices out.
	Lock sync.Locker

	// ClaimHolders returns the resource claims that have devices. Allocate refuses these, and all while the record is not complete. It is
	// called with Lock held; nil = there is none.
	ClaimHolders func() holders.Record

	// Empty returns resources to register with an empty list even if they have no unit: a kubelet up to 1.37.1 does not start containers
	// of pods that have such a resource by DRA if a device plugin for it is gone for five minutes (kubernetes/kubernetes#141426). It is
	// called for each new device list, and after Refresh; it must not block. nil = none.
	Empty func() []string

	PodResourcesSocket string             // of the kubelet's pod-resources API; "" = it is not read
	InPod              bool               // this process is in a pod of the kubelet
	AllocationStore    AllocationStore    // nil = allocations are not stored across restarts of the process
	Handover           *Handover          // from the Plugins before in this process; nil = none
	Watchdog           *watchdog.Registry // of the plugins' goroutines; nil = none

	Uptime func() (since time.Duration, known bool) // of the node; nil = it started long ago
}

// Plugins are the device plugins of a Source, one for each resource. Make them with New, then call Run once. The other methods are safe for
// concurrent use before, during and after Run.
type Plugins struct {
	src     Source
	opts    Options
	kubelet *kubelet
	timings timings
	pods    *podresources.Poller
	tracker *tracker

	mu        sync.Mutex
	endpoints map[string]*endpoint // by resource; never removed: a resource without units is an empty list
}

// timings are the durations of Plugins. They are not configurable.
type timings struct {
	register     time.Duration // timeout of Register; the kubelet waits 10 s for its connection to the plugin
	openStream   time.Duration // from Register to ListAndWatch, before the registration counts as failed
	restart      time.Duration // from the end of a registration that a kubelet may have recorded to the next one
	retry        time.Duration // first wait after a failure, then longer by half each time
	retryMax     time.Duration // longest wait: a kubelet leaks a connection for each Register that fails
	stable       time.Duration // after which a registration with a stream resets the wait
	heartbeat    time.Duration // between ListAndWatch responses without a change
	listInterval time.Duration // after a change, to the next: the kubelet writes its checkpoint for each response

	pollInterval         time.Duration // between checks of the sockets without inotify events
	pollIntervalNoEvents time.Duration // while inotify is unavailable
}

var defaultTimings = timings{
	register: 15 * time.Second, openStream: 10 * time.Second,
	restart: time.Second, retry: 100 * time.Millisecond, retryMax: 30 * time.Second, stable: 10 * time.Second,
	heartbeat: 30 * time.Second, listInterval: time.Second,
	pollInterval: 5 * time.Second, pollIntervalNoEvents: 200 * time.Millisecond,
}

// New returns plugins that are not running.
func New(src Source, o Options) *Plugins {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Lock == nil {
		o.Lock = &sync.Mutex{}
	}
	if o.Handover == nil {
		o.Handover = &Handover{}
	}
	o.AllocationStore = o.Handover.next(o.AllocationStore)
	dir := v1beta1.DevicePluginPath
	if o.KubeletSocket != "" {
		dir = filepath.Dir(o.KubeletSocket)
	}
	pods := podresources.New(podresources.Options{
		Socket: o.PodResourcesSocket, Checkpoint: filepath.Join(dir, podresources.CheckpointName), Uptime: o.Uptime,
		InPod: o.InPod, Log: o.Log,
	})
	return &Plugins{
		src: src, opts: o, timings: defaultTimings, kubelet: newKubelet(dir, o.KubeletSocket, o.Log), pods: pods, tracker: newTracker(src, o, pods),
		endpoints: map[string]*endpoint{},
	}
}

// Run offers each resource from when it first has a unit, those of Options.Handover, and those of which pods hold device IDs.
// It returns nil when ctx has ended and all sockets are removed. Without a driver or a kubelet it waits.
func (p *Plugins) Run(ctx context.Context) error {
	pluginsocket.RemoveStale(ctx, filepath.Join(p.kubelet.dir, socketPrefix+"*.sock"), p.opts.Log)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer func() {
		running.Wait()
		p.opts.Handover.setOffered(p.resources())
	}()
	saved := p.tracker.start(ctx)
	defer func() {
		cancel()
		watch.Await(context.Background(), saved, finalSaveTimeout)
	}()
	running.Go(func() { p.kubelet.watch(ctx, p.timings, p.opts.Watchdog.Register("plugin directory")) })
	running.Go(func() { p.pods.Run(ctx, p.tracker.dependsOnPods, p.opts.Watchdog.Register("pod resources")) })
	running.Go(func() { p.tracker.followReadings(ctx) })
	running.Go(func() { p.tracker.follow(ctx) })
	var choice autoChoice
	for latest := range p.tracker.published.Watch(ctx) {
		choice.log(p.opts.Log, latest.allocatable)
		resources := slices.Sorted(maps.Keys(latest.byResource))
		if !latest.allocatable.Provisional() { // else an empty list would remove units that may follow
			resources = append(resources, p.opts.Handover.offered()...)
		}
		if p.opts.Empty != nil {
			resources = append(resources, p.opts.Empty()...)
		}
		for _, resource := range resources {
			if e, ok := p.add(resource); ok {
				running.Go(func() { e.run(ctx) })
			}
		}
	}
	return nil
}

// Refresh makes Run call Options.Empty again. It does not block.
func (p *Plugins) Refresh() { p.tracker.refresh() }

// Withhold returns inv with units as unhealthy whose device a pod holds under another resource, as the kubelet sees it.
func (p *Plugins) Withhold(inv *inventory.Allocatable) *inventory.Allocatable {
	return p.tracker.withhold(inv)
}

// Problems returns one for each resource with device IDs that are listed only because pods may hold them, and one if the kubelet's
// checkpoint is not understood.
func (p *Plugins) Problems() []problem.Problem {
	all := p.tracker.published.Load().problems()
	if err := p.pods.Latest().CheckpointErr; err != nil && !errors.Is(err, fs.ErrNotExist) {
		all = append(all, problem.Problem{Code: problem.Checkpoint, Text: "devices of init containers are not known after their allocation: " + err.Error()})
	}
	return all
}

// resources returns those that these plugins or earlier ones offered, sorted.
func (p *Plugins) resources() []string {
	names := slices.Clone(p.opts.Handover.offered())
	for _, e := range p.list() {
		names = append(names, e.resource)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// add returns a new endpoint of a resource, and false if there is one already.
func (p *Plugins) add(resource string) (*endpoint, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.endpoints[resource] != nil {
		return nil, false
	}
	e := &endpoint{
		resource: resource, opts: p.opts, kubelet: p.kubelet, timings: p.timings, tracker: p.tracker,
		log: p.opts.Log.With("resource", resource),
	}
	e.setStatus("", "starting")
	p.endpoints[resource] = e
	return e, true
}

// list returns the endpoints by the name of their resource.
func (p *Plugins) list() []*endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.SortedFunc(maps.Values(p.endpoints), func(x, y *endpoint) int { return cmp.Compare(x.resource, y.resource) })
}

// errNotOffered is why an agent that has found its devices is not ready: the kubelet has none of them so far.
var errNotOffered = errors.New("the devices are not offered yet")

// IdleError is the reason why a node has nothing to offer, which is not a failure of the agent.
type IdleError struct{ Reason string }

// Error returns the reason.
func (e *IdleError) Error() string { return e.Reason }

// Ready returns nil if the kubelet has opened ListAndWatch for every resource. It returns an *IdleError if there was never a
// unit and the driver is absent, has failed, is released or reports none.
func (p *Plugins) Ready() error {
	endpoints := p.list()
	if len(endpoints) == 0 {
		return idle(p.src.Current())
	}
	var errs []error
	for _, e := range endpoints {
		if s := e.stats(); !s.Connected {
			errs = append(errs, fmt.Errorf("%s: %s", e.resource, s.Reason))
		}
	}
	return errors.Join(errs...)
}

func idle(inv *inventory.Allocatable) error {
	switch d := inv.Driver(); d.State {
	case gpu.DriverPending:
		return errors.New("the driver has not answered yet")
	case gpu.DriverAbsent:
		return &IdleError{"no driver: " + strings.TrimPrefix(d.Reason, gpu.ErrNoDriver.Error()+": ")}
	case gpu.DriverFailed:
		return &IdleError{"driver not usable: " + d.Reason}
	case gpu.DriverReleased:
		return &IdleError{d.Reason}
	case gpu.DriverReady:
	}
	if inv.Provisional() || inv.Len() > 0 { // else a rollout with two pods on the node ends the old one before the new one is registered
		return errNotOffered
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

// Alive calls each endpoint over its own socket, as the kubelet does. It fails if a socket that is served does not answer.
func (p *Plugins) Alive(ctx context.Context) error {
	var errs []error
	for _, e := range p.list() {
		err := pluginsocket.CallOwn(ctx, func() string { return e.stats().Socket }, func(ctx context.Context, conn grpc.ClientConnInterface) error {
			_, err := v1beta1.NewDevicePluginClient(conn).GetDevicePluginOptions(ctx, &v1beta1.Empty{})
			return err
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: plugin %w", e.resource, err))
		}
	}
	return errors.Join(errs...)
}

// Stats returns the status and the counters of each resource, by name.
func (p *Plugins) Stats() []ResourceStats {
	endpoints := p.list()
	stats := make([]ResourceStats, len(endpoints))
	for i, e := range endpoints {
		stats[i] = e.stats()
	}
	return stats
}
