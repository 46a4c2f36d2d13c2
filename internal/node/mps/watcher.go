package mps

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	interval   = time.Second            // between checks, as a daemon causes no event
	checkLimit = 5 * time.Second        // of one check of all daemons, for the watchdog
	stopAtMost = 500 * time.Millisecond // for the check at the end; a disk can hang
)

// Monitor has the inventory whose daemons are checked. *monitor.Monitor is one.
type Monitor interface {
	State() core.State
	Changed() <-chan struct{} // closed when there is a newer inventory
	Watchdog() *watchdog.Registry
}

// Watcher checks the daemons of a node as long as a pool needs one. Make one with NewWatcher, then call Run once.
type Watcher struct {
	daemons Daemons
	log     *slog.Logger
	first   chan struct{}     // closed after the first check
	logged  map[string]string // error by pool, "" = answers
}

// NewWatcher returns a watcher of the daemons. It reads nothing yet.
func NewWatcher(d Daemons, log *slog.Logger) *Watcher {
	return &Watcher{daemons: d, log: log, first: make(chan struct{}), logged: map[string]string{}}
}

// First is closed after the first check of Run.
func (w *Watcher) First() <-chan struct{} { return w.first }

// Recorded reports whether mps-daemon has not ended the daemon of a pool.
func (w *Watcher) Recorded(pool string) bool { return w.daemons.Recorded(pool) }

// Run calls set with the pools whose daemons answer, after the first check and whenever they change, until ctx ends. It then returns within
// half a second even if a disk hangs; the hung goroutine is abandoned.
func (w *Watcher) Run(ctx context.Context, m Monitor, set func(answering []string)) {
	watch.RunUntil(ctx, stopAtMost, func() {
		task := m.Watchdog().Register("MPS daemons")
		defer task.Done()
		var answering []string
		reconcile.Loop{On: []reconcile.Source{m.Changed}, Task: task, Limit: checkLimit}.Run(ctx, func(_ context.Context, cause reconcile.Cause) time.Duration {
			pools := w.daemons.Pools(m.State().Inventory)
			now := w.check(pools)
			if !slices.Equal(now, answering) {
				answering = now
				set(answering)
			}
			if cause == reconcile.Start {
				close(w.first)
			}
			if len(pools) == 0 {
				return reconcile.Never
			}
			return interval
		})
	})
}

// check returns the pools whose daemons answer, and logs each change.
func (w *Watcher) check(pools []string) (answering []string) {
	for _, pool := range pools {
		err, text := w.daemons.Check(pool), ""
		if err == nil {
			answering = append(answering, pool)
		} else {
			text = err.Error()
		}
		if before, known := w.logged[pool]; known && before == text {
			continue
		}
		w.logged[pool] = text
		folder := w.daemons.Folder(pool)
		if err == nil {
			w.log.Info("MPS control daemon answers", "pool", pool, "folder", folder)
		} else {
			w.log.Info("MPS control daemon does not answer", "pool", pool, "folder", folder, "error", text)
		}
	}
	return answering
}
