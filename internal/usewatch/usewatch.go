// Package usewatch reads at an interval what the devices do and which work has them, and publishes it as a use.Table. Readers of the
// table (metrics, status page, report) call neither the driver nor an orchestrator.
package usewatch

import (
	"context"
	"iter"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/watch"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Monitor is what a Watcher needs of a *monitor.Monitor.
type Monitor interface {
	State() core.State
	Usage(context.Context) ([]gpu.Usage, error)
	Watchdog() *watchdog.Registry
}

// Holders reads which work an orchestrator gave devices. complete means that no holder is missing. It returns when ctx ends.
type Holders func(ctx context.Context) (holds []use.Hold, complete bool, err error)

// Options configure a Watcher.
type Options struct {
	Mode         inventory.OccupancyMode
	Orchestrator string  // use.Kubernetes, use.Nomad
	Holders      Holders // nil = the orchestrator's record is not read
	ProcRoot     string  // procfs of the host; "" = /proc
	MappingDir   string  // folder of the job files that dcgm-exporter reads; "" = none
	Log          *slog.Logger
}

// interval is the time between two readings. Owners are to be shown within 5 s.
const interval = 3 * time.Second

// Watcher publishes the table. Make one with New. Its methods are safe for concurrent use.
type Watcher struct {
	opts  Options
	table *watch.Value[use.Table]
}

// New returns a watcher. Run starts it.
func New(o Options) *Watcher { return &Watcher{opts: o, table: watch.NewValue(use.Table{})} }

// Table returns the latest table.
func (w *Watcher) Table() use.Table { return w.table.Load() }

// Watch yields the present table and then each newer one until ctx ends.
func (w *Watcher) Watch(ctx context.Context) iter.Seq[use.Table] { return w.table.Watch(ctx) }

// Run reads until ctx ends.
func (w *Watcher) Run(ctx context.Context, m Monitor) {
	if w.opts.Mode == inventory.OccupancyOff {
		return
	}
	for {
		w.read(ctx, m)
		if !watch.Sleep(ctx, interval) {
			return
		}
	}
}

func (w *Watcher) read(ctx context.Context, m Monitor) {
	limit, cancel := context.WithTimeout(ctx, interval)
	defer cancel()
	usage, err := m.Usage(limit)
	t := use.Table{At: time.Now()}
	if err != nil {
		t.Problems = append(t.Problems, "usage: "+err.Error())
	}
	for u := range m.State().Inventory.Devices() {
		d := use.Device{ID: u.Device.ID}
		for _, one := range usage {
			if one.Device == d.ID {
				d.Usage = one
			}
		}
		t.Devices = append(t.Devices, d)
	}
	w.table.Store(t)
}
