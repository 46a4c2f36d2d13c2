package ownership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// releaseAtMost is for how long an agent that ends waits for its taken GPUs to be given back. Without that the next process gives them back.
const releaseAtMost = 1200 * time.Millisecond

// Errors of Take.
var (
	ErrCannotTake = errors.New("this agent has no state_dir, or reads no record of running work: it takes no GPU for itself")
	ErrTaken      = errors.New("this process has taken the GPU, or waits for it")
	ErrEnding     = errors.New("the agent ends")
)

// NotFreeError means that a GPU was not taken before the end of the caller's context.
type NotFreeError struct {
	GPU   gpu.DeviceID
	Waits string // "the end of pod default/train"; "" = only for time
	Err   error  // of the context
}

// Error names the GPU and what it waits for.
func (e *NotFreeError) Error() string {
	if e.Waits == "" {
		return fmt.Sprintf("GPU %s was not free for long enough: %v", e.GPU, e.Err)
	}
	return fmt.Sprintf("GPU %s was not free, it waits for %s: %v", e.GPU, e.Waits, e.Err)
}

// Unwrap returns the error of the context.
func (e *NotFreeError) Unwrap() error { return e.Err }

// Taken is a GPU that this process wants, or has, for a purpose of its own.
type Taken struct {
	id      gpu.DeviceID
	granted chan struct{} // closed when it has the GPU
	back    chan struct{} // closed when that is wanted back
	release func() Take   // returns what was decided last
	driver  func(released bool)

	want Want // guarded by decider.mu
	is   Take // likewise
}

// Take takes a GPU that this agent offers, with all its instances, away from every API: no work has had it for the settle time (30 s), by
// complete records, and none got it when it was taken. For a reset no other agent of the node has one for that. Whether processes use it the caller finds
// out. It waits until ctx ends, and fails then with *NotFreeError, and at once with ErrCannotTake, ErrTaken or ErrEnding. The caller calls Release.
func (w *Watcher) Take(ctx context.Context, id gpu.DeviceID, p inventory.Purpose) (*Taken, error) {
	if w.decider == nil || len(w.decider.readers) == 0 {
		return nil, ErrCannotTake
	}
	t, err := w.decider.want(id, p, func() { watch.Notify(w.changed) })
	if err != nil {
		return nil, err
	}
	select {
	case <-t.granted:
		return t, nil
	case <-t.back:
		t.release()
		return nil, ErrEnding
	case <-ctx.Done():
		return nil, &NotFreeError{GPU: id, Waits: t.release().Waits, Err: ctx.Err()}
	}
}

// WantedBack is closed when the caller must end what it does with the GPU within some seconds, and call Release: an operator moves the GPU, a
// policy leaves it out, another agent offers it, work has it, the agent ends, or the driver is released or lost. A GPU that is taken for a reset is not wanted
// back because of the driver once that was released for it.
func (t *Taken) WantedBack() <-chan struct{} { return t.back }

// Release gives the GPU back to its API, which offers it within a second or two. Nothing may use it any more, and what was found out about it is
// recorded before (Monitor.ProofFailed): else it would be offered in between. A second call does nothing.
func (t *Taken) Release() { t.release() }

// ReleaseDriver has every agent of the node, this process among them, close the driver for the reset of this GPU, which was taken for that. It returns at
// once: Monitor.AwaitReleased waits for this process, and what the others still have open the caller finds out. It has no effect while the file of the node
// can't be written.
func (t *Taken) ReleaseDriver() { t.driver(true) }

// OpenDriver ends that. Release does, too, and so does the end of this process.
func (t *Taken) OpenDriver() { t.driver(false) }

// want records that this process wants a GPU. changed is called when it is to be decided about.
func (a *decider) want(id gpu.DeviceID, p inventory.Purpose, changed func()) (*Taken, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.ending:
		return nil, ErrEnding
	case a.takes[id] != nil:
		return nil, fmt.Errorf("GPU %s: %w", id, ErrTaken)
	}
	a.wants++
	t := &Taken{id: id, want: Want{Purpose: p, Number: a.wants}, granted: make(chan struct{}), back: make(chan struct{})}
	t.release = func() Take {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.takes[id] == t {
			delete(a.takes, id)
			changed()
		}
		return t.is
	}
	t.driver = func(released bool) {
		a.mu.Lock()
		defer a.mu.Unlock()
		if t.want.ReleaseDriver != released {
			t.want.ReleaseDriver = released
			changed()
		}
	}
	if a.takes == nil {
		a.takes = map[gpu.DeviceID]*Taken{}
	}
	a.takes[id] = t
	changed()
	return t, nil
}

// wanted are the GPUs that this process wants, or has, for itself; nil = none.
func (a *decider) wanted() map[gpu.DeviceID]Want {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.takes) == 0 {
		return nil
	}
	all := make(map[gpu.DeviceID]Want, len(a.takes))
	for id, t := range a.takes {
		all[id] = t.want
	}
	return all
}

// tell tells those that want GPUs what was decided. The file has it.
func (a *decider) tell(s State) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, t := range a.takes {
		was, is := t.is, s.takes[id]
		if is.Number != t.want.Number && is.Number != 0 { // of one that was released since
			continue
		}
		t.is = is
		if is.Granted && !was.Granted {
			a.log.Info("GPU taken from its API", "id", id, "for", t.want.Purpose)
			close(t.granted)
		}
		if is.Back != "" && was.Back == "" {
			a.log.Info("taken GPU is wanted back", "id", id, "for", t.want.Purpose, "waits_for", is.Back)
			t.wantBack()
		}
	}
}

// wantBack closes back. a.mu is locked.
func (t *Taken) wantBack() {
	select {
	case <-t.back:
	default:
		close(t.back)
	}
}

// untilReleased returns a context that ends after ctx, but not before taken GPUs are given back on disk, or releaseAtMost later.
func (a *decider) untilReleased(ctx context.Context) (context.Context, context.CancelFunc) {
	until, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		defer cancel()
		for began := time.Now(); a.end() && time.Since(began) < releaseAtMost; {
			watch.Sleep(until, 10*time.Millisecond)
		}
	})
	return until, func() { stop(); cancel() }
}

// end wants all taken GPUs back, and reports whether some are not given back on disk.
func (a *decider) end() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ending = true
	for _, t := range a.takes {
		t.wantBack()
	}
	return len(a.takes) > 0 || a.marked
}

// noteMarks notes whether the file has marks of this agent, and logs those that are removed. It wakes other agents and processes, which follow the
// folder, if the marks have changed.
func (a *decider) noteMarks(log *slog.Logger, was, is File) {
	marked, changed := false, false
	for id, m := range is.Taken {
		marked = marked || m.Agent == a.agent
		changed = changed || was.Taken[id] != m
	}
	for id, m := range was.Taken {
		if _, still := is.Taken[id]; !still {
			changed = true
			log.Info("GPU given back to its API", "id", id, "for", m.Purpose)
		}
	}
	if changed {
		now := time.Now()
		_ = os.Chtimes(filepath.Join(a.stateDir, FolderName), now, now) // those that get no event look within some seconds
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.marked = marked
}
