package nvidia

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/watch"
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
	all, errs := queryAll(s, []target{t}, func(_ int, c *caller) T { return f(c) })
	return all[0], errs[0]
}

// queryAll is query for several GPUs; i is the position in targets. One goroutine queries the GPUs one after the other. When
// it made no progress for a fraction of the deadline (staggerDivisor), another one continues with the next GPU, so all GPUs
// that hang cost one deadline together:
//
//	GPU 0  [..]         hang     hang     deadline of all
//	GPU 1      [....................................]
//	GPU 2           [...............................]
//	GPU 3                    [..]
//
// The driver may serve GPUs one after the other, for example when it initialises them. So the deadline starts again
// whenever a GPU has answered: a GPU is not given up while those before it still make progress.
func queryAll[T any](s *Session, targets []target, f func(i int, c *caller) T) ([]T, []error) {
	r := &round{done: make(chan struct{})}
	pending, queue := make([]*pendingQuery[T], len(targets)), make(chan *pendingQuery[T], len(targets))
	for i, t := range targets {
		pending[i] = newQuery[T](s, t, r)
		if pending[i].got == nil {
			pending[i].f = func(c *caller) T { return f(i, c) }
			queue <- pending[i]
		}
	}
	close(queue)
	r.unfinished.Store(int64(len(queue)))
	for len(queue) > 0 { // each time with one goroutine more
		go runQueries(queue)
		for left := -1; left != len(queue) && len(queue) > 0; { // until there was no progress
			left = len(queue)
			watch.Await(context.Background(), r.done, s.deadline/staggerDivisor)
		}
	}
	all, errs := make([]T, len(targets)), make([]error, len(targets))
	for i, p := range pending {
		all[i], errs[i] = p.wait(s.deadline)
	}
	return all, errs
}

// round is what the queries of one queryAll share.
type round struct {
	unfinished atomic.Int64
	done       chan struct{}             // closed when no query is unfinished
	last       atomic.Pointer[time.Time] // when a query ended last; nil = none has
}

// finish records the end of a query whose result is awaited.
func (r *round) finish() {
	now := time.Now()
	r.last.Store(&now)
	if r.unfinished.Add(-1) == 0 {
		close(r.done)
	}
}

// lastAfter is the later of the last end of a query and t.
func (r *round) lastAfter(t time.Time) time.Time {
	if last := r.last.Load(); last != nil && last.After(t) {
		return *last
	}
	return t
}

// pendingQuery is a query that waits or is in progress, or one that could not begin.
type pendingQuery[T any] struct {
	worker *gpuWorker
	at     gpu.Placement
	f      func(*caller) T
	round  *round
	made   time.Time
	result chan queryResult[T] // receives one result, unless the query was abandoned
	got    *queryResult[T]
}

type queryResult[T any] struct {
	v   T
	err error
}

func newQuery[T any](s *Session, t target, r *round) *pendingQuery[T] {
	p := &pendingQuery[T]{worker: t.worker, at: t.at, round: r, made: time.Now(), result: make(chan queryResult[T], 1)}
	if err := s.acquire(t); err != nil {
		p.got = &queryResult[T]{err: err}
	}
	return p
}

// runQueries runs the queries in the queue. It may find none:
//
//	queryAll      no progress, one query is left: go runQueries ............... none left: ends
//	runQueries    GPU 0 answers ........................... takes the last query
func runQueries[T any](queue <-chan *pendingQuery[T]) {
	for p := range queue {
		c := &caller{slot: &p.worker.callSlot, at: p.at}
		v := p.f(c)
		if p.worker.release() {
			p.result <- queryResult[T]{v, c.err}
			p.round.finish()
		}
	}
}

// wait waits for the result until the deadline, and abandons the query then.
func (p *pendingQuery[T]) wait(deadline time.Duration) (T, error) {
	for p.got == nil {
		select {
		case r := <-p.result:
			p.got = &r
			continue
		default:
		}
		left, err := p.worker.remaining(p.round.lastAfter(p.made), deadline)
		if err != nil {
			p.got = &queryResult[T]{err: err}
			break
		}
		p.waitFor(left)
	}
	return p.got.v, p.got.err
}

// waitFor waits for the result for at most d.
func (p *pendingQuery[T]) waitFor(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case r := <-p.result:
		p.got = &r
	case <-t.C:
	}
}
