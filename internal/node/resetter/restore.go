package resetter

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// beginRestore has a goroutine restore what a reset has left: persistence modes, also of GPUs that are not listed so
// far, and programs that were stopped. mu is locked.
func (r *Resetter) beginRestore() {
	if r.ending || r.restore != nil || !r.anyLeft() {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.restore = cancel
	r.work.Go(func() {
		defer cancel()
		for {
			next := r.restoreAll(ctx)
			if next == 0 || !watch.Sleep(ctx, next) {
				return
			}
		}
	})
}

// isLeft reports whether the persistence mode of a GPU is to be restored: not while it is reset.
func isLeft(one reset.Record) bool { return one.Persistence && one.Running == nil }

func (r *Resetter) anyLeft() bool {
	return r.state.Watchers || slices.ContainsFunc(r.state.Records, isLeft)
}

// unrestored are the GPUs whose persistence mode is to be restored now. mu is locked.
func (r *Resetter) unrestored() (all []gpu.DeviceID) {
	if !r.opts.Policy.On() {
		r.review() // no pass does
	}
	for _, id := range r.Decision().Restore {
		if one, _ := r.state.Of(id); isLeft(one) {
			all = append(all, id)
		}
	}
	return all
}

// restoreAll tries once, and returns after what time it tries again; 0 = nothing is left.
func (r *Resetter) restoreAll(ctx context.Context) (next time.Duration) {
	r.mu.Lock()
	all := r.unrestored()
	r.mu.Unlock()
	next = restoreEvery
	if r.orphanRuns() {
		return busyEvery
	}
	r.resumeWatchers(ctx)
	if ctx.Err() != nil {
		return 0
	}
	for _, id := range all {
		err := r.opts.Resetter.Restore(ctx, id)
		if ctx.Err() != nil {
			return 0
		}
		if busy, ok := errors.AsType[*gpureset.BusyError](err); ok { // of the process before this one
			r.opts.Log.Debug("persistence mode is not restored yet", "id", id, "reason", busy)
			next = busyEvery
			continue
		}
		r.notePersistence(id, err)
		if err == nil {
			r.change(func(s reset.State) reset.State { return s.Restored(id) })
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.anyLeft() {
		r.restore = nil
		return 0
	}
	return next
}

// notePersistence keeps the problem of a persistence mode that is not as it was.
func (r *Resetter) notePersistence(id gpu.DeviceID, err error) {
	if err == nil {
		r.problems.End(problem.PersistenceMode, string(id), "the persistence mode of a GPU is as it was before its reset", "id", id)
		return
	}
	one := problem.Problem{
		Code: problem.PersistenceMode, Object: string(id), Text: "the persistence mode of " + string(id) + ", which was on before its reset, is off: " + err.Error(),
		Remedy: "run nvidia-smi -pm 1 -i " + string(id) + "; it is tried again each minute",
	}
	r.problems.Put(one, slog.LevelWarn, "the persistence mode of a GPU is not as it was before its reset", "id", id, "error", err)
}

// change makes a change of the state, and writes it.
func (r *Resetter) change(do func(reset.State) reset.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.set(do(r.state))
	_ = r.file.Store(r.state) // the file's problem has the error; the next pass tries again
}

// set makes a state the present one. mu is locked.
func (r *Resetter) set(s reset.State) {
	res := r.Decision()
	res.State, res.Begin = s, nil
	r.state = s
	r.shown.Store(&res)
}

// wake has another pass made.
func (r *Resetter) wake() { watch.Notify(r.changed) }

// since is how long something took.
func since(t time.Time) time.Duration { return time.Since(t).Round(time.Millisecond) }
