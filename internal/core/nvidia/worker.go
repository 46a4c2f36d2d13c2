package nvidia

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// gpuWorker makes the calls about one GPU, identified by UUID, as NVML indices change when a GPU is removed. It runs
// one query at a time, on a goroutine of queryAll. If a call does not return in time, the reader abandons the query and continues
// without this GPU, and no other query of it begins until the call has returned:
//
//	reader  query 2 .. result  query 3 .. deadline          query 4 .. result ... query 3: busy ..... query 3
//	GPU 3                      [call .......................................................] returns; no more calls
//
// So a GPU that hangs costs one goroutine and one deadline, and never has two calls in progress.
//
// A lookup worker is a gpuWorker of no GPU: it looks up which GPU is at an NVML index (see lookup.go).
type gpuWorker struct {
	callSlot
	running bool // a query is running; guarded by mu

	// These belong to the running query.
	profiles          migProfileCache
	slow              slowUsage
	usedByUnsupported bool // the call of readUsedBy; see there

	// These belong to the reader.
	record      healthRecord
	staticKnown bool // the static properties were read, and the GPU has answered since
	hadEvents   bool // the GPU was registered in an event set

	// These are set by the waiter and cleared by the reader.
	eventPending atomic.Bool // an event concerned the GPU
	rebound      atomic.Bool // the kernel driver was bound to the GPU again
}

func (s *Session) newWorker() *gpuWorker {
	return &gpuWorker{callSlot: callSlot{library: s.library, index: -1}}
}

// worker is the worker of a GPU. It belongs to the reader.
func (s *Session) worker(id gpu.DeviceID) *gpuWorker {
	w, ok := s.workers[id]
	if !ok {
		w = s.newWorker()
		s.mu.Lock()
		s.workers[id] = w
		s.mu.Unlock()
	}
	return w
}

// freeLookupWorkers are n lookup workers that run no query. It belongs to the reader.
func (s *Session) freeLookupWorkers(n int) []*gpuWorker {
	free := slices.DeleteFunc(slices.Clone(s.lookupWorkers), (*gpuWorker).isRunning)
	for len(free) < n {
		w := s.newWorker()
		free = append(free, w)
		s.mu.Lock()
		s.lookupWorkers = append(s.lookupWorkers, w)
		s.mu.Unlock()
	}
	return free[:n]
}

// dropWorkers removes the workers of GPUs that are not in the list, unless a call of theirs has not returned.
func (s *Session) dropWorkers(gpus []identity) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, w := range s.workers {
		if !w.isRunning() && !slices.ContainsFunc(gpus, func(i identity) bool { return i.id == id }) {
			delete(s.workers, id)
		}
	}
	s.adopted = slices.DeleteFunc(s.adopted, func(w *gpuWorker) bool { return !w.isRunning() })
}

// ownWorkers are the workers and lookup workers of the session; the caller holds mu.
func (s *Session) ownWorkers() []*gpuWorker {
	all := slices.Clone(s.lookupWorkers)
	for _, w := range s.workers {
		all = append(all, w)
	}
	return all
}

// hungWorkers are those of ownWorkers with an abandoned query.
func (s *Session) hungWorkers() []*gpuWorker {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(s.ownWorkers(), func(w *gpuWorker) bool { return !w.isHung() })
}

// queriedElsewhere is an error while a lookup worker, or a worker of an earlier session, makes a call about a GPU.
func (s *Session) queriedElsewhere(id gpu.DeviceID) error {
	for _, w := range slices.Concat(s.lookupWorkers, s.adopted) {
		if err := w.errorIfQuerying(id); err != nil {
			return err
		}
	}
	return nil
}

// acquire reserves the worker of a target for a query. It fails while a call about the GPU is in progress.
func (s *Session) acquire(t target) error {
	if t.at.GPU != "" {
		if err := s.queriedElsewhere(t.at.GPU); err != nil {
			return err
		}
	}
	w := t.worker
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running {
		return w.currentCallError()
	}
	w.running, w.index = true, t.index
	w.last = gpu.Call{At: t.at, Index: t.index}
	return nil
}

// release ends a query and reports whether its result is awaited.
func (w *gpuWorker) release() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	awaited := !w.abandoned
	w.running, w.abandoned = false, false
	return awaited
}

// remaining is how much longer to wait for the running query, counted from a time. When its current call exceeds the
// deadline, or all its calls exceed maxQueryDeadlines, the query is abandoned and the error is a hungError.
func (w *gpuWorker) remaining(from time.Time, deadline time.Duration) (time.Duration, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	left := min(deadline, maxQueryDeadlines*deadline-time.Since(from))
	if w.inProgress {
		if w.last.Since.After(from) {
			from = w.last.Since
		}
		left = min(left, deadline-time.Since(from))
	}
	if w.running && left <= 0 {
		w.abandoned = true
		return 0, w.currentCallError()
	}
	return max(left, time.Millisecond), nil
}

// hungError is an error while an abandoned query has not ended.
func (w *gpuWorker) hungError() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running && w.abandoned {
		return w.currentCallError()
	}
	return nil
}

func (w *gpuWorker) isHung() bool { return w.hungError() != nil }

func (w *gpuWorker) isRunning() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.running
}

// errorIfQuerying is an error while a query about a GPU is running.
func (w *gpuWorker) errorIfQuerying(id gpu.DeviceID) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running && w.last.At.GPU == id {
		return w.currentCallError()
	}
	return nil
}

// currentCallError names the latest call of the running query; the caller holds mu.
func (w *gpuWorker) currentCallError() error {
	return &hungError{Call: w.last.Name, At: w.last.At}
}

// Busy returns every driver call in progress except those of Wait, oldest first. It is safe for concurrent use.
func (s *Session) Busy() []gpu.Call {
	s.mu.Lock()
	slots := []*callSlot{&s.reader}
	for _, w := range append(s.ownWorkers(), s.adopted...) {
		slots = append(slots, &w.callSlot)
	}
	s.mu.Unlock()
	var calls []gpu.Call
	for _, l := range slots {
		if c, ok := l.current(); ok {
			calls = append(calls, c)
		}
	}
	slices.SortStableFunc(calls, func(a, b gpu.Call) int { return a.Since.Compare(b.Since) })
	return calls
}
