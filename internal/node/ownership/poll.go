package ownership

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// watchAgents records what this agent offers and reads what others do: at once, when another inventory is published or a file has changed, and
// in time.
func (w *Watcher) watchAgents(ctx context.Context, m Monitor) {
	defer w.store.close()
	defer w.stopRelease()
	slow := w.ifSlow(m)
	w.beforeFirst(m)
	slow.Stop()
	task := m.Watchdog().Register("devices of agents")
	defer task.Done()
	var watching sync.WaitGroup
	defer watching.Wait()
	atLast := w.timings.alone + w.timings.poll // watchFiles reports before, also without an event
	g := graces{stopped: map[string]grace{}}
	reconcile.Loop{
		On: []reconcile.Source{m.Changed, reconcile.Signal(w.changed)}, Task: task, Limit: lockAtMost,
	}.Run(ctx, func(ctx context.Context, cause reconcile.Cause) time.Duration {
		next := w.check(ctx, m, &g)
		if cause == reconcile.Start {
			close(w.first)
			watching.Go(func() { w.watchFiles(ctx, func() { watch.Notify(w.changed) }) }) // reports at once what was made or removed during the pass
		}
		return cmp.Or(next, atLast)
	})
}

// graces are what one check leaves for the next one.
type graces struct {
	duplicate, unread grace
	stopped           map[string]grace // by agent
}

// check records what this agent offers and reads what others do, once. It returns the time until the next check; 0 = when a file changes.
func (w *Watcher) check(ctx context.Context, m Monitor, g *graces) (next time.Duration) {
	slow := w.ifSlow(m)
	v, err := w.record(ctx, m)
	slow.Stop()
	if ctx.Err() != nil {
		return 0
	}
	isDuplicate := errors.Is(err, errDuplicateAgent)
	_, notWritten := errors.AsType[writeError](err)
	if read := err == nil || notWritten || isDuplicate; read {
		g.unread.over(false)
		var long []otherAgent
		long, next = w.stoppedFor(g.stopped, v.others)
		w.setStopped(long)
		w.apply(m, v, err)
	} else {
		// New devices wait for their numbers if the failure can be short.
		over := g.unread.over(true)
		w.update(m, func(h *inventory.Host) {
			h.SharesNumbers = (tooManyFiles(err) || errors.Is(err, context.DeadlineExceeded)) && !over
		})
		w.setUnread(ctx, m, err)
	}
	if over := g.duplicate.over(isDuplicate); !isDuplicate || over {
		w.setProblem(err)
	}
	switch {
	case err != nil: // there is no event when a process of the same agent unlocks its file, or when the disk works again
		return w.timings.poll
	case v.ownershipError != nil || v.numbersWait || w.decider.moving():
		return movePause
	}
	if soon := w.untilNext(v.kept); soon > 0 {
		return min(soon, cmp.Or(next, soon))
	}
	return next
}

// ifSlow sets what holds while the disk does not respond, unless it is stopped before.
func (w *Watcher) ifSlow(m Monitor) *time.Timer {
	return time.AfterFunc(lockAtMost+firstAtMost, func() { w.setSlow(m) })
}

// apply sets what a view of the files means. err is why they are not written.
func (w *Watcher) apply(m Monitor, v view, err error) {
	w.setFaults(v.faults)
	if v.alone { // no other agent waits for them
		w.setKept(nil)
	} else {
		w.setKept(v.kept)
	}
	w.setOwnershipProblem(v.ownershipError)
	w.latest.Store(&v)
	w.limitRelease(m, v.ownership.DriverReleased)
	w.update(m, func(h *inventory.Host) {
		h.Peers, h.Recorded, h.Numbering, h.SharesNumbers = v.overlaps, v.own, v.numbering, err == nil
		h.Ownership = v.ownership
	})
}

// limitRelease has the driver opened in some minutes, whatever a disk that hangs does, unless it is released by the file again.
func (w *Watcher) limitRelease(m Monitor, id gpu.DeviceID) {
	w.stopRelease()
	if id != "" {
		w.openDriver = time.AfterFunc(releasedAtMost, func() {
			w.log.Warn("driver opened although it is released for a reset: the disk of the state directory does not respond", "id", id)
			w.update(m, func(h *inventory.Host) { h.Ownership.DriverReleased = "" })
		})
	}
}

