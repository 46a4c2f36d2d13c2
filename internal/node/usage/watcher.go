// Package usage reads at an interval what the devices do and which work has them, and publishes it as a use.Table. Readers of the
// table (metrics, status page, report) call neither the driver nor an orchestrator.
package usage

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Monitor is what a Watcher needs of a *monitor.Monitor.
type Monitor interface {
	State() core.State
	Usage(context.Context) ([]gpu.Usage, error)
	SetOccupied([]inventory.Occupied)
	Watchdog() *watchdog.Registry
}

// Holders reads what an orchestrator has recorded about its work with the devices of an inventory. It returns when ctx ends.
type Holders func(ctx context.Context, inv *inventory.Allocatable) (holders.Record, error)

// Options configure a Watcher.
type Options struct {
	Mode         inventory.OccupancyMode
	Orchestrator string                 // holders.Kubernetes, holders.Nomad
	Holders      Holders                // nil = the orchestrator's record is not read
	ProcRoot     string                 // procfs of the host; "" = /proc
	Running      func(gpu.Process) bool // whether a process has not ended; it must not block
	MappingDir   string                 // folder of the job files that dcgm-exporter reads; "" = none
	Log          *slog.Logger
}

const (
	// activeInterval is the time between two readings while a device is held or has processes, and for a while after Wake and Run.
	// Owners are to be shown within 5 s.
	activeInterval = 3 * time.Second
	activeFor      = 30 * time.Second

	// idleInterval is the time between two readings otherwise. A process that starts without a call of Wake is seen that late.
	idleInterval = 15 * time.Second

	// endingInterval is the time between two readings for a while after a process on a held device has ended: its work may end.
	endingInterval = time.Second
	endingFor      = 10 * time.Second

	// minInterval is the least time between two readings, and wakeDelay that from Wake to a reading: an orchestrator records what it gave
	// to work after the agent has granted it.
	minInterval = time.Second
	wakeDelay   = 500 * time.Millisecond

	usageTimeout  = 3 * time.Second // of the driver
	recordTimeout = 2 * time.Second // of the orchestrator
)

// Watcher publishes the table. Make one with New. Its methods are safe for concurrent use; Run is called once.
type Watcher struct {
	opts  Options
	table *watch.Value[use.Table]
	wake  chan struct{} // capacity 1

	// These belong to Run.
	origins     origins
	jobs        jobFiles
	activeUntil time.Time
	endingUntil time.Time
}

// New returns a watcher. Run starts it.
func New(o Options) *Watcher {
	return &Watcher{
		opts: o, table: watch.NewValue(use.Table{}), wake: make(chan struct{}, 1),
		origins: newOrigins(o), jobs: jobFiles{folder: o.MappingDir, orchestrator: o.Orchestrator, log: o.Log},
	}
}

// Table returns the latest table.
func (w *Watcher) Table() use.Table { return w.table.Load() }

// Watch yields the present table and then each newer one until ctx ends.
func (w *Watcher) Watch(ctx context.Context) iter.Seq[use.Table] { return w.table.Watch(ctx) }

// Changed is closed when there is a newer table.
func (w *Watcher) Changed() <-chan struct{} { return w.table.Changed() }

// Wake makes a reading follow soon: work got devices, or an orchestrator's record has changed. It never blocks.
func (w *Watcher) Wake() { watch.Notify(w.wake) }

// Run reads until ctx ends. With inventory.OccupancyOff it reads nothing.
func (w *Watcher) Run(ctx context.Context, m Monitor) {
	if w.opts.Mode == inventory.OccupancyOff {
		return
	}
	task := m.Watchdog().Register("use")
	defer task.Done()
	w.jobs.begin()
	defer w.jobs.end()
	w.activeUntil = time.Now().Add(activeFor)
	reconcile.Loop{On: []reconcile.Source{reconcile.Signal(w.wake)}, Task: task}.Run(ctx, func(ctx context.Context, cause reconcile.Cause) time.Duration {
		if cause == reconcile.Change {
			w.activeUntil = time.Now().Add(activeFor)
			watch.Sleep(ctx, wakeDelay)
		}
		task.Heartbeat(usageTimeout + recordTimeout)
		w.read(ctx, m)
		wait := w.interval()
		task.Heartbeat(wait)
		watch.Sleep(ctx, minInterval)
		return wait - minInterval
	})
}

// interval is the time to the next reading.
func (w *Watcher) interval() time.Duration {
	switch now := time.Now(); {
	case now.Before(w.endingUntil), now.Before(w.activeUntil) && len(w.table.Load().Devices) == 0: // the driver is not open yet
		return endingInterval
	case now.Before(w.activeUntil):
		return activeInterval
	}
	for _, d := range w.table.Load().Devices {
		if len(d.Holders) > 0 || len(d.Processes) > 0 {
			return activeInterval
		}
	}
	return idleInterval
}

// read makes and publishes the next table. The record is read after the processes, so that it has the work that started them.
func (w *Watcher) read(ctx context.Context, m Monitor) {
	in := use.Input{Orchestrator: w.opts.Orchestrator}
	limit, cancel := context.WithTimeout(ctx, usageTimeout)
	usage, err := m.Usage(limit)
	cancel()
	if in.Usage = usage; err != nil && !errors.Is(err, gpu.ErrNoDriver) {
		in.Problems = append(in.Problems, problem.Problem{Code: problem.Usage, Text: "usage: " + err.Error()})
	}
	was := w.table.Load()
	in.Origins = w.origins.read(usage, was)
	if w.opts.Holders != nil {
		limit, cancel := context.WithTimeout(ctx, recordTimeout)
		record, err := w.opts.Holders(limit, m.State().Allocatable)
		cancel()
		if err != nil {
			in.Problems = append(in.Problems, problem.Problem{Code: problem.Owners, Text: "owners: " + err.Error()})
		} else {
			in.Record = &record
		}
		if record.Missing != "" && !record.Never { // else it is so by the settings
			in.Problems = append(in.Problems, problem.Problem{Code: problem.Owners, Text: "owners: " + record.Missing})
		}
	}
	if ctx.Err() != nil {
		return // what was read is not complete
	}
	in.At, in.Allocatable = time.Now(), m.State().Allocatable
	t := was.Next(in)
	w.table.Store(t)
	if ending(was, t) {
		w.endingUntil = t.At.Add(endingFor)
	}
	if w.opts.Mode == inventory.OccupancyWithhold {
		m.SetOccupied(t.Occupied(in.Allocatable))
	}
	w.jobs.write(in.Allocatable, t)
}

// ending reports whether a device that is held has fewer processes than before.
func ending(was, is use.Table) bool {
	return slices.ContainsFunc(is.Devices, func(d use.Device) bool {
		before, _ := was.Device(d.ID)
		return len(d.Holders) > 0 && len(d.Processes) < len(before.Processes)
	})
}
