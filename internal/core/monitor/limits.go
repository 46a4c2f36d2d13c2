package monitor

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// MemoryLimiter is a Session that reads and sets limits of device memory. They belong to the reader.
type MemoryLimiter interface {
	// LimitsUnsupported is why the driver has no limits at all; "" if it may have them. It makes no driver call.
	LimitsUnsupported() string

	// MemoryLimits returns an answer for each query, in their order. A GPU that does not answer delays no other. An error is one of the whole driver.
	MemoryLimits([]gpu.LimitQuery) ([]gpu.LimitAnswer, error)

	// SetMemoryLimit sets a limit; it does not read it back.
	SetMemoryLimit(gpu.LimitChange) error
}

// LimitsUnsupported is why the driver has no limits of device memory at all; "" if it may have them. known is false until the driver was read, and while no
// session is open. It waits for nothing.
func (m *Monitor) LimitsUnsupported() (reason string, known bool) {
	if why := m.limits.unsupported.Load(); why != nil {
		return *why, true
	}
	return "", false
}

// MemoryLimits reads limits of device memory, in the order of the queries. It fails with gpu.ErrNoDriver while no session is open, and with the context's error
// when the driver does not answer in time.
func (m *Monitor) MemoryLimits(ctx context.Context, queries []gpu.LimitQuery) ([]gpu.LimitAnswer, error) {
	queries = slices.Clone(queries) // the caller may have left when the call is made
	var answers []gpu.LimitAnswer
	err := m.limits.do(ctx, func(s MemoryLimiter) (err error) { answers, err = s.MemoryLimits(queries); return err })
	if err != nil {
		return nil, err // not answers: the reader may still write it
	}
	return answers, nil
}

// SetMemoryLimit sets a limit of device memory. Errors are as for MemoryLimits, and those of gpu: gpu.ErrLimitNotPermitted and so on. If ctx ends before the call
// has begun, the limit is not set; if it ends later, or the driver does not answer, the limit may be set.
func (m *Monitor) SetMemoryLimit(ctx context.Context, change gpu.LimitChange) error {
	return m.limits.do(ctx, func(s MemoryLimiter) error { return s.SetMemoryLimit(change) })
}

// limitCalls are the calls about limits that wait for the reader, in the order in which they were asked for. A caller whose context ends takes its call along,
// unless that has begun: nothing accumulates while the driver hangs.
type limitCalls struct {
	requested   chan struct{}          // capacity 1: a call waits
	unsupported atomic.Pointer[string] // of LimitsUnsupported

	mu      sync.Mutex
	queue   []*limitCall
	current *limitCall // that a reader makes; nil = none
}

// limitCall is one call for one caller.
type limitCall struct {
	call func(MemoryLimiter) error
	done chan struct{}
	err  error // after done
}

func newLimitCalls() *limitCalls { return &limitCalls{requested: make(chan struct{}, 1)} }

// do has the reader make a call and waits for it.
func (l *limitCalls) do(ctx context.Context, call func(MemoryLimiter) error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	c := &limitCall{call: call, done: make(chan struct{})}
	l.mu.Lock()
	l.queue = append(l.queue, c)
	l.mu.Unlock()
	watch.Notify(l.requested)
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = slices.DeleteFunc(l.queue, func(waiting *limitCall) bool { return waiting == c })
	return ctx.Err()
}

// waiting reports whether a call waits for the reader.
func (l *limitCalls) waiting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue) > 0
}

// makeNext makes the call that has waited longest. A reader calls it.
func (l *limitCalls) makeNext(s Session) {
	c := l.begin()
	if c == nil { // the last caller has left since waiting was called
		return
	}
	err := fmt.Errorf("%w by this session", gpu.ErrLimitsUnsupported)
	if limiter, ok := s.(MemoryLimiter); ok {
		err = c.call(limiter)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current == c { // else the session has ended meanwhile, and so has the wait of the caller
		l.current = nil
		c.finish(err)
	}
}

func (l *limitCalls) begin() *limitCall {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return nil
	}
	l.current, l.queue = l.queue[0], l.queue[1:]
	return l.current
}

func (c *limitCall) finish(err error) {
	c.err = err
	close(c.done)
}

// end answers all callers while no session is open, also the one whose call has not returned.
func (l *limitCalls) end() {
	l.unsupported.Store(nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current != nil {
		l.queue = append(l.queue, l.current)
	}
	for _, c := range l.queue {
		c.finish(gpu.ErrNoDriver)
	}
	l.queue, l.current = nil, nil
}

// limitsUnsupported is LimitsUnsupported of a session. The reader calls it.
func limitsUnsupported(s Session) string {
	if limiter, ok := s.(MemoryLimiter); ok {
		return limiter.LimitsUnsupported()
	}
	return gpu.ErrLimitsUnsupported.Error() + " by this session"
}
