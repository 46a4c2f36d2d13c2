package hostwatch

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/watch"
)

// watchDaemons checks the MPS control daemons as long as a pool needs one.
func (w *Watcher) watchDaemons(ctx context.Context, m Monitor) {
	logged := map[string]string{} // error by pool, "" = answers
	w.poll(ctx, m, "MPS daemons", func() (again bool) {
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
		return len(pools) > 0
	})
}

// watchClaims claims what is offered and reads what others claim.
func (w *Watcher) watchClaims(ctx context.Context, m Monitor) {
	defer w.claims.close()
	var duplicate, unread grace
	stopped := map[string]grace{}                                   // by agent
	w.update(m, func(h *inventory.Host) { h.SharesNumbers = true }) // until the first poll
	w.poll(ctx, m, "claims", func() (again bool) {
		v, err := w.claim(ctx, m)
		if ctx.Err() != nil {
			return false
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
			return true
		}
		unread.over(false)
		var long []otherAgent
		for _, o := range v.others {
			g := stopped[o.agent]
			if g.over(!o.running && o.devices > 0) {
				long = append(long, o)
			}
			stopped[o.agent] = g
		}
		w.setStopped(long)
		w.update(m, func(h *inventory.Host) { h.Claims, h.Numbering, h.SharesNumbers = v.claims, v.numbering, err == nil })
		return true
	})
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

// poll calls check immediately, then whenever another inventory is published, and every second as long as check returns true,
// until ctx ends.
func (w *Watcher) poll(ctx context.Context, m Monitor, name string, check func() (again bool)) {
	task := m.Watchdog().Register(name)
	defer task.Done()
	var following sync.WaitGroup
	defer following.Wait()
	changed := make(chan struct{}, 1)
	following.Go(func() {
		for range m.Watch(ctx) {
			watch.Notify(changed)
		}
	})
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	task.Heartbeat(lockAtMost)
	again := check()
	w.polled.Done()
	for {
		due, within := tick.C, pollEvery
		if !again {
			due, within = nil, 0
		}
		task.Heartbeat(within)
		select {
		case <-due:
		case <-changed:
		case <-ctx.Done():
			return
		}
		task.Heartbeat(lockAtMost)
		again = check()
	}
}
