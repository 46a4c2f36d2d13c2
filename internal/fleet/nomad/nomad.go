// Package nomad reads one Nomad region for fleet, and moves allocations in it. It needs no right but node:read, and read-job and alloc-lifecycle in all
// namespaces; for marks and eligibility node:write, to know of preemption operator:read.
//
//	servers   lists every 15 s, and after events      reading (values of the API)
//	reading   translate, without I/O                  rescue.Cluster
//	Live, Do  single reads and calls                  right before an act, and the act
//
// The event stream only shows when to list: it can skip events, and be empty, without an error.
package nomad

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Options configure a Cluster.
type Options struct {
	Name    string
	Mode    rescue.Mode
	Address string // http://HOST:PORT, https://HOST:PORT or unix:///PATH of a server or any agent of the region
	Region  string // "" = that of the agent at Address

	TokenFile         string // file with an ACL token, read at each use; "" = none
	CAFile            string // of https; "" = the system's
	CertFile, KeyFile string // of https, read for each connection; "" = none

	Log *slog.Logger
}

const (
	listPeriod = 15 * time.Second
	listPause  = time.Second // at least, between two lists
	callLimit  = 30 * time.Second
)

// Cluster is one Nomad region, as a fleet.Cluster. Make one with New.
type Cluster struct {
	o        Options
	log      *slog.Logger
	client   *api.Client
	shown    *watch.Value[rescue.Cluster]
	problems problemset.Set

	changed chan struct{} // something has to be read again
	indexed chan struct{} // closed when index is that of a list

	mu       sync.Mutex
	follow   map[string]bool   // IDs of allocations whose places and replacements are needed
	jobs     map[jobName]bool  // of these
	nodeIDs  map[string]string // by the name that is shown
	index    uint64            // of the latest list
	preempts api.PreemptionConfig
	marked   map[string]marked // by node ID
}

var _ fleet.Cluster = (*Cluster)(nil)

// New returns a cluster. It connects to nothing.
func New(o Options) (*Cluster, error) {
	client, err := newClient(o)
	if err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	c := &Cluster{
		o: o, log: o.Log.With("cluster", o.Name), client: client, changed: make(chan struct{}, 1), indexed: make(chan struct{}),
		follow: map[string]bool{}, marked: map[string]marked{}, preempts: preemptsAll,
	}
	c.problems.Log = c.log
	c.shown = watch.NewValue(rescue.Cluster{Name: o.Name, Mode: o.Mode, Problem: "it was not read yet", Replacements: true, Marks: true})
	return c, nil
}

// Name returns the configured name.
func (c *Cluster) Name() string { return c.o.Name }

// Kind returns fleet.Nomad.
func (c *Cluster) Kind() fleet.Kind { return fleet.Nomad }

// Shown holds the latest state of the region.
func (c *Cluster) Shown() *watch.Value[rescue.Cluster] { return c.shown }

// Problems are what keeps this program from all that it should do in the region.
func (c *Cluster) Problems() []problem.Problem { return c.problems.List() }

// Follow names the allocations whose places and replacements are needed. It has the region read again for those that are new.
func (c *Cluster) Follow(work []string) {
	next := make(map[string]bool, len(work))
	for _, id := range work {
		next[id] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range next {
		if !c.follow[id] {
			watch.Notify(c.changed)
			break
		}
	}
	c.follow = next
}

func (c *Cluster) following() map[string]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.follow // not changed
}

// Run reads the region until ctx ends.
func (c *Cluster) Run(ctx context.Context) error {
	defer c.client.Close()
	var stream sync.WaitGroup
	defer stream.Wait()
	stream.Go(func() { c.stream(ctx) })
	r := newReader(c)
	reconcile.Loop{On: []reconcile.Source{reconcile.Signal(c.changed)}}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		if !watch.Sleep(ctx, time.Until(r.ended.Add(listPause))) {
			return reconcile.Never
		}
		c.show(r.read(ctx))
		r.ended = time.Now()
		return listPeriod
	})
	return nil
}

// show stores what was read, or that it could not be read. Nothing that was shown before is forgotten by that: it is old, and has a problem.
func (c *Cluster) show(next rescue.Cluster, err error) {
	if errors.Is(err, context.Canceled) {
		return
	}
	if err != nil {
		next = c.shown.Load()
		next.Problem = err.Error()
		c.problems.Put(problem.Problem{Code: problem.ClusterUnread, Object: c.o.Name, Text: "Nomad region " + c.o.Name + " can't be read: " + err.Error(), Remedy: remedyOf(err)},
			slog.LevelWarn, "Nomad region can't be read", "error", err)
	} else {
		c.problems.End(problem.ClusterUnread, c.o.Name, "Nomad region is read again")
	}
	c.shown.Store(next)
}

// jobName names a job.
type jobName struct{ namespace, id string }