func (w *Watcher) stopRelease() {
	if w.openDriver != nil {
		w.openDriver.Stop()
		w.openDriver = nil
	}
}

// errSlow is why the files are not known while a check of them takes long.
var errSlow = errors.New("the disk of the state directory does not respond")

// beforeFirst sets what holds until the files are read for the first time.
func (w *Watcher) beforeFirst(m Monitor) {
	var owners inventory.Ownership
	if w.decider != nil {
		owners = w.decider.unread(w.refuse)
	}
	own, _ := w.store.ownUnread(nil)
	own.Pending = own.Reason != ""
	w.update(m, func(h *inventory.Host) { h.SharesNumbers, h.Ownership, h.Recorded = true, owners, own })
}

// setUnread sets what holds while the files can't be read: what was read last, or what this agent has recorded before. One that was alone is
// not held up, unless another agent may have recorded something since: a file of it is there, or another process has the lock.
func (w *Watcher) setUnread(ctx context.Context, m Monitor, why error) {
	latest := w.latest.Load()
	if latest != nil && !latest.alone {
		w.update(m, func(h *inventory.Host) { h.Recorded.Pending = false })
		return
	}
	own := w.store.ownAlone(ctx, why)
	if latest != nil && own.Reason != "" {
		own = latest.own
	}
	own.Pending = false
	w.update(m, func(h *inventory.Host) { h.Recorded = own })
}

// setSlow sets what holds while the disk does not respond: what was read last.
func (w *Watcher) setSlow(m Monitor) {
	latest := w.latest.Load()
	w.update(m, func(h *inventory.Host) {
		if latest != nil {
			h.Recorded = latest.own
		}
		h.Recorded.Pending = false
	})
	w.setProblem(errSlow)
}

// stoppedFor returns the agents that offer devices of this agent, too, and have not run for long, and the time until the next check whether
// other agents run, as there is no event when one ends and its lock with it; 0 = there are none.
func (w *Watcher) stoppedFor(stopped map[string]grace, others []otherAgent) (long []otherAgent, next time.Duration) {
	if len(others) > 0 {
		next = w.timings.others
	}
	for _, o := range others {
		g := stopped[o.agent]
		missed := !o.running && o.devices > 0
		if g.over(missed) {
			long = append(long, o)
		} else if missed {
			next = min(next, g.left())
		}
		stopped[o.agent] = g
	}
	return long, next
}

// watchFiles calls changed after the file of an agent, this one included, or the lock of a running agent may have changed, until
// ctx ends. It does so at most every eventPause: agents that react to each other must not occupy a core and the disk.
func (w *Watcher) watchFiles(ctx context.Context, changed func()) {
	var last time.Time
	dirwatch.Directory{
		Path: w.store.folder, Interval: w.timings.alone, PollInterval: w.timings.poll, Relevant: func(name string) bool { _, ok := agentOf(name); return ok },
		Log: w.log.With("directory", w.store.folder), NewWatcher: w.newWatcher,
	}.Watch(ctx, func() {
		if pause := eventPause - time.Since(last); pause > 0 {
			watch.Sleep(ctx, pause)
		}
		last = time.Now()
		changed()
	})
}

// record updates the files. It retries for a while if the process, or the node, has too many files open: an agent that has just
// started would use a history that is older than its file.
func (w *Watcher) record(ctx context.Context, m Monitor) (view, error) {
	for began := time.Now(); ; {
		v, err := w.store.update(ctx, localDevicesOf(m.State()))
		if !tooManyFiles(err) || time.Since(began) > lockAtMost/2 || !watch.Sleep(ctx, retryPause) {
			return v, err
		}
	}
}

// tooManyFiles reports whether an error is that this process, or the node, has too many files open.
func tooManyFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// retryPause is the pause between two tries while a table of open files is full.
const retryPause = 50 * time.Millisecond

// grace is the time since when a condition has held that is normal while an agent is restarted; zero = it does not hold.
type grace struct{ since time.Time }

// over reports whether the condition has held for longer than restartAtMost.
func (g *grace) over(holds bool) bool {
	switch {
	case !holds:
		g.since = time.Time{}
		return false
	case g.since.IsZero():
		g.since = time.Now()
	}
	return time.Since(g.since) > restartAtMost
}

// left is the time until over reports true, if the condition still holds then.
func (g grace) left() time.Duration { return restartAtMost - time.Since(g.since) + time.Millisecond }
