package nodelabels

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
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
	Path        string // of the features file; its folder must exist; "" = none is written
	Sys         string // sysfs, as this process sees it; "" = "/sys"
	MIG         inventory.MIGStrategy
	NoTimestamp bool         // without the label with the time of the change
	Log         *slog.Logger // required

	// API writes a NodeFeature object beside the file; nil = none is written.
	API       FeatureAPI
	Node      string // name of the Node object
	Namespace string // of the object
	Pod       string // of the agent, which with its DaemonSet owns the object; "" = it has no owner
}

// Writer keeps a features file and a NodeFeature object in step with the devices. Make one with New, then call Run once. The other methods are
// safe for concurrent use.
type Writer struct {
	opts     Options
	changed  chan struct{} // capacity 1
	targets  []target
	last     Labels // that all targets have; nil = not known; of the goroutine of a pass
	problems problemset.Set

	mu       sync.Mutex
	strategy inventory.MIGStrategy
}

// target is where labels go.
type target interface {
	name() string   // what it is
	place() string  // where it is
	remedy() string // of a failure
	// put writes labels if what is there has others, and reports whether it did. Without labels nothing is left there.
	put(ctx context.Context, l Labels) (written bool, err error)
}

// New returns a writer. It reads and writes nothing.
func New(o Options) *Writer {
	w := &Writer{opts: o, strategy: o.MIG, changed: make(chan struct{}, 1), problems: problemset.Set{Log: o.Log}}
	if o.Path != "" {
		w.targets = append(w.targets, &file{path: o.Path, timestamp: !o.NoTimestamp})
	}
	if o.API != nil {
		w.targets = append(w.targets, &feature{opts: o})
	}
	return w
}

// SetStrategy sets the MIG strategy after a change of the configuration.
func (w *Writer) SetStrategy(s inventory.MIGStrategy) {
	w.mu.Lock()
	w.strategy = s
	w.mu.Unlock()
	watch.Notify(w.changed)
}

// Problems has the reason for which the labels could not be written, if they could not.
func (w *Writer) Problems() []problem.Problem { return w.problems.List() }

// WriteOnce writes the labels of a state, and returns why they can't be written.
func (w *Writer) WriteOnce(ctx context.Context, s core.State) error {
	ctx, cancel := context.WithTimeout(ctx, passAtMost)
	defer cancel()
	return errors.Join(w.pass(ctx, s, true)...)
}

// Run keeps the labels in step until ctx ends; a failure is a warning and is tried again. They stay when the agent ends, so that the
// node keeps its labels while an agent is replaced. If a disk hangs, the goroutine that waits for it is abandoned.
func (w *Writer) Run(ctx context.Context, m Monitor) {
	if len(w.targets) == 0 {
		return
	}
	task := m.Watchdog().Register("node labels")
	defer task.Done()
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = retryFirst, retryMost
	if w.opts.Path != "" {
		statefile.RemoveTemporary(w.opts.Path) // that a killed agent left
	}
	failed := false
	reconcile.Loop{
		On: []reconcile.Source{m.Changed, reconcile.Signal(w.changed)}, Task: task, Limit: passAtMost,
	}.Run(ctx, func(ctx context.Context, cause reconcile.Cause) time.Duration {
		done, look := make(chan []error, 1), failed || cause != reconcile.Change
		go func() { done <- w.pass(ctx, m.State(), look) }()
		var errs []error
		select {
		case errs = <-done:
		case <-ctx.Done():
			select {
			case errs = <-done:
			case <-time.After(stopAtMost):
				return reconcile.Never
			}
		}
		if ctx.Err() != nil {
			return reconcile.Never
		}
		failed = false
		for i, t := range w.targets {
			var err error
			if i < len(errs) {
				err = errs[i]
			}
			w.setProblem(t, err)
			failed = failed || err != nil
		}
		if failed {
			return retry.NextBackOff()
		}
		retry.Reset()
		return checkEvery
	})
}

// pass writes the labels to each target if they have changed or, with look, if a target has others, and returns the failures by target. While the
// driver can't be called, or not all is known of the devices yet, they stay as they are.
func (w *Writer) pass(ctx context.Context, s core.State, look bool) []error {
	labels, known := w.labels(s)
	if !known || !look && w.last != nil && maps.Equal(labels, w.last) {
		return nil
	}
	w.last = nil
	errs := make([]error, len(w.targets))
	for i, t := range w.targets {
		written, err := t.put(ctx, labels)
		if errs[i] = err; written {
			w.opts.Log.Info("node labels written", t.name(), t.place(), "labels", len(labels))
		}
	}
	if errors.Join(errs...) == nil {
		w.last = labels
	}
	return errs
}

// labels are those of a state, and whether they are known. A node without a driver, or without GPUs, has those of the node alone.
func (w *Writer) labels(s core.State) (Labels, bool) {
	driver := s.Snapshot.Driver.State
	none := len(s.Snapshot.Devices) == 0
	switch {
	case none && (driver == gpu.DriverReady && len(s.Snapshot.Excluded) == 0 || driver == gpu.DriverAbsent):
		l := Labels{}
		l.addVGPU(ReadVGPU(w.opts.Sys))
		return l, true
	case none || driver != gpu.DriverReady || s.Allocatable.Provisional():
		return nil, false
	}
	w.mu.Lock()
	strategy := w.strategy
	w.mu.Unlock()
	return Of(s, strategy, ReadHost(w.opts.Sys, s.Snapshot.Devices)), true
}

// setProblem sets why labels can't be written to a target; nil = they can.
func (w *Writer) setProblem(t target, err error) {
	if err == nil {
		w.problems.End(problem.NodeLabels, t.place(), "node labels: the "+t.name()+" can be written again")
		return
	}
	text := "node labels: " + err.Error()
	p := problem.Problem{Code: problem.NodeLabels, Object: t.place(), Text: text, Remedy: t.remedy()}
	w.problems.Put(p, slog.LevelWarn, p.String())
}
