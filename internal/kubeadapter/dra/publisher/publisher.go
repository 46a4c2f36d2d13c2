package publisher

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	debounce    = 200 * time.Millisecond // from a change of devices to its write, unless a taint is added
	resync      = 5 * time.Minute        // between comparisons without an event
	callTimeout = 20 * time.Second       // more than a request of kubeapi takes
)

// Options configure a Publisher.
type Options struct {
	API     *kubeapi.Client
	Node    string                         // name of the Node object: the name of the pool, and in the names of the slices
	Driver  string                         // name of the driver
	Devices *watch.Value[[]kubeapi.Device] // in the order of the slices; nil = not known yet: slices stay as they are. Empty = the node has none
	Log     *slog.Logger                   // nil = no log

	DropsShares *watch.Value[bool] // the publisher stores there whether shares have to be devices of their own; nil = only Publisher.DropsShares

	Watchdog *watchdog.Registry // of the publisher's goroutines; nil = none
}

// Publisher publishes the devices of a node. Make one with New, then call Run once. The other methods are safe for concurrent use.
type Publisher struct {
	opts       Options
	log        *slog.Logger
	selector   kubeapi.SliceSelector
	names      names
	status     *watch.Value[Status]
	dropShares *watch.Value[bool]
	latestNode *watch.Value[kubeapi.Node]

	state // owned by Run
}

// state belongs to Run.
type state struct {
	task    *watchdog.Task
	wanted  []kubeapi.Device // nil = not known yet
	newer   <-chan struct{}  // closed when there are newer ones
	devices []kubeapi.Device // those of them that the server can list, with the time of each taint
	derived bool             // devices follow from wanted
	cache   sliceCache
	node    node

	support      support
	supportKnown bool
	reconnected  bool      // the connection broke since support was detected: it is detected again before the next write
	detectAt     time.Time // or at this time without one
	dryRunName   string

	refused       map[string]refusal // devices that the server refuses as invalid, by name
	recheck       *backoff.ExponentialBackOff
	recheckAt     time.Time
	bisecting     bool
	lastPublished layout // the latest that is published completely

	altered     map[string]sentAndStored // the latest write of each slice that the server stored with another content
	otherNames  map[int]string           // of slices whose first name another client has
	other       otherDriver
	staleWrites int // in a row: writes that found another state of the API than the cache has

	due       time.Time // of the next comparison
	notBefore time.Time // of the next comparison: a request has failed
	retry     retries

	addingTaints    bool      // addTaints runs
	taintsNotBefore time.Time // no taint before it: the latest write of one has failed
	taintRetry      retries

	minorWrites bucket // limits writes that can wait
	creates     bucket // limits creates
	current     Status
	writes      counters
	lasting     problemset.Set // why not all was published since that was so last
}

// New returns a publisher that is not running.
func New(o Options) *Publisher {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &Publisher{
		opts: o, log: o.Log.With("node", o.Node, "driver", o.Driver), names: newNames(o.Node, o.Driver),
		selector: kubeapi.SliceSelector{Node: o.Node, Driver: o.Driver},
		status:   watch.NewValue(Status{}), dropShares: o.DropsShares, latestNode: watch.NewValue(kubeapi.Node{}),
	}
	if p.dropShares == nil {
		p.dropShares = watch.NewValue(false)
	}
	p.refused, p.altered, p.otherNames = map[string]refusal{}, map[string]sentAndStored{}, map[int]string{}
	p.writes, p.lasting.Log = counters{}, p.log
	p.cache = newSliceCache()
	p.dryRunName = p.names.dryRun()
	p.node.retry, p.other.retry = newRetries(), newRetries()
	p.retry, p.taintRetry, p.recheck = newRetries(), newRetries(), newWait(refusedAgain, refusedLong)
	p.minorWrites = bucket{size: 10, every: 5 * time.Second}
	p.setProblem(notListed.Error())
	p.publishStatus()
	return p
}

