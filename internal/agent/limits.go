package agent

import (
	"cmp"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/limits"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// newLimiter returns what reads limits of device memory, and sets those of the policy.
func (a *Agent) newLimiter() *limits.Limiter {
	o := limits.Options{
		Groups: cgroup.FS{Mount: cmp.Or(a.opts.Core.Roots.Cgroup, cgroup.DefaultMount)}, Orchestrator: a.opts.Use.Orchestrator, Policy: a.opts.Core.Policy.Limits,
		Setter: a.opts.LimitSetter, On: []reconcile.Source{a.Changed, a.use.Changed}, Log: a.opts.Log,
	}
	if dir := a.opts.Health.StateDir; dir != "" {
		o.File = filepath.Join(dir, a.opts.Name+".limits.json")
	}
	return limits.New(o)
}

// Limiter is what limits the pods of resource claims.
func (a *Agent) Limiter() *limits.Limiter { return a.limiter }

// Limits is the latest table of the limits of device memory.
func (a *Agent) Limits() limit.Table { return a.limiter.Table() }
