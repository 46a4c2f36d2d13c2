package hostwatch

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/dirwatch"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// watchDaemons checks the MPS control daemons as long as a pool needs one.
func (w *Watcher) watchDaemons(ctx context.Context, m Monitor) {
	logged := map[string]string{} // error by pool, "" = answers
	w.run(ctx, m, loop{name: "MPS daemons", check: func() (next time.Duration) {
		pools := w.daemons.pools(m.Current())
		var answering []string
		for _, pool := range pools {
			err, text := w.daemons.check(pool), ""
			if err == nil {
				answering = append(answering, pool)
			} else {
				text = oneLine(err)
			}
			if before, known := logged[pool]; known && before == text {
				continue
			}
			logged[pool] = text
			folder := MPSPipe(w.daemons.root, pool)
			if err == nil {
				w.log.Info("MPS control daemon answers", "pool", pool, "folder", folder)
			} else {
				w.log.Info("MPS control daemon does not answer", "pool", pool, "folder", folder, "error", text)
			}
		}
		w.update(m, func(h *inventory.Host) { h.MPS = answering })
		if len(pools) == 0 {
			return 0
		}
		return w.timings.poll
	}})
}

// watchClaims claims what is offered and reads what others claim.
func (w *Watcher) watchClaims(ctx context.Context, m Monitor) {
	defer w.claims.close()
	var duplicate, unread grace
	stopped := map[string]grace{} // by agent
	var before inventory.Assignments
	if w.assigner != nil {
		before = w.assigner.unread()
	}
	w.update(m, func(h *inventory.Host) { h.SharesNumbers, h.Assignments = true, before }) // until the first poll
	w.run(ctx, m, loop{name: "claims", watch: w.watchFiles, interval: w.timings.alone, check: func() (next time.Duration) {
		v, err := w.claim(ctx, m)
		if ctx.Err() != nil {
			return 0
		}
		isDuplicate := errors.Is(err, errDuplicateAgent)
		if over := duplicate.over(isDuplicate); !isDuplicate || over {
			w.setProblem(err)
		}
		_, notWritten := errors.AsType[writeError](err)
		if read := err == nil || notWritten || isDuplicate; !read {
			// The claims last read stay in force. New devices wait for their numbers if the failure can be short.
			over := unread.over(true)
			w.update(m, func(h *inventory.Host) {
				h.SharesNumbers = (tooManyFiles(err) || errors.Is(err, context.DeadlineExceeded)) && !over
			})
			return w.timings.poll
		}
		unread.over(false)
		long, next := w.stoppedFor(stopped, v.others)
		w.setStopped(long)
		w.setAssignmentsProblem(v.assignmentsError)
		w.update(m, func(h *inventory.Host) {
			h.Claims, h.Numbering, h.SharesNumbers = v.claims, v.numbering, err == nil
			h.Assignments = v.assignments
		})
		if v.assignmentsError != nil || moving(w.Assignments()) {
			next = movePause
		}
		if err != nil { // there is no event when a process of the same agent unlocks its file, or when the disk has room again
			next = w.timings.poll
		}
		return next
	}})
}

// stoppedFor returns the agents that claim devices offered here and have not run for long, and the time until the next check whether
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

// watchFiles calls changed after the claims of an agent, this one included, or the lock of a running agent may have changed, until
// ctx ends. It does so at most every eventPause: agents that react to each other must not occupy a core and the disk.
func (w *Watcher) watchFiles(ctx context.Context, changed func()) {
	var last time.Time
	dirwatch.Directory{
		Path: w.claims.folder, Interval: w.timings.alone, PollInterval: w.timings.poll, Relevant: isClaimsFile,
		Log: w.log.With("directory", w.claims.folder), NewWatcher: w.newWatcher,
	}.Watch(ctx, func() {
		if pause := eventPause - time.Since(last); pause > 0 {
			watch.Sleep(ctx, pause)
		}
		last = time.Now()
		changed()
	})
}

// isClaimsFile reports whether a file in the folder of the claims is that of an agent, and not a temporary one.
func isClaimsFile(name string) bool {
	agent, ok := strings.CutSuffix(name, ".json")
	if !ok {
		agent, ok = strings.CutSuffix(name, ".lock")
	}
	return ok && isAgentName(agent)
}

// claim updates the claims. It retries for a while if the process, or the host, has too many files open: an agent that has just
// started would use a history that is older than the claims.
func (w *Watcher) claim(ctx context.Context, m Monitor) (view, error) {
	for began := time.Now(); ; {
		v, err := w.claims.update(ctx, offerOf(m.Current()))
		if !tooManyFiles(err) || time.Since(began) > lockAtMost/2 || !watch.Sleep(ctx, retryPause) {
			return v, err
		}
	}
}

// tooManyFiles reports whether an error is that this process, or the host, has too many files open.
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

// loop is a check that is repeated.
type loop struct {
	name  string                      // of its watchdog task
	check func() (next time.Duration) // until the next check; 0 = until something changes

	watch    func(ctx context.Context, changed func()) // of what it depends on beside the inventory; nil = nothing
	interval time.Duration                             // in which watch calls changed at least once; 0 = perhaps never
}

// run runs a loop until ctx ends: it checks immediately, whenever another inventory is published or what is watched has changed,
// and when the time is over that the check before has returned.
func (w *Watcher) run(ctx context.Context, m Monitor, l loop) {
	task := m.Watchdog().Register(l.name)
	defer task.Done()
	task.Heartbeat(lockAtMost)
	next := l.check()
	w.polled.Done()

	changed := make(chan struct{}, 1)
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() {
		for range m.Watch(ctx) { // begins with the present one
			watch.Notify(changed)
		}
	})
	if l.watch != nil {
		watching.Go(func() { l.watch(ctx, func() { watch.Notify(changed) }) })
	}
	for {
		var due <-chan time.Time
		if next > 0 {
			due = time.After(next)
		}
		task.Heartbeat(cmp.Or(next, l.interval))
		select {
		case <-due:
		case <-changed:
		case <-ctx.Done():
			return
		}
		task.Heartbeat(lockAtMost)
		next = l.check()
	}
}
