package monitor

import (
	"context"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// usageFresh is the maximum age of a finished reading, since its beginning, that is still returned. It is less than the
// shortest interval at which one caller asks (nomadadapter: one second), so that each of its answers is a new reading.
const usageFresh = 500 * time.Millisecond

// usageReadings shares readings of usage among their callers. At most one reading waits or is in progress, whatever the number
// of its callers; a caller whose context ends leaves nothing behind, so that nothing accumulates while the driver hangs.
type usageReadings struct {
	requested chan struct{} // capacity 1: a reading is requested

	mu   sync.Mutex
	next *usageReading // waiting or in progress; nil = neither
	last *usageReading // finished last, without an error; nil = none in this session
}

// usageReading is one reading. The lock of usageReadings guards it, except usage and err, which do not change after done.
type usageReading struct {
	callers int       // that wait for it
	began   time.Time // zero = not yet
	done    chan struct{}
	usage   []gpu.Usage
	err     error
}

func newUsageReadings() *usageReadings { return &usageReadings{requested: make(chan struct{}, 1)} }

// Usage reads the usage of all devices. It fails with gpu.ErrNoDriver while no session is open, and with the context's error
// when the driver does not answer in time.
//
// Callers share a reading: a call returns the reading that is in progress, or one that began less than usageFresh (500 ms) ago;
// otherwise a new one begins after a health check that is due. So a value was read (gpu.Usage.At) after the call, or before
// it by at most 500 ms or the duration of the reading, whichever is longer. The slice is shared, too, and must not be changed.
func (m *Monitor) Usage(ctx context.Context) ([]gpu.Usage, error) {
	r := m.usage.join()
	select {
	case <-r.done:
		return r.usage, r.err
	case <-ctx.Done():
		m.usage.leave(r)
		return nil, ctx.Err()
	}
}

// join returns the reading that answers a new caller.
func (u *usageReadings) join() *usageReading {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.next == nil && u.last != nil && time.Since(u.last.began) < usageFresh {
		return u.last
	}
	if u.next == nil {
		u.next = &usageReading{done: make(chan struct{})}
		watch.Notify(u.requested)
	}
	u.next.callers++
	return u.next
}

// leave undoes join. A reading that has not begun and has no callers is dropped.
func (u *usageReadings) leave(r *usageReading) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if r.callers--; r == u.next && r.callers == 0 && r.began.IsZero() {
		u.next = nil
	}
}

// waiting reports whether a caller waits for a reading that has not begun.
func (u *usageReadings) waiting() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.next != nil && u.next.began.IsZero()
}

// begin records that a reading has begun, which answers those who call from now on.
func (u *usageReadings) begin() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.next == nil { // the last caller has left since waiting was called
		u.next = &usageReading{done: make(chan struct{})}
	}
	u.next.began = time.Now()
}

// finish answers all callers that wait.
func (u *usageReadings) finish(usage []gpu.Usage, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	r := u.next
	u.next, u.last = nil, nil
	if r == nil {
		return
	}
	r.usage, r.err = usage, err
	close(r.done)
	if err == nil {
		u.last = r
	}
}
