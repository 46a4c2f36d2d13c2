package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Options are what a controller runs with.
type Options struct {
	Identity string // of this process, unlike that of any other
	Policy   rescue.Policy
	Clusters []Cluster
	Store    Store
	Leader   Leader
	Log      *slog.Logger
	Watchdog *watchdog.Registry // nil = none
}

// Controller decides whenever the clusters have changed, when something is due, and every 15 s. While its process leads, it writes the ledger and makes
// the acts; else it decides on a copy, for its View.
//
// One goroutine, that of Run, decides and writes. Calls have goroutines of their own, and give their answers back to it.
type Controller struct {
	Options
	clusters map[string]Cluster
	slots    map[string]chan struct{} // for calls, by cluster
	problems problemset.Set
	view     *watch.Value[View]
	leads    *watch.Value[*lead] // the latest lead that was given to this process; nil = none yet
	wake     chan struct{}       // something is to be decided on again
	changed  atomic.Bool         // this process has changed the stored ledger for a person
	answers  answers

	// Of the goroutine of Run.
	ledger  ledger
	lead    *lead // nil = this process does not lead
	state   rescue.State
	decided time.Time // when the latest decision began
	due     time.Time // the next one, if nothing changes
	follows map[string][]string
	calls   map[string]under // by act, and by node for marks
	events  events
}

// Times between decisions.
const (
	settle     = time.Second      // at least
	every      = 15 * time.Second // at most
	tryAgain   = 5 * time.Second  // after an error of the ledger's store
	passWithin = time.Minute      // for the watchdog
	electAgain = 5 * time.Second  // after a lead, and after an election that was not possible
	// An election without an error for so long is possible.
	electedWell = 30 * time.Second
)

// New returns a controller. It does nothing before Run.
func New(o Options) *Controller {
	c := &Controller{
		Options: o, clusters: map[string]Cluster{}, slots: map[string]chan struct{}{}, leads: watch.NewValue[*lead](nil), wake: make(chan struct{}, 1),
		follows: map[string][]string{}, calls: map[string]under{}, events: newEvents(o.Log),
	}
	for _, one := range o.Clusters {
		c.clusters[one.Name()] = one
		c.slots[one.Name()] = make(chan struct{}, callsAtATime)
	}
	c.problems.Log = o.Log
	c.view = watch.NewValue(View{Identity: o.Identity, Policy: o.Policy, Store: o.Store.String()})
	return c
}

// View has what was decided last. Before the first decision its At is zero.
func (c *Controller) View() *watch.Value[View] { return c.view }

// Run decides and acts until ctx ends. It returns an error only if the policy is invalid.
func (c *Controller) Run(ctx context.Context) error {
	if err := c.Policy.Check(); err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, one := range c.Clusters {
		if one.Shown().Load().Mode != rescue.ModeOff {
			running.Go(func() { c.runCluster(ctx, one) })
		}
	}
	running.Go(func() { c.elect(ctx) })
	task := c.Watchdog.Register("rescue")
	defer task.Done()
	reconcile.Loop{On: c.sources(), Task: task, Limit: passWithin}.Run(ctx, c.pass)
	for _, l := range []*lead{c.lead, c.leads.Load()} {
		if l != nil {
			l.leave()
		}
	}
	return nil
}

// runCluster follows a cluster. One that can't be followed is tried again: what it shows grows old meanwhile, and so nothing is done in it.
func (c *Controller) runCluster(ctx context.Context, one Cluster) {
	for ctx.Err() == nil {
		if err := one.Run(ctx); err != nil && ctx.Err() == nil {
			c.Log.Error("cluster is not followed, and is tried again", "cluster", one.Name(), "error", err)
		}
		watch.Sleep(ctx, every)
	}
}

func (c *Controller) sources() []reconcile.Source {
	all := []reconcile.Source{reconcile.Signal(c.wake), c.leads.Changed}
	for _, one := range c.Clusters {
		all = append(all, one.Shown().Changed)
	}
	return all
}

// pass decides if it is time to: changes that follow one another are one decision.
func (c *Controller) pass(ctx context.Context, cause reconcile.Cause) time.Duration {
	now := time.Now()
	if soon := c.decided.Add(settle); cause == reconcile.Change && soon.Before(c.due) {
		c.due = soon
	}
	if now.Before(c.due) {
		return c.due.Sub(now)
	}
	c.decided, c.due = now, now.Add(every)
	c.decide(ctx)
	return max(time.Until(c.due), 0)
}

// decideBy has the next decision at a time or before it, also if the clock is set back meanwhile.
func (c *Controller) decideBy(at time.Time) {
	at = time.Now().Add(time.Until(at))
	if soon := c.decided.Add(settle); at.Before(soon) {
		at = soon
	}
	if at.Before(c.due) {
		c.due = at
	}
}

// decide makes one decision and what follows from it.
func (c *Controller) decide(ctx context.Context) {
	c.follow(c.leads.Load())
	c.fold()
	loaded := c.load(ctx)
	clusters := c.shown()
	began := time.Now()
	var r rescue.Result
	if loaded == ledgerUnusable {
		r = rescue.Result{State: c.state, Problem: fmt.Sprintf("no act is made: %v", c.ledger.err)}
	} else {
		r = c.Policy.Next(c.state, rescue.NewFleet(clusters...), began)
	}
	took := time.Since(began)
	c.tellWork(clusters)
	if c.lead != nil && loaded == ledgerRead && r.Problem == "" {
		c.carryOut(r, began)
	} else {
		c.keepSeen(r.State)
	}
	if !r.Wake.IsZero() {
		c.decideBy(r.Wake)
	}
	r.State = c.state // what was not written is not so
	c.publish(clusters, r, began, took)
}

// carryOut writes the ledger of a decision, and then makes its calls. If the ledger can't be written, it makes none, and what was decided is not so: but
// for what was seen, and for a decision without calls, of which nothing is lost then.
func (c *Controller) carryOut(r rescue.Result, decided time.Time) {
	if c.write(r.State.Ledger) {
		c.state = r.State
		c.events.decided(r)
		c.call(r, decided)
		return
	}
	if calls(r) {
		c.keepSeen(r.State)
		return
	}
	c.state = r.State
	c.events.decided(r)
}

// keepSeen keeps what a decision has seen, and not its ledger.
func (c *Controller) keepSeen(s rescue.State) {
	s.Ledger, s.Term = c.state.Ledger, c.state.Term
	c.state = s
}

// calls reports whether something is to be called for a result.
func calls(r rescue.Result) bool {
	for i := range r.Acts {
		if !r.Acts[i].Listed {
			return true
		}
	}
	for i := range r.Marks {
		if !r.Marks[i].Listed {
			return true
		}
	}
	return false
}

// shown are the clusters as they show themselves now.
func (c *Controller) shown() (all []rescue.Cluster) {
	for _, one := range c.Clusters {
		all = append(all, one.Shown().Load())
	}
	return all
}
