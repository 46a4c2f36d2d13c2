package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Source is the inventory of the node.
type Source interface {
	Current() *inventory.Allocatable
	Changed() <-chan struct{} // closed when there is a newer one
}

// ClaimReader reads resource claims: *kubeapi.Client is one.
type ClaimReader interface {
	Claim(ctx context.Context, namespace, name string) (kubeapi.ResourceClaim, error)
}

// Options configure an Adapter. A nil function is not called.
type Options struct {
	Node       string      // name of the node, which is the name of the pool
	KubeletDir string      // the kubelet's --root-dir, at the same path as on the host; "" = /var/lib/kubelet
	Instance   string      // part of the name of the socket; "" = a random one, so that two agents can run during an update
	StateDir   string      // of the agent; prepared claims are in dra/claims below it
	BootID     string      // of the node: what was prepared in another boot holds nothing
	API        ClaimReader // required

	CDIFolder string // of the specifications; the same path on the host and for this process
	CDIVendor string // of the specifications of claims
	MPSRoot   string // directory of the host with the MPS control daemons' pipes

	SharesAsDevices *watch.Value[bool] // see resourceslice.Input; nil = false
	Evict           bool               // see resourceslice.Input

	// Check is called with the units that a claim is about to get, but for admin access. It returns what is logged, or an error that
	// fails the Prepare. It must be safe for concurrent use and must not block.
	Check func([]inventory.Unit) ([]inventory.Finding, error)

	// Reserved is called with the devices of each claim that is newly prepared. It must be safe for concurrent use and must not block.
	Reserved func([]gpu.Device)

	// Limits limits the memory of pods in pools with a limit; nil = no pool has one.
	Limits Limiter

	// Observe is called with the duration of each call of the kubelet, for each claim. It must be safe for concurrent use and must not
	// block; nil = no calls.
	Observe func(method string, took time.Duration)

	// Lock is held while this adapter finds a device free and records that a claim has it. Whatever else gives devices out holds it,
	// too. nil = nothing else does.
	Lock sync.Locker

	// PluginHolders returns the pods that have devices through device plugins. It is called with Lock held.
	PluginHolders func() []holders.Holder

	// PodClaims returns the devices that pods have through claims, from the kubelet; nil = they are not known.
	PodClaims func(context.Context) (PodClaims, error)

	Watchdog *watchdog.Registry // of the adapter's goroutines; nil = none
	Log      *slog.Logger       // nil = no log
}

// limits are the durations of an adapter. They are not configurable.
type limits struct {
	call       time.Duration // for Prepare and Unprepare: the kubelet waits 45 s (pkg/kubelet/cm/dra/plugin/dra_plugin.go)
	grace      time.Duration // after that, for the text of the error
	apiCall    time.Duration // for one request of the API server
	apiRetry   time.Duration // between the first two of them
	release    time.Duration // for the end of a limit, before the kubelet has the answer to Unprepare
	bestEffort time.Duration // for a limit that is not required
	repeat     time.Duration // for the request before a claim that is prepared is answered again
	stop       time.Duration // for calls in progress, when the agent ends
	resend     time.Duration // between two complete health messages: the kubelet forgets those of a driver when a stream ends
	healthAge  time.Duration // after which the kubelet takes health for unknown
	socketPoll time.Duration // between checks of the socket without an event
	retry      time.Duration // of what failed at the start

	query, queryFirst, queryLast, queryActive time.Duration // of what pods have through claims: timeout, first and last interval, and how long after a registration
	partial                                   time.Duration // of the same: how long an answer that may lack pods keeps devices back
	specsEvery                                time.Duration // between checks of the specifications of claims without an event
	abandoned                                 time.Duration // after which a claim that neither the kubelet nor the API server has holds nothing, or one without a record that no pod has
}

var defaultLimits = limits{
	call: 40 * time.Second, grace: 500 * time.Millisecond, apiCall: 10 * time.Second, apiRetry: 250 * time.Millisecond, release: 5 * time.Second, bestEffort: 3 * time.Second, repeat: time.Second, stop: time.Second,
	resend: 8 * time.Second, healthAge: 30 * time.Second, socketPoll: 2 * time.Second, retry: time.Second,
	query: 2 * time.Second, queryFirst: 100 * time.Millisecond, queryLast: time.Minute, queryActive: 5 * time.Minute,
	partial: 2 * time.Minute, specsEvery: time.Minute, abandoned: 5 * time.Minute,
}

