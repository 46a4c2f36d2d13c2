package nvidia

import (
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// maxQueryDeadlines bounds a query all of whose calls return in time, in units of the session's deadline.
const maxQueryDeadlines = 5

// staggerDivisor is the session's deadline divided by how long queryAll waits for one GPU before it queries the
// next one too: 50 ms of 2 s. As long as each GPU answers within that, the GPUs are queried one after the other.
const staggerDivisor = 40

// target is a GPU to query: the worker that makes the calls, the NVML index as far as it is known, and the
// placement that the calls are about.
type target struct {
	worker *gpuWorker
	index  int
	at     gpu.Placement
}

// targetOf is the target of a known GPU.
func (s *Session) targetOf(d gpu.Device) target {
	return target{s.worker(d.At.GPU), d.Index, gpu.WholeGPU(d.At.GPU)}
}

// targetsOf are the targets of known GPUs, in their order.
func (s *Session) targetsOf(gpus []knownGPU) []target {
	targets := make([]target, len(gpus))
	for i, g := range gpus {
		targets[i] = s.targetOf(g.device)
	}
	return targets
}

// query runs f on the worker of a GPU and returns its result and the caller's error. The error is a hungError if
// a call does not return within the session's deadline, and immediately if an earlier call about the GPU has not
// returned; the result of f is dropped then. f runs concurrently with the session: it must only read what never
// changes, and return what it finds.
func query[T any](s *Session, t target, f func(*caller) T) (T, error) {
	return startQuery(s, t, new(lastAnswer), f).wait(s.deadline)
}

// queryAll is query for several GPUs; i is the position in targets. A GPU that does not answer within a fraction of
// the deadline (staggerDivisor) is left running while the next one is queried, so all GPUs that hang cost one
// deadline together:
//
//	GPU 0  [..]         hang     hang     deadline of all
//	GPU 1      [....................................]
//	GPU 2           [...............................]
//	GPU 3                    [..]
//
// The driver may serve GPUs one after the other, for example when it initialises them. So the deadline starts again
// whenever a GPU has answered: a GPU is not given up while those before it still make progress.
func queryAll[T any](s *Session, targets []target, f func(i int, c *caller) T) ([]T, []error) {
	all, errs := make([]T, len(targets)), make([]error, len(targets))
	pending := make([]*pendingQuery[T], len(targets))
	var last lastAnswer
	for i, t := range targets {
		pending[i] = startQuery(s, t, &last, func(c *caller) T { return f(i, c) })
		pending[i].waitFor(s.deadline / staggerDivisor)
	}
	for i, p := range pending {
		all[i], errs[i] = p.wait(s.deadline)
	}
	return all, errs
}

// lastAnswer is when one of several queries last ended; the zero value is never.
type lastAnswer struct{ at atomic.Pointer[time.Time] }

func (a *lastAnswer) record() {
	now := time.Now()
	a.at.Store(&now)
}

// after is the later of the last answer and t.
func (a *lastAnswer) after(t time.Time) time.Time {
	if at := a.at.Load(); at != nil && at.After(t) {
		return *at
	}
	return t
}

// pendingQuery is a query in progress, or one that could not begin.
type pendingQuery[T any] struct {
	worker *gpuWorker
	began  time.Time
	last   *lastAnswer
	result chan queryResult[T] // receives one result, unless the query was abandoned
	got    *queryResult[T]
}

type queryResult[T any] struct {
	v   T
	err error
}

func startQuery[T any](s *Session, t target, last *lastAnswer, f func(*caller) T) *pendingQuery[T] {
	w := t.worker
	p := &pendingQuery[T]{worker: w, began: time.Now(), last: last, result: make(chan queryResult[T], 1)}
	if err := s.acquire(t); err != nil {
		p.got = &queryResult[T]{err: err}
		return p
	}
	go func() {
		c := &caller{slot: &w.callSlot, at: t.at}
		r := queryResult[T]{v: f(c)}
		r.err = c.err
		if w.release() {
			last.record()
			p.result <- r
		}
	}()
	return p
}

// waitFor waits for the result for at most d.
func (p *pendingQuery[T]) waitFor(d time.Duration) {
	if p.got != nil {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case r := <-p.result:
		p.got = &r
	case <-t.C:
	}
}

// wait waits for the result until the deadline, and abandons the query then.
func (p *pendingQuery[T]) wait(deadline time.Duration) (T, error) {
	for p.got == nil {
		left, err := p.worker.remaining(p.last.after(p.began), deadline)
		if err != nil {
			p.got = &queryResult[T]{err: err}
			break
		}
		p.waitFor(left)
	}
	return p.got.v, p.got.err
}
