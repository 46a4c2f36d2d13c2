package nodelabels

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Intervals and limits, which are not configurable.
const (
	checkEvery = time.Minute // between looks at the file without an event: another program may have changed it
	retryFirst = time.Second // before another attempt, after a failure
	retryMost  = time.Minute
	passAtMost = 30 * time.Second       // for an attempt, before the watchdog reports it
	stopAtMost = 500 * time.Millisecond // for an attempt to end with the agent
	maxSize    = 64 << 10               // NFD reads no larger file
)

// Monitor has the state that a Writer follows. *monitor.Monitor is one.
type Monitor interface {
	State() core.State
	Changed() <-chan struct{} // closed when there is a newer inventory
	Watchdog() *watchdog.Registry
}

// Options configure a Writer.
type Options struct {
	Path string // of the features file; its folder must exist; "" = nothing is written
	Sys  string // sysfs, as this process sees it; "" = "/sys"
	MIG  inventory.MIGStrategy
	Log  *slog.Logger // required
}

// Writer keeps a features file in step with the devices. Make one with New, then call Run once. The other methods are safe for
// concurrent use.
type Writer struct {
	opts     Options
	changed  chan struct{} // capacity 1
	last     Labels        // that the file has; of the goroutine of a pass
	problems problemset.Set

	mu       sync.Mutex
	strategy inventory.MIGStrategy
}

// New returns a writer. It reads and writes nothing.
func New(o Options) *Writer {
	return &Writer{opts: o, strategy: o.MIG, changed: make(chan struct{}, 1), problems: problemset.Set{Log: o.Log}}
}

// SetStrategy sets the MIG strategy after a change of the configuration.
func (w *Writer) SetStrategy(s inventory.MIGStrategy) {
	w.mu.Lock()
	w.strategy = s
	w.mu.Unlock()
	watch.Notify(w.changed)
}

// Problems has the reason for which the file could not be written, if it could not.
func (w *Writer) Problems() []problem.Problem { return w.problems.List() }

// Run keeps the file in step until ctx ends; a failure is a warning and is tried again. The file stays when the agent ends, so that the
// node keeps its labels while an agent is replaced. If a disk hangs, the goroutine that waits for it is abandoned.
func (w *Writer) Run(ctx context.Context, m Monitor) {
	if w.opts.Path == "" {
		return
	}
	task := m.Watchdog().Register("node labels")
	defer task.Done()
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = retryFirst, retryMost
	statefile.RemoveTemporary(w.opts.Path) // that a killed agent left
	failed := false
	reconcile.Loop{
		On: []reconcile.Source{m.Changed, reconcile.Signal(w.changed)}, Task: task, Limit: passAtMost,
	}.Run(ctx, func(ctx context.Context, cause reconcile.Cause) time.Duration {
		done, look := make(chan error, 1), failed || cause != reconcile.Change
		go func() { done <- w.pass(m.State(), look) }()
		var err error
		select {
		case err = <-done:
		case <-ctx.Done():
			select {
			case err = <-done:
			case <-time.After(stopAtMost):
				return reconcile.Never
			}
		}
		w.setProblem(err)
		if failed = err != nil; failed {
			return retry.NextBackOff()
		}
		retry.Reset()
		return checkEvery
	})
}

// pass writes the file if the labels have changed or, with look, if it has another content. While the driver can't be called, or not all
// is known of the devices yet, the file stays as it is. A node without a driver, or without GPUs, has no file.
func (w *Writer) pass(s core.State, look bool) error {
	driver := s.Snapshot.Driver.State
	none := len(s.Snapshot.Devices) == 0
	switch {
	case none && (driver == gpu.DriverReady && len(s.Snapshot.Excluded) == 0 || driver == gpu.DriverAbsent):
		w.last = nil
		if present, err := w.present(); present == nil || err != nil {
			return err
		}
		if err := os.Remove(w.opts.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return w.failure("removed", err)
		}
		return nil
	case none || driver != gpu.DriverReady || s.Allocatable.Provisional():
		return nil
	}
	w.mu.Lock()
	strategy := w.strategy
	w.mu.Unlock()
	labels := Of(s, strategy, ReadHost(w.opts.Sys, s.Snapshot.Devices))
	if !look && maps.Equal(labels, w.last) {
		return nil
	}
	present, err := w.present()
	if err != nil {
		return err
	}
	if maps.Equal(present, labels) {
		w.last = labels
		return nil
	}
	if err := statefile.Replace(w.opts.Path, labels.Text(time.Now()), 0o644); err != nil {
		return w.failure("written", err)
	}
	w.opts.Log.Info("node labels written", "file", w.opts.Path, "labels", len(labels))
	w.last = labels
	return nil
}

// present are the labels that the file has; nil = there is no file. One with other lines is not the agent's to replace or remove, nor is what
// is no regular file: an error.
func (w *Writer) present() (Labels, error) {
	text, err := statefile.Read(w.opts.Path, maxSize, statefile.SharedDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case statefile.IsContent(err), errors.Is(err, syscall.ELOOP), err == nil && !areLabels(text):
		return nil, fmt.Errorf("%s exists and is no file of node labels: it is neither replaced nor removed", w.opts.Path)
	case err != nil:
		return nil, w.failure("read", err)
	}
	return parse(text), nil
}

// failure is the same text for each attempt: the name of a temporary file is left out.
func (w *Writer) failure(action string, err error) error {
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		err = number
	}
	return fmt.Errorf("%s can't be %s: %w", w.opts.Path, action, err)
}

// setProblem sets why the file can't be written; nil = it can.
func (w *Writer) setProblem(err error) {
	if err == nil {
		w.problems.End(problem.NodeLabels, w.opts.Path, "node labels: the features file can be written again")
		return
	}
	text := "node labels: " + err.Error() + "; --features-file needs a file of its own in a folder that exists and can be written: features.d of Node Feature Discovery"
	w.problems.Put(problem.Problem{Code: problem.NodeLabels, Object: w.opts.Path, Text: text}, slog.LevelWarn, text)
}