// Adapter prepares resource claims for the kubelet. Make one with New, then call Run once. The other methods are safe for concurrent use
// before, during and after Run.
type Adapter struct {
	src    Source
	opts   Options
	limits limits
	lock   sync.Locker
	locks  claimLocks
	specs  *claimSpecs

	store    atomic.Pointer[prepared.Store]  // nil = not read yet
	loadErr  atomic.Pointer[prepared.Unread] // why it is not; nil = not known, or it is
	stopping chan struct{}                   // closed when Run ends
	loaded   chan struct{}                   // closed when store is set
	changes  *watch.Value[struct{}]          // stored when anything that Prepare depends on may have changed
	view     atomic.Pointer[view]

	lastDriver atomic.Pointer[gpu.Driver] // see resourceslice.Input

	desired   *watch.Value[[]kubeapi.Device]
	claims    *watch.Value[[]prepared.Claim]
	health    *watch.Value[[]resourceslice.DeviceHealth]
	admission *watch.Value[admission]
	queries   chan struct{} // capacity 1: a query of the kubelet is requested

	abandoned map[string]time.Time // by UID: since when nothing has a claim any more; of the goroutine that queries the kubelet
	unlisted  map[string]time.Time // the same for claims whose records can't be read: since when no pod has one

	problems problemset.Set

	mu      sync.Mutex
	current Stats
}

// view is what slices have, and the inventory from which that follows.
type view struct {
	allocatable *inventory.Allocatable
	devices     map[string]kubeapi.Device // by name
}

// New returns an adapter that is not running. It reads and writes nothing.
func New(src Source, o Options) *Adapter {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.KubeletDir == "" {
		o.KubeletDir = DefaultKubeletDir
	}
	if o.SharesAsDevices == nil {
		o.SharesAsDevices = watch.NewValue(false)
	}
	a := &Adapter{
		src: src, opts: o, limits: defaultLimits, lock: o.Lock, loaded: make(chan struct{}), stopping: make(chan struct{}), changes: watch.NewValue(struct{}{}),
		specs:   &claimSpecs{folder: o.CDIFolder, vendor: o.CDIVendor, mpsRoot: o.MPSRoot},
		desired: watch.NewValue[[]kubeapi.Device](nil), claims: watch.NewValue[[]prepared.Claim](nil),
		health: watch.NewValue[[]resourceslice.DeviceHealth](nil), admission: watch.NewValue(admission{pending: o.PodClaims != nil}),
		queries: make(chan struct{}, 1), problems: problemset.Set{Log: o.Log},
	}
	if a.lock == nil {
		a.lock = &sync.Mutex{}
	}
	a.view.Store(&view{})
	a.lastDriver.Store(&gpu.Driver{})
	a.setReason("not served yet")
	return a
}

// Run serves the kubelet until ctx ends. It returns nil when the socket is removed and the health streams have ended; no slice and no
// claim is touched. Without a driver, a kubelet or an API server it waits, and Unprepare works.
func (a *Adapter) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	go a.load(ctx) // these two are not waited for: a disk may hang
	go a.watchPods(ctx, a.opts.Watchdog.Register("claims of pods"))
	running.Go(func() { a.follow(ctx) })
	err := a.serve(ctx)
	cancel()
	running.Wait()
	return err
}

// load reads the prepared claims. Then it keeps the specifications of claims in place until ctx ends.
func (a *Adapter) load(ctx context.Context) {
	task := a.opts.Watchdog.Register("prepared claims")
	defer task.Done()
	for {
		task.Heartbeat(a.limits.call)
		store, err := prepared.Open(a.claimsDir(), a.opts.BootID, a.opts.Log)
		if err == nil {
			a.store.Store(store)
			break
		}
		a.loadErr.Store(&prepared.Unread{Path: a.claimsDir(), Err: err})
		a.setProblems(problem.ClaimState, oneLine(err)+": nothing can be prepared or unprepared")
		task.Heartbeat(a.limits.retry)
		if !watch.Sleep(ctx, a.limits.retry) {
			return
		}
	}
	a.setProblems(problem.ClaimState)
	close(a.loaded)
	a.changed()
	a.watchSpecs(ctx, task)
}

