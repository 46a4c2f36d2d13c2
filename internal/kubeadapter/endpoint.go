package kubeadapter

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// endpoint offers one resource to the kubelet, by one incarnation after another.
type endpoint struct {
	resource string
	opts     Options
	kubelet  *kubelet
	timings  timings
	tracker  *tracker
	log      *slog.Logger
	task     *watchdog.Task // of run
	count    counters

	mu          sync.Mutex
	status      endpointStatus
	lastError   string // what ended the previous incarnation; "" = none has ended
	lastErrorAt time.Time
}

// counters count events since the process started.
type counters struct {
	incarnations                      atomic.Uint64
	registrations, registrationErrors atomic.Uint64
	allocations, allocationErrors     atomic.Uint64
	preferences, lists                atomic.Uint64
}

// endpointStatus is the present status of an endpoint.
type endpointStatus struct {
	socket string    // that is served; "" between incarnations
	reason string    // why the kubelet has no ListAndWatch stream; "" = it has
	since  time.Time // of socket and reason
}

// ResourceStats are the status and the counters of one resource since the process started.
type ResourceStats struct {
	Resource  string
	Connected bool      // the kubelet has opened ListAndWatch
	Reason    string    // why Connected is false; "" if it is true
	Socket    string    // path of the socket that is served; "" between incarnations
	Since     time.Time // of Reason and Socket

	Incarnations         uint64 // sockets, each with a server of its own
	Registrations        uint64 // Register calls that succeeded
	RegistrationErrors   uint64 // Register calls that failed
	Allocations          uint64 // Allocate calls that succeeded
	AllocationErrors     uint64 // Allocate calls that failed
	PreferredAllocations uint64 // GetPreferredAllocation calls
	Lists                uint64 // ListAndWatch responses

	LastError   string    // what ended the previous incarnation; "" = none has ended
	LastErrorAt time.Time // zero if LastError is ""
}

// setStatus changes the status. If it is the same, its time does not change.
func (e *endpoint) setStatus(socket, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.status.since.IsZero() || e.status.socket != socket || e.status.reason != reason {
		e.status = endpointStatus{socket, reason, time.Now()}
	}
}

// setLastError records why an incarnation ended.
func (e *endpoint) setLastError(err error) {
	e.setStatus("", err.Error())
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lastError, e.lastErrorAt = err.Error(), time.Now()
}

func (e *endpoint) stats() ResourceStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return ResourceStats{
		Resource:  e.resource,
		Connected: e.status.reason == "", Reason: e.status.reason, Socket: e.status.socket, Since: e.status.since,
		Incarnations:         e.count.incarnations.Load(),
		Registrations:        e.count.registrations.Load(),
		RegistrationErrors:   e.count.registrationErrors.Load(),
		Allocations:          e.count.allocations.Load(),
		AllocationErrors:     e.count.allocationErrors.Load(),
		PreferredAllocations: e.count.preferences.Load(),
		Lists:                e.count.lists.Load(),
		LastError:            e.lastError, LastErrorAt: e.lastErrorAt,
	}
}

// run runs one incarnation after another until ctx ends.
func (e *endpoint) run(ctx context.Context) {
	e.task = e.opts.Watchdog.Register("endpoint " + e.resource)
	defer e.task.Done()
	retry := backoff.NewExponentialBackOff() // factor 1.5, randomized by a half
	retry.InitialInterval, retry.MaxInterval = e.timings.retry, e.timings.retryMax
	for {
		in := incarnation{endpoint: e}
		err := in.run(ctx)
		if ctx.Err() != nil {
			return
		}
		e.setLastError(err)
		e.log.Warn("not offered to the kubelet, retrying", "error", err)
		if !in.connectedAt.IsZero() && time.Since(in.connectedAt) >= e.timings.stable {
			retry.Reset()
		}
		wait := retry.NextBackOff()
		if in.recorded {
			wait = max(wait, e.timings.restart)
		}
		e.task.Heartbeat(wait)
		if e.kubelet.waitRetry(ctx, wait, in.kubeletID) { // another kubelet, which has refused nothing yet
			retry.Reset()
		}
	}
}
