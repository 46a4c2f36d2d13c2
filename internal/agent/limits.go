package agent

import (
	"cmp"
	"context"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// newLimiter returns what reads limits of device memory, and sets those of the policy. Under Nomad this process has the rights for it: it is root's.
func (a *Agent) newLimiter() *limits.Limiter {
	groups := cgroup.FS{Mount: cmp.Or(a.opts.Core.Roots.Cgroup, cgroup.DefaultMount)}
	o := limits.Options{
		Groups: groups, Orchestrator: a.opts.Use.Orchestrator, Setter: a.opts.LimitSetter,
		Boot:    func() (string, time.Time) { boot := a.sources.boot(); return boot.ID, boot.Time },
		Load:    func() string { return nvidia.DriverFingerprint(a.opts.Core.Roots) },
		Holders: a.adapter.Holders, Lookup: a.adapter.Lookup, Use: a.Use, WakeUse: a.WakeUse,
		On: []reconcile.Source{a.Changed, a.use.Changed}, Log: a.opts.Log,
	}
	if o.Orchestrator == holders.Nomad && o.Setter == nil {
		o.Setter = limits.Local{Groups: groups, Driver: a.Monitor}
	}
	if dir := a.opts.Health.StateDir; dir != "" {
		o.File = filepath.Join(dir, a.opts.Name+".limits.json")
	}
	return limits.New(o)
}

// limit reads and sets limits until ctx ends.
func (a *Agent) limit(ctx context.Context) {
	if a.opts.Adapter == nil { // it is no agent of an orchestrator: see Shadow
		return
	}
	if a.opts.Recorded != nil {
		<-a.opts.Recorded
	}
	a.limiter.Run(ctx, a.Monitor)
}

// LimitPod limits the memory of a pod: see limits.Limiter. It may be called once the agent is made.
func (a *Agent) LimitPod(ctx context.Context, pod holders.Work, id gpu.DeviceID, bytes uint64) error {
	return a.limiter.LimitPod(ctx, pod, id, bytes)
}

// ReleasePod ends what a claim has of a pod's limits.
func (a *Agent) ReleasePod(ctx context.Context, pod holders.Work) error {
	return a.limiter.ReleasePod(ctx, pod)
}

// Limits is the latest table of the limits of device memory.
func (a *Agent) Limits() limit.Table { return a.limiter.Table() }
