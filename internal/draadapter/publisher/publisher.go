package publisher

import (
	"context"
	"iter"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeapi"
	"github.com/tandem-gpu/tandem/internal/watch"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

const (
	debounce    = 200 * time.Millisecond // from a change of devices to its write, unless a taint is added
	resync      = 5 * time.Minute        // between comparisons without an event
	nodeFresh   = time.Second            // the UID of the Node holds for the creates of this time
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
	node       *watch.Value[kubeapi.Node]

	state // owned by Run
}

// state is what Run knows.
type state struct {
	task     *watchdog.Task
	wanted   []kubeapi.Device // nil = not known yet
	newer    <-chan struct{}  // closed when there are newer ones
	devices  []kubeapi.Device // the same with the time of each taint
	stamped  bool             // devices are those of wanted
	seen     observed
	owner    string // UID of the Node; "" = not known
	nodeRead time.Time
	probed   bool // the server was asked which fields it drops, since the latest list

	refused   map[fingerprint]error // layouts that the server refused as invalid
	good      layout                // the latest that is published completely
	stored    map[string]answered   // the latest write of each slice whose answer was another
	rivals    rivals
	surprises int // writes that found another state than was observed

	due   time.Time // of the next comparison
	hold  time.Time // no request before it
	retry retries

	minor           bucket // limits writes that can wait
	creates         bucket // limits creates
	current         Status
	writes          counters
	logged, refusal string // the latest error in the log; the latest refusal
}

// New returns a publisher that is not running.
func New(o Options) *Publisher {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &Publisher{
		opts: o, log: o.Log.With("node", o.Node, "driver", o.Driver), names: newNames(o.Node, o.Driver),
		selector: kubeapi.SliceSelector{Node: o.Node, Driver: o.Driver},
		status:   watch.NewValue(Status{}), dropShares: o.DropsShares, node: watch.NewValue(kubeapi.Node{}),
	}
	if p.dropShares == nil {
		p.dropShares = watch.NewValue(false)
	}
	p.refused, p.stored, p.writes = map[fingerprint]error{}, map[string]answered{}, counters{}
	p.seen = newObserved()
	p.retry = newRetries()
	p.minor = bucket{size: 10, every: 5 * time.Second}
	p.problem(notListed.Error())
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

// Node is the Node as it was read last: before the first slice is published, with each creation of slices, and every five minutes. It has
// no name before the first time.
func (p *Publisher) Node() *watch.Value[kubeapi.Node] { return p.node }

// RefreshNode reads the Node now, for those who follow Node.
func (p *Publisher) RefreshNode(ctx context.Context) error {
	node, err := p.opts.API.Node(ctx, p.opts.Node)
	if err == nil {
		p.node.Store(node)
	}
	return err
}

// Run publishes until ctx ends. It deletes nothing then.
func (p *Publisher) Run(ctx context.Context) error {
	observations := make(chan observation, parallelCreates) // so that the deletes of a kubelet that starts are in one plan
	watching := make(chan struct{})
	observing, cancel := context.WithCancel(ctx)
	go func() {
		defer close(watching)
		observe(observing, p.opts.API, p.selector, observations, p.opts.Watchdog)
	}()
	defer func() { cancel(); <-watching }()
	p.task = p.opts.Watchdog.Register("resource slices")
	defer p.task.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var changed <-chan struct{}
	for {
		changed = p.takeDevices()
		p.takeObservations(observations)
		if now := time.Now(); !p.due.IsZero() && !now.Before(p.next()) {
			p.due = now.Add(resync)
			p.reconcile(ctx, observations)
			p.publishStatus()
			changed = p.takeDevices()
		}
		wait := resync
		if !p.due.IsZero() {
			wait = max(0, time.Until(p.next()))
		}
		timer.Reset(wait)
		p.task.Heartbeat(wait + time.Second)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case o := <-observations:
			p.apply(o)
			p.publishStatus()
		case <-timer.C:
		}
	}
}

// next is when the next comparison may be.
func (p *Publisher) next() time.Time {
	if p.hold.After(p.due) {
		return p.hold
	}
	return p.due
}

// at sets the time of the next comparison, if it is not earlier already.
func (p *Publisher) at(t time.Time) {
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
	if latest == nil || p.wanted != nil && equalDevices(latest, p.wanted) {
		return changed
	}
	p.wanted, p.stamped = latest, false
	clear(p.refused) // another try
	if !p.current.DropsTaints && addsTaint(latest, byName(p.seen.devices(p.names.own))) {
		p.at(time.Now())
	} else {
		p.at(time.Now().Add(debounce))
	}
	return changed
}

// apply takes what the observing goroutine found.
func (p *Publisher) apply(o observation) {
	now := time.Now()
	switch {
	case o.err != nil:
		p.failed(o.err)
		return
	case o.list != nil:
		p.seen.replace(*o.list, o.began)
		p.probed = false
		p.hold = time.Time{} // the server is back
		p.retry.reset()
		p.at(now)
	case o.event != nil && p.seen.add(*o.event):
		p.at(now)
	}
	p.reached()
}
