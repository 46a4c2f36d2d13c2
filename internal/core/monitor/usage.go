package monitor

import (
	"context"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// usageFresh is for how long after its beginning a reading of usage answers callers that ask when it is done. It is less
// than the least interval at which one caller asks (nomadadapter: a second), so that each of its answers is a new one.
const usageFresh = 500 * time.Millisecond

// usageReadings shares readings of usage among their callers. At most one reading is wanted or under way, however many
// callers wait for it; a caller whose context ends leaves nothing behind. So nothing piles up while the driver hangs.
type usageReadings struct {
	asked chan struct{} // capacity 1: a reading is wanted

	mu   sync.Mutex
	next *usageReading // wanted or under way; nil = neither
	last *usageReading // done latest, without an error; nil = none of this session
}

// usageReading is one reading. Under the lock of usageReadings, but for usage and err, which do not change after done.
type usageReading struct {
	callers int       // that wait for it
	began   time.Time // zero = not yet
	done    chan struct{}
	usage   []core.Usage
	err     error
}

func newUsageReadings() *usageReadings { return &usageReadings{asked: make(chan struct{}, 1)} }

// Usage reads the live numbers. It fails with core.ErrNoDriver while no session is open and with the
// context's error when the driver does not answer in time.
//
// Callers share a reading: one gets the reading that is under way when it asks, or that began less than usageFresh
// (half a second) ago; else a new one begins for it, after a health check that is due. So a number was read, as
// core.Usage.At tells, after the call or before it by at most half a second or the time that the reading took, whichever is
// longer. The slice is shared, too, and must not be changed.
func (m *Monitor) Usage(ctx context.Context) ([]core.Usage, error) {
	r := m.usage.join()
	select {
	case <-r.done:
		return r.usage, r.err
	case <-ctx.Done():
		m.usage.leave(r)
		return nil, ctx.Err()
	}
}

// join returns the reading that answers a caller who asks now.
func (u *usageReadings) join() *usageReading {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.next == nil && u.last != nil && time.Since(u.last.began) < usageFresh {
		return u.last
	}
	if u.next == nil {
		u.next = &usageReading{done: make(chan struct{})}
		select {
		case u.asked <- struct{}{}:
		default:
		}
	}
	u.next.callers++
	return u.next
}

// leave takes back what join asked for. A reading that has not begun and that no caller waits for is not wanted any more.
func (u *usageReadings) leave(r *usageReading) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if r.callers--; r == u.next && r.callers == 0 && r.began.IsZero() {
		u.next = nil
	}
}

// wanted reports whether a caller waits for a reading that has not begun.
func (u *usageReadings) wanted() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.next != nil && u.next.began.IsZero()
}

// begin notes that a reading has begun, which answers those who ask from now on.
func (u *usageReadings) begin() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.next == nil { // the last caller has left since wanted was asked
		u.next = &usageReading{done: make(chan struct{})}
	}
	u.next.began = time.Now()
}

// finish answers all that wait.
func (u *usageReadings) finish(usage []core.Usage, err error) {
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
