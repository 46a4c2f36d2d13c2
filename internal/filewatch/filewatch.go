// Package filewatch reports changes of a file, or of the files in a directory: by inotify events, and by polling where there are none.
package filewatch

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// File is a file or a directory to watch. It may be missing, appear later or be replaced: then the new one is watched.
//
// Events may get lost, be missing on some file systems, or be unavailable, because the limits of inotify apply to all processes of
// a user on the node. So changes are also reported when there may be none: at Interval, and at PollInterval while events are
// unavailable. inotify is tried again each time.
type File struct {
	Path         string
	Interval     time.Duration // between reports without an event
	PollInterval time.Duration // the same while inotify is unavailable or the file is missing

	// Relevant reports whether an event of a file in the directory counts, by the file's name without the directory. There are
	// also events for writes and for changes of mode. Those of Path itself always count. nil = all count.
	Relevant func(name string) bool

	Log  *slog.Logger   // required; has the path
	Task *watchdog.Task // of the goroutine that calls Watch; nil = none

	// NewWatcher creates an inotify instance; nil = fsnotify.NewWatcher. It is for tests in which inotify is unavailable.
	NewWatcher func() (*fsnotify.Watcher, error)
}

// Watch calls changed immediately, after each event that counts and at the intervals, until ctx ends. It makes one call at a time,
// in its own goroutine, and none after one that ends ctx. A change after a call began is followed by another call.
func (f File) Watch(ctx context.Context, changed func()) {
	f.Path = filepath.Clean(f.Path) // as in events
	if f.NewWatcher == nil {
		f.NewWatcher = fsnotify.NewWatcher
	}
	w, err := f.add(nil)
	defer func() {
		if w != nil {
			_ = w.Close()
		}
	}()
	tick := time.NewTicker(f.interval(err))
	defer tick.Stop()
	if err != nil {
		f.logState(err)
	}
	for {
		f.Task.Heartbeat(f.interval(err))
		changed()
		if !f.await(ctx, w, tick.C) || ctx.Err() != nil { // both may be ready
			return
		}
		previous := err
		w, err = f.add(w) // before the call, so that each change after it began is an event
		if (err == nil) != (previous == nil) {
			f.logState(err)
			tick.Reset(f.interval(err))
		}
	}
}

// await waits for an event that counts or for the tick. It reports false if ctx ends.
func (f File) await(ctx context.Context, w *fsnotify.Watcher, tick <-chan time.Time) bool {
	var events chan fsnotify.Event
	var errs chan error
	if w != nil {
		events, errs = w.Events, w.Errors
	}
	for {
		select {
		case e := <-events:
			if e.Name == f.Path || f.Relevant == nil || f.Relevant(filepath.Base(e.Name)) {
				return true
			}
		case err := <-errs: // such as an overflow of the queue
			f.Log.Debug("inotify error", "error", err)
			return true
		case <-tick:
			return true
		case <-ctx.Done():
			return false
		}
	}
}

// add adds the file that is now at the path to a watcher, which it creates if w is nil. It returns w if that fails.
func (f File) add(w *fsnotify.Watcher) (*fsnotify.Watcher, error) {
	if w == nil {
		var err error
		if w, err = f.NewWatcher(); err != nil {
			return nil, err
		}
	}
	return w, w.Add(f.Path)
}

// interval is the time between calls without an event; err is that of inotify.
func (f File) interval(err error) time.Duration {
	if err != nil {
		return f.PollInterval
	}
	return f.Interval
}

// logState logs whether there are events; err is that of inotify.
func (f File) logState(err error) {
	if err != nil {
		f.Log.Info("inotify unavailable, polling", "interval", f.PollInterval, "error", err)
		return
	}
	f.Log.Info("inotify available again")
}
