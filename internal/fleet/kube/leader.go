package kube

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/fleet"
)

// times are those of an election. Another process leads leaseFor after it saw the latest renewal, so this one stops earlier after it has sent it.
type times struct{ leaseFor, leadFor, renewEach time.Duration }

var leaseTimes = times{leaseFor: 15 * time.Second, leadFor: 10 * time.Second, renewEach: 2 * time.Second}

// leader elects one process by a Lease.
type leader struct {
	c                         *Cluster
	namespace, name, identity string
	times                     times
	elector                   atomic.Pointer[leaderelection.LeaderElector]
}

// Leader returns the election by a Lease. Its calls are made by a client of their own.
func (c *Cluster) Leader(namespace, name, identity string) fleet.Leader {
	return &leader{c: c, namespace: namespace, name: name, identity: identity, times: leaseTimes}
}

// Holder is the process that leads, as far as this one has seen.
func (l *leader) Holder() string {
	if e := l.elector.Load(); e != nil {
		return e.GetLeader()
	}
	return ""
}

// Lead calls f while this process leads.
func (l *leader) Lead(ctx context.Context, f func(context.Context)) error {
	// The election outlives ctx until f has returned: only then another process may lead.
	election, end := context.WithCancelCause(klog.NewContext(context.WithoutCancel(ctx), l.c.libraryLog()))
	defer end(nil)
	t := &term{end: end, leadFor: l.times.leadFor, over: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { t.finish(context.Cause(ctx)) })
	defer stop()
	e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &lock{term: t, Interface: &resourcelock.LeaseLock{
			LeaseMeta: metav1.ObjectMeta{Namespace: l.namespace, Name: l.name}, Client: l.c.lead.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: l.identity},
		}},
		LeaseDuration: l.times.leaseFor, RenewDeadline: l.times.leadFor, RetryPeriod: l.times.renewEach, ReleaseOnCancel: true, Name: l.name,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { t.run(ctx, f) }, OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return fmt.Errorf("lease %s/%s in cluster %s: %w", l.namespace, l.name, l.c.o.Name, err)
	}
	l.elector.Store(e)
	e.Run(election)
	t.finish(nil)
	<-t.ended()
	if err := context.Cause(election); ctx.Err() == nil && apierrors.IsForbidden(err) {
		return fmt.Errorf("lease %s/%s in cluster %s: %w", l.namespace, l.name, l.c.o.Name, err)
	}
	return ctx.Err()
}

// term is one time of leading.
type term struct {
	end     context.CancelCauseFunc // of the election
	leadFor time.Duration
	over    chan struct{} // f has returned

	mu      sync.Mutex
	until   time.Time // by the latest renewal
	expires *time.Timer
	cancel  context.CancelFunc // of f's context; nil = f does not run
	began   bool
	done    bool // f must not run any more
}

// renewed records a renewal that was sent at a time: this process leads for some time from then on.
func (t *term) renewed(sent time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.until = sent.Add(t.leadFor)
	if t.expires != nil && !t.done {
		t.expires.Reset(time.Until(t.until))
	}
}

// run calls f with a context that ends leadFor after the latest renewal was sent, or with ctx, and then ends the election.
func (t *term) run(ctx context.Context, f func(context.Context)) {
	defer t.end(nil)
	mine, cancel := context.WithCancel(ctx)
	defer cancel()
	t.mu.Lock()
	if t.done {
		t.mu.Unlock()
		return
	}
	t.began, t.cancel = true, cancel
	t.expires = time.AfterFunc(time.Until(t.until), func() { t.finish(nil) })
	t.mu.Unlock()
	defer close(t.over)
	f(mine)
}

// finish ends f's context. If f never ran, it ends the election.
func (t *term) finish(why error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done = true
	if t.expires != nil {
		t.expires.Stop()
	}
	if t.began {
		t.cancel()
		return
	}
	t.end(why)
}

// ended is closed when f does not run.
func (t *term) ended() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.began {
		return t.over
	}
	none := make(chan struct{})
	close(none)
	return none
}

// lock is a Lease of which the renewals are seen.
type lock struct {
	resourcelock.Interface
	term *term
}

// Get reads the Lease.
func (l *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	r, raw, err := l.Interface.Get(ctx)
	l.denied(err)
	return r, raw, err
}

// Create makes the Lease.
func (l *lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.send(func() error { return l.Interface.Create(ctx, r) })
}

// Update renews the Lease, or gives it up: not before f has returned.
func (l *lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	if r.HolderIdentity == "" {
		l.term.finish(nil)
		select {
		case <-l.term.ended():
		case <-ctx.Done():
			return ctx.Err()
		}
		return l.Interface.Update(ctx, r)
	}
	return l.send(func() error { return l.Interface.Update(ctx, r) })
}

func (l *lock) send(call func() error) error {
	began := time.Now()
	err := call()
	l.denied(err)
	if err == nil {
		l.term.renewed(began)
	}
	return err
}

// denied ends the election if a right is missing.
func (l *lock) denied(err error) {
	if apierrors.IsForbidden(err) {
		l.term.finish(err)
	}
}