// DropsShares reports whether the API server drops consumable capacity (feature gate DRAConsumableCapacity, off before 1.36), so that
// shares have to be devices of their own. Before the server was asked it is false, and nothing is published.
func (p *Publisher) DropsShares() bool { return p.dropShares.Load() }

// WatchDropsShares yields DropsShares and then each change until ctx ends. While it is true, devices with AllowMultipleAllocations are not
// published: without that field one claim would hold all shares.
func (p *Publisher) WatchDropsShares(ctx context.Context) iter.Seq[bool] {
	return p.dropShares.Watch(ctx)
}

// Run publishes until ctx ends. It deletes nothing then.
func (p *Publisher) Run(ctx context.Context) error {
	changes := make(chan change, parallelWrites) // so that the deletes of a kubelet that starts are in one plan
	watching := make(chan struct{})
	watchCtx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(watching)
		listAndWatch(watchCtx, p.opts.API, p.selector, changes, p.opts.Watchdog)
	}()
	defer func() { cancel(); <-watching }()
	p.task = p.opts.Watchdog.Register("resource slices")
	defer p.task.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		changed := p.takeDevices()
		p.applyChanges(changes)
		again := p.addTaints(ctx)
		if now := time.Now(); !p.due.IsZero() && !now.Before(p.nextComparison()) {
			p.due = now.Add(resync)
			p.reconcile(ctx, changes)
			changed = p.takeDevices()
			again = p.addTaints(ctx)
		}
		p.publishStatus()
		wait := min(p.untilNext(), again)
		timer.Reset(wait)
		p.task.Heartbeat(wait + time.Second)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case c := <-changes:
			p.apply(c)
		case <-timer.C:
		}
	}
}

// nextComparison is when the next comparison may be.
func (p *Publisher) nextComparison() time.Time {
	if p.notBefore.After(p.due) {
		return p.notBefore
	}
	return p.due
}

// untilNext is how long that takes.
func (p *Publisher) untilNext() time.Duration {
	if p.due.IsZero() {
		return resync
	}
	return max(0, time.Until(p.nextComparison()))
}

// compareAt sets the time of the next comparison, if it is not earlier already.
func (p *Publisher) compareAt(t time.Time) {
	if p.due.IsZero() || t.Before(p.due) {
		p.due = t
	}
}

// takeDevices takes the desired devices and returns a channel that is closed when there are newer ones.
func (p *Publisher) takeDevices() <-chan struct{} {
	latest, changed := p.opts.Devices.LoadNext()
	if changed == p.newer {
		return changed
	}
	p.newer = changed
	if latest == nil || p.wanted != nil && sameDevices(latest, p.wanted) {
		return changed
	}
	p.wanted, p.derived = latest, false
	if p.view().keepsPodsAway(p.cache.devices(p.names.own), p.support.listable(latest)) {
		p.compareAt(time.Now())
	} else {
		p.compareAt(time.Now().Add(debounce))
	}
	return changed
}

// sameDevices reports whether two lists ask for the same slices, on any server.
func sameDevices(a, b []kubeapi.Device) bool {
	return slices.EqualFunc(a, b, func(x, y kubeapi.Device) bool { return x.Held == y.Held && equalDevice(x, y) })
}

// apply applies what the goroutine that lists and watches has found.
func (p *Publisher) apply(c change) {
	now := time.Now()
	if c.err != nil {
		if p.report(c.err); errors.Is(c.err, kubeapi.ErrUnavailable) { // else writes may work
			p.pause(p.retry.next(c.err))
		}
		return
	}
	if c.back {
		p.reconnected, p.detectAt = true, now.Add(rand.N(detectWithin))
	}
	switch {
	case c.list != nil:
		p.cache.replace(*c.list, c.began)
	case c.event != nil && p.cache.add(*c.event):
	case !c.back:
		p.setReachable()
		return
	}
	if c.event == nil { // the server is there, or back
		p.notBefore, p.taintsNotBefore = time.Time{}, time.Time{}
		p.retry.reset()
		p.taintRetry.reset()
		p.node.notBefore, p.other.notBefore = time.Time{}, time.Time{}
	}
	p.compareAt(now)
	p.setReachable()
}
