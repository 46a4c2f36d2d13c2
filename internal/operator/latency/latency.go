// Package latency counts how long requests take, in buckets as a Prometheus histogram has them.
package latency

import (
	"sync/atomic"
	"time"
)

// bounds are the upper bounds of the buckets. A request is answered from memory in less than a millisecond; one that waits for the
// first answer of the driver takes seconds.
var bounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second,
}

// Histogram counts requests by duration. The zero value is empty. It is safe for concurrent use and takes no lock.
type Histogram struct {
	counts [len(bounds) + 1]atomic.Uint64 // by bucket; the last has no bound
	sum    atomic.Int64                   // nanoseconds
}

// Observe counts a request that took d.
func (h *Histogram) Observe(d time.Duration) {
	bucket := 0
	for bucket < len(bounds) && d > bounds[bucket] {
		bucket++
	}
	h.counts[bucket].Add(1)
	h.sum.Add(int64(d))
}

// Since counts a request that began at a time, now. It is for a deferred call.
func (h *Histogram) Since(began time.Time) { h.Observe(time.Since(began)) }

// Bucket is how many requests took at most Bound.
type Bucket struct {
	Bound time.Duration
	Count uint64
}

// Snapshot is the state of a Histogram at one time. Requests that are counted meanwhile may be in Buckets and not in Sum.
type Snapshot struct {
	Buckets []Bucket // by bound, each with the requests of those before
	Count   uint64   // of all requests, also those above the last bound
	Sum     time.Duration
}

// Snapshot returns the present state.
func (h *Histogram) Snapshot() Snapshot {
	s := Snapshot{Buckets: make([]Bucket, len(bounds)), Sum: time.Duration(h.sum.Load())}
	for i := range h.counts {
		s.Count += h.counts[i].Load()
		if i < len(bounds) {
			s.Buckets[i] = Bucket{bounds[i], s.Count}
		}
	}
	return s
}
