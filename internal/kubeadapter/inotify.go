package kubeadapter

import (
	"context"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// watch stores to changes after inotify events in the plugin directory, and regularly without events, until ctx ends. The
// directory may be missing, appear later or be replaced. Events may get lost, be missing on some file systems, or be
// unavailable, because the limits of inotify apply to the whole node. Then the interval is shorter, and inotify is tried
// again each time.
func (k *kubelet) watch(ctx context.Context, t timings, task *watchdog.Task) {
	defer task.Done()
	w, err := k.watchDir(nil)
	interval := k.pollInterval(t, t.pollInterval, err)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		task.Heartbeat(interval)
		var events chan fsnotify.Event
		var errs chan error
		if w != nil {
			events, errs = w.Events, w.Errors
		}
		changed := true
		select {
		case e := <-events: // the kubelet also writes its checkpoint here after each list
			changed = filepath.Ext(e.Name) == ".sock" || e.Name == k.dir
		case err := <-errs: // such as an overflow of the queue
			k.log.Debug("inotify error", "error", err)
		case <-tick.C:
		case <-ctx.Done():
			if w != nil {
				_ = w.Close()
			}
			return
		}
		w, err = k.watchDir(w) // first, so that each change after the check of the sockets is an event
		if next := k.pollInterval(t, interval, err); next != interval {
			interval, changed = next, true
			tick.Reset(interval)
		}
		if changed {
			k.changes.Store(struct{}{})
		}
	}
}

// watchDir adds the present plugin directory to a watcher, which it creates if w is nil. It returns w if that fails.
func (k *kubelet) watchDir(w *fsnotify.Watcher) (*fsnotify.Watcher, error) {
	if w == nil {
		var err error
		if w, err = k.newWatcher(); err != nil {
			return nil, err
		}
	}
	return w, w.Add(k.dir)
}

// pollInterval returns the time between checks; err is that of inotify. It logs a change.
func (k *kubelet) pollInterval(t timings, previous time.Duration, err error) time.Duration {
	switch {
	case err != nil && previous != t.pollIntervalNoEvents:
		k.log.Info("inotify unavailable, polling", "directory", k.dir, "interval", t.pollIntervalNoEvents, "error", err)
	case err == nil && previous != t.pollInterval:
		k.log.Info("inotify available again", "directory", k.dir)
	}
	if err != nil {
		return t.pollIntervalNoEvents
	}
	return t.pollInterval
}
