// Package dirwatch reports changes of the files in a directory: by inotify events, and by polling where there are none.
package dirwatch

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Directory is a directory to watch. It may be missing, appear later or be replaced: then the new one is watched.
//
// Events may get lost, be missing on some file systems, or be unavailable, because the limits of inotify apply to all processes of
// a user on the node. So changes are also reported when there may be none: at Interval, and at PollInterval while events are
// unavailable. inotify is tried again each time.
type Directory struct {
	Path         string
	Interval     time.Duration // between reports without an event
	PollInterval time.Duration // the same while inotify is unavailable or the directory is missing

	// Relevant reports whether an event of a file in the directory counts, by the file's name without the path. There are
	// also events for writes and for changes of mode. Those of Path itself always count. nil = all count.
	Relevant func(name string) bool

	Log  *slog.Logger   // required; has the path
	Task *watchdog.Task // of the goroutine that calls Watch; nil = none

	// NewWatcher creates an inotify instance; nil = fsnotify.NewWatcher. It is for tests in which inotify is unavailable.
	NewWatcher func() (*fsnotify.Watcher, error)
}

// Watch calls changed immediately, after each event that counts and at the intervals, until ctx ends. It makes one call at a time,
// in its own goroutine, and none after one that ends ctx. A change after a call began is followed by another call.
func (d Directory) Watch(ctx context.Context, changed func()) {
	d.Path = filepath.Clean(d.Path) // as in events
	if d.NewWatcher == nil {
		d.NewWatcher = fsnotify.NewWatcher
	}
	w, err := d.add(nil)
	defer func() {
		if w != nil {
			_ = w.Close()
		}
	}()
	tick := time.NewTicker(d.interval(err))
	defer tick.Stop()
	if err != nil {
		d.logState(err)
	}
	for {
		d.Task.Heartbeat(d.interval(err))
		changed()
		if !d.await(ctx, w, tick.C) || ctx.Err() != nil { // both may be ready
			return
		}
		previous := err
		w, err = d.add(w) // before the call, so that each change after it began is an event
		if (err == nil) != (previous == nil) {
			d.logState(err)
			tick.Reset(d.interval(err))
		}
	}
}

// await waits for an event that counts or for the tick. It reports false if ctx ends.
func (d Directory) await(ctx context.Context, w *fsnotify.Watcher, tick <-chan time.Time) bool {
	var events chan fsnotify.Event
	var errs chan error
	if w != nil {
		events, errs = w.Events, w.Errors
	}
	for {
		select {
		case e := <-events:
			if e.Name == d.Path || d.Relevant == nil || d.Relevant(filepath.Base(e.Name)) {
				return true
			}
		case err := <-errs: // such as an overflow of the queue
			d.Log.Debug("inotify error", "error", err)
			return true
		case <-tick:
			return true
		case <-ctx.Done():
			return false
		}
	}
}

// add adds the directory that is now at the path to a watcher, which it creates if w is nil. It returns w if that fails.
func (d Directory) add(w *fsnotify.Watcher) (*fsnotify.Watcher, error) {
	if w == nil {
		var err error
		if w, err = d.NewWatcher(); err != nil {
			return nil, err
		}
	}
	return w, w.Add(d.Path)
}

// interval is the time between calls without an event; err is that of inotify.
func (d Directory) interval(err error) time.Duration {
	if err != nil {
		return d.PollInterval
	}
	return d.Interval
}

// logState logs whether there are events; err is that of inotify.
func (d Directory) logState(err error) {
	if err != nil {
		d.Log.Info("inotify unavailable, polling", "interval", d.PollInterval, "error", err)
		return
	}
	d.Log.Info("inotify available again")
}
