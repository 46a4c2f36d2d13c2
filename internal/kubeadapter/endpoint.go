package kubeadapter

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// endpoint offers one resource, incarnation after incarnation.
type endpoint struct {
	resource string
	src      Source
	opts     Options
	kubelet  *kubelet
	pace     pace
	lister   *lister
	log      *slog.Logger
	turns    *watchdog.Task // of run
	count    counters

	mu     sync.Mutex
	stand  standing
	last   string // what ended the last incarnation; "" = none has ended
	lastAt time.Time
}

// standing is where an endpoint is in its life.
type standing struct {
	Socket string // being served; "" between incarnations
	Why    string // why the kubelet does not watch; "" if it does
	Since  time.Time
}

// ResourceStats are the standing and the counters of one resource since the process started.
type ResourceStats struct {
	Resource string
	Watched  bool      // the kubelet has the stream open
	Why      string    // why not; "" if it has
	Socket   string    // path of the one that is served; "" between incarnations
	Since    time.Time // of Why and Socket

	Incarnations       uint64 // sockets made, each with a server of its own
	Registrations      uint64
	RegistrationErrors uint64
	Allocations        uint64
	AllocationErrors   uint64
	Preferences        uint64 // GetPreferredAllocation
	Lists              uint64 // sent to the kubelet

	LastError   string    // what ended the last incarnation; "" = none has ended
	LastErrorAt time.Time // zero if LastError is ""
}

func (e *endpoint) status() standing {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stand
}

// enter says where the endpoint is now; the same again keeps its time.
func (e *endpoint) enter(socket, why string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stand.Since.IsZero() || e.stand.Socket != socket || e.stand.Why != why {
		e.stand = standing{Socket: socket, Why: why, Since: time.Now()}
	}
}

// ended notes why an incarnation is over.
func (e *endpoint) ended(err error) {
	e.enter("", err.Error())
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last, e.lastAt = err.Error(), time.Now()
}

func (e *endpoint) stats() ResourceStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return ResourceStats{
		Resource: e.resource,
		Watched:  e.stand.Why == "", Why: e.stand.Why, Socket: e.stand.Socket, Since: e.stand.Since,
		Incarnations:       e.count.incarnations.Load(),
		Registrations:      e.count.registrations.Load(),
		RegistrationErrors: e.count.registrationErrors.Load(),
		Allocations:        e.count.allocations.Load(),
		AllocationErrors:   e.count.allocationErrors.Load(),
		Preferences:        e.count.preferences.Load(),
		Lists:              e.count.lists.Load(),
		LastError:          e.last, LastErrorAt: e.lastAt,
	}
}

// run lives one incarnation after another until ctx ends.
func (e *endpoint) run(ctx context.Context) {
	e.turns = e.opts.Watchdog.Register("endpoint " + e.resource)
	defer e.turns.Done()
	retry := backoff.NewExponentialBackOff() // by half more each time, give or take half
	retry.InitialInterval, retry.MaxInterval = e.pace.retry, e.pace.retryMax
	for {
		l := life{endpoint: e}
		err := l.live(ctx)
		if ctx.Err() != nil {
			return
		}
		e.ended(err)
		e.log.Warn("no longer offered to the kubelet, trying again", "reason", err)
		if !l.watchedSince.IsZero() && time.Since(l.watchedSince) >= e.pace.stable {
			retry.Reset()
		}
		rest := retry.NextBackOff()
		if l.known {
			rest = max(rest, e.pace.settle)
		}
		e.turns.Heartbeat(rest)
		if e.kubelet.rest(ctx, rest, l.with) { // another kubelet: it knows nothing of us and refused nothing
			retry.Reset()
		}
	}
}