// awaitStore waits for load until ctx ends.
func (a *Adapter) awaitStore(ctx context.Context) (*prepared.Store, error) {
	select {
	case <-a.loaded:
		return a.store.Load(), nil
	case <-ctx.Done():
		return nil, &PendingError{What: "the prepared claims in " + a.claimsDir() + " could not be read", Waited: a.limits.call, Err: ctx.Err()}
	}
}

// isLoaded reports whether load has read the prepared claims.
func (a *Adapter) isLoaded() bool {
	select {
	case <-a.loaded:
		return true
	default:
		return false
	}
}

// changed wakes whatever waits for a change.
func (a *Adapter) changed() { a.changes.Store(struct{}{}) }

// Prepared returns the claims that are prepared, in the order of their UIDs, and those of which the preparation has begun; nil until they
// are read. It has a claim as soon as Options.Lock is free after its devices were reserved. The result is not to be changed.
func (a *Adapter) Prepared() []prepared.Claim {
	if !a.isLoaded() {
		return nil
	}
	return a.store.Load().All()
}

// WatchPrepared returns a value that follows Prepared.
func (a *Adapter) WatchPrepared() *watch.Value[[]prepared.Claim] { return a.claims }

// Desired returns the devices that the slices of the node are to have; nil while nothing is known. Its taints are not stamped.
func (a *Adapter) Desired() *watch.Value[[]kubeapi.Device] { return a.desired }

// Health returns the health of each device, as the kubelet gets it.
func (a *Adapter) Health() *watch.Value[[]resourceslice.DeviceHealth] { return a.health }

// Record returns the claims that have, or may have, devices in this boot. One whose file can't be read has all GPUs that it may have. It has a
// claim as soon as Options.Lock is free after its devices were reserved.
func (a *Adapter) Record() holders.Record {
	r := holders.Record{Complete: true}
	if a.isLoaded() {
		claims := claimsBeside("", a.opts.BootID, a.store.Load().All())
		r.Holders = heldBy(claims)
		for _, c := range claims {
			for _, h := range c.Holders() {
				r.Began(h.Device, c.Since)
			}
		}
	} else if a.loadErr.Load() == nil {
		return holders.Record{Missing: "the prepared claims, which are not read yet; does the disk of state_dir respond?"}
	}
	r.Holders = append(r.Holders, a.admission.Load().lost...)
	for _, u := range a.Unread() {
		unknown := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "?", ID: u.UID, Claim: "? (" + u.String() + ")"}
		gpus, _ := a.mayHold(u)
		for _, id := range gpus {
			r.Holders = append(r.Holders, holders.Holder{Work: unknown, API: inventory.DRA, Device: id, At: gpu.WholeGPU(id)})
		}
	}
	return r
}

// Cordoned returns why no device takes new work; "" if they do.
func (a *Adapter) Cordoned() string { return a.admission.Load().text() }

// Problems are those that an operator should know of.
func (a *Adapter) Problems() (all []problem.Problem) {
	if s := a.Stats(); s.Refused {
		all = append(all, problem.Problem{Code: problem.Registration, Text: s.Reason})
	}
	if v := a.admission.Load(); len(v.foreign) > 0 {
		all = append(all, problem.Problem{Code: problem.ForeignClaims, Text: v.text()})
	}
	if store := a.store.Load(); store != nil {
		all = append(all, store.Problems()...)
	}
	return append(all, a.problems.List()...)
}

// setProblems replaces the problems of a code, and logs those that are new.
func (a *Adapter) setProblems(code problem.Code, texts ...string) {
	a.problems.Replace(code, logPrefix[code], texts...)
}

// logPrefix is what the log has before a problem.
var logPrefix = map[problem.Code]string{
	problem.ClaimState: "state: ", problem.PodClaims: "claims of pods: ", problem.PreparedClaims: "prepared claims: ",
	problem.ClaimCDI: "CDI specifications of claims: ",
}

// Ready returns nil if the kubelet has registered the driver.
func (a *Adapter) Ready() error {
	if s := a.Stats(); !s.Registered {
		return errors.New(s.Reason)
	}
	if !a.isLoaded() {
		return fmt.Errorf("the prepared claims in %s are not read yet", a.claimsDir())
	}
	return nil
}
