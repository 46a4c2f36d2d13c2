package deviceplugin

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// endpoint offers one resource to the kubelet, by one registration after another.
type endpoint struct {
	resource string
	opts     Options
	kubelet  *kubelet
	timings  timings
	tracker  *tracker
	log      *slog.Logger
	task     *watchdog.Task // of run

	mu      sync.Mutex
	current ResourceStats // without Resource and Connected
}

// ResourceStats are the status and the counters of one resource since the process started.
type ResourceStats struct {
	Resource  string
	Connected bool      // the kubelet has opened ListAndWatch
	Reason    string    // why Connected is false; "" if it is true
	Socket    string    // path of the socket that is served; "" between registrations
	Since     time.Time // of Reason and Socket

	Sockets              uint64 // of registrations, each with a server of its own
	Registrations        uint64 // Register calls that succeeded
	RegistrationErrors   uint64 // Register calls that failed
	Allocations          uint64 // Allocate calls that succeeded
	AllocationErrors     uint64 // Allocate calls that failed
	PreferredAllocations uint64 // GetPreferredAllocation calls
	Lists                uint64 // ListAndWatch responses

	LastError   string    // what ended the previous registration; "" = none has ended
	LastErrorAt time.Time // zero if LastError is ""
}

// setStatus changes the status. If it is the same, its time does not change.
func (e *endpoint) setStatus(socket, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := &e.current; c.Since.IsZero() || c.Socket != socket || c.Reason != reason {
		c.Socket, c.Reason, c.Since = socket, reason, time.Now()
	}
}

// setLastError records why a registration ended.
func (e *endpoint) setLastError(err error) {
	e.setStatus("", err.Error())
	e.mu.Lock()
	defer e.mu.Unlock()
	e.current.LastError, e.current.LastErrorAt = err.Error(), time.Now()
}

// count increments a counter of current.
func (e *endpoint) count(counter *uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	*counter++
}

func (e *endpoint) stats() ResourceStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.current
	s.Resource, s.Connected = e.resource, s.Reason == ""
	return s
}

// run runs one registration after another until ctx ends.
func (e *endpoint) run(ctx context.Context) {
	e.task = e.opts.Watchdog.Register("endpoint " + e.resource)
	defer e.task.Done()
	retry := backoff.NewExponentialBackOff() // factor 1.5, randomized by a half
	retry.InitialInterval, retry.MaxInterval = e.timings.retry, e.timings.retryMax
	for logged := ""; ; {
		r := registration{endpoint: e}
		err := r.run(ctx)
		if ctx.Err() != nil {
			return
		}
		e.setLastError(err)
		if !r.connectedAt.IsZero() {
			logged = "" // it was offered since
		}
		if err.Error() != logged { // once for each error: readyz, debug and the metrics have it while it lasts
			logged = err.Error()
			e.log.Warn("not offered to the kubelet, retrying", "error", err)
		}
		if !r.connectedAt.IsZero() && time.Since(r.connectedAt) >= e.timings.stable {
			retry.Reset()
		}
		wait := retry.NextBackOff()
		if r.recorded {
			wait = max(wait, e.timings.restart)
		}
		e.task.Heartbeat(wait)
		if e.kubelet.waitRetry(ctx, wait, r.kubeletID) { // another kubelet, which has refused nothing yet
			retry.Reset()
		}
	}
}
