package limits

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
)

// support is on which GPUs a limit was tried since the driver was opened.
type support struct {
	opened   string // which opening of the driver that was
	ended    bool   // what tries before have left was ended since
	tried    map[gpu.DeviceID]try
	enableAt time.Time // of the latest attempt to enable a controller that failed
	listed   time.Time // when the record of the orchestrator had all work
}

// try is whether a limit could be set on a GPU: why not, "" = it could.
type try struct {
	why string
	at  time.Time
}

// retryProbe is after a limit that could not be tried, or set.
const retryProbe = 30 * time.Second

// probe tries a limit on the GPUs that have shares with one, once for each opening of the driver: a reset, a reload and another driver are followed by one.
func (l *Limiter) probe(ctx context.Context, n seen) {
	s := &l.support
	if opened := fmt.Sprint(n.state.Incarnation, " ", n.state.Snapshot.Driver.Version, " ", n.node.Backend); s.opened != opened {
		s.opened, s.ended, s.tried = opened, false, nil
	}
	if n.node.Unsupported != "" || n.node.CannotSet != "" {
		return
	}
	next := map[gpu.DeviceID]try{}
	for u := range n.inv.Devices() {
		id := u.Device.ID
		if u.Memory == 0 {
			continue
		}
		one, tried := s.tried[id]
		if !tried || one.why != "" && time.Since(one.at) >= retryProbe {
			one = try{l.try(ctx, n, id), time.Now()}
		}
		next[id] = one
	}
	s.tried = next
}

// try returns why no limit can be set on a GPU; "" if one can.
func (l *Limiter) try(ctx context.Context, n seen, id gpu.DeviceID) string {
	p, is := l.opts.Setter.(Prober)
	if !is {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, driverAtMost)
	defer cancel()
	err := l.endTries(ctx, n)
	if err == nil {
		err = p.TryLimit(ctx, id, n.node.Backend)
	}
	if err != nil {
		return "a try failed: " + err.Error() // the cause of a pool has room for little more
	}
	return ""
}

// endTries ends what an agent that was killed has left, on all GPUs: a try on one of them removes the group.
func (l *Limiter) endTries(ctx context.Context, n seen) error {
	e, is := l.opts.Setter.(TryEnder)
	if !is || l.support.ended {
		return nil
	}
	var ids []gpu.DeviceID
	for _, d := range n.state.Snapshot.Devices {
		if d.At == gpu.WholeGPU(d.ID) {
			ids = append(ids, d.ID)
		}
	}
	err := e.EndTries(ctx, ids)
	l.support.ended = err == nil
	return err
}

// failed has a GPU take no work whose limit is required, because one could not be set on it, until another try. That of a group that has ended, or that uses more
// already, is that group's alone.
func (s *support) failed(id gpu.DeviceID, err error) {
	for _, ofGroup := range []error{fs.ErrNotExist, gpu.ErrLimitNoGroup, gpu.ErrLimitInvalid, gpu.ErrNoDriver} {
		if errors.Is(err, ofGroup) {
			return
		}
	}
	if _, tried := s.tried[id]; tried {
		s.tried[id] = try{"a limit could not be set: " + err.Error(), time.Now()}
	}
}

// why is limit.Support.Tried.
func (s *support) why() map[gpu.DeviceID]string {
	all := map[gpu.DeviceID]string{}
	for id, one := range s.tried {
		all[id] = one.why
	}
	return all
}

// again is when a GPU is to be tried again, or a controller to be enabled.
func (s *support) again(n seen) time.Duration {
	again := reconcile.Never
	for _, one := range s.tried {
		if one.why != "" {
			again = earlier(again, max(retryProbe-time.Since(one.at), 0))
		}
	}
	if n.limits && !s.enableAt.IsZero() {
		again = earlier(again, retryFailed)
	}
	return again
}

// unlistedAtMost is for how long the record of the orchestrator may be missing, as while Nomad starts, before shares whose limit is required take no more work.
const unlistedAtMost = 30 * time.Second

// unlisted is why it can't be known which task of Nomad has which share, with the remedy; "" if it can. What a setting or the rights of a token are the cause of
// counts at once.
func (l *Limiter) unlisted(ctx context.Context, n seen) string {
	if l.opts.Orchestrator != holders.Nomad || !n.limits {
		return ""
	}
	now := time.Now()
	r, err := l.record(ctx, n.inv)
	switch why := "the allocations are not read: "; {
	case err == nil && r.Complete:
		l.support.listed = now
		return ""
	case err == nil && r.Never && r.Remedy != "":
		return why + r.Remedy + ": " + r.Missing // the cause of a pool has room for little more than the remedy
	case err == nil && !r.Never && r.Missing != "":
		return why + r.Missing
	case now.Sub(l.support.listed) < unlistedAtMost:
		return ""
	case err != nil:
		return why + err.Error()
	default:
		return why + r.Missing
	}
}

// parents are cgroup.NomadParents, which need the backend's controller for their children: Nomad enables neither misc nor dmem
// (client/lib/cgroupslib/init.go), and writes the list anew at each start.
func (l *Limiter) parents(n seen) (all []limit.Parent) {
	if l.opts.Orchestrator != holders.Nomad || !n.limits || n.node.Unsupported != "" {
		return nil
	}
	for _, p := range cgroup.NomadParents() {
		on, err := l.opts.Groups.Enables(p, n.node.Backend.Controller())
		if err == nil {
			all = append(all, limit.Parent{Path: p, On: on})
		}
	}
	return all
}

// enable enables the backend's controller for the children of groups.
func (l *Limiter) enable(n seen, groups []string) {
	l.support.enableAt = time.Time{}
	for _, p := range groups {
		err := l.opts.Groups.Enable(p, n.node.Backend.Controller())
		if err == nil {
			l.opts.Log.Info("controller of control groups enabled", "controller", n.node.Backend.Controller(), "below", p)
			continue
		}
		l.support.enableAt = time.Now()
		l.problems.Put(problem.Problem{
			Code: problem.LimitController, Object: p, Text: fmt.Sprintf("the controller %s can't be enabled below %s: %s", n.node.Backend.Controller(), p, err),
			Remedy: "let the agent write " + l.opts.Groups.Path(p) + "/cgroup.subtree_control",
		}, slog.LevelWarn, "controller of control groups not enabled", "below", p, "error", err)
		return // those below it can't have it, either
	}
	for _, one := range l.problems.List() {
		if one.Code == problem.LimitController {
			l.problems.End(one.Code, one.Object, "controller of control groups enabled again", "below", one.Object)
		}
	}
}

// controllerOff is the group below which the groups of new tasks have no controller; "" = they have.
func (l *Limiter) controllerOff(b limit.Backend) string {
	if l.opts.Orchestrator != holders.Nomad || b == limit.NoBackend {
		return ""
	}
	for _, p := range cgroup.NomadSlices {
		on, err := l.opts.Groups.Enables(p, b.Controller())
		switch {
		case errors.Is(err, fs.ErrNotExist) && p != cgroup.NomadSlices[0]:
		case err != nil || !on:
			return p
		}
	}
	return ""
}

// Local sets limits by the driver of this process, which has the rights for it.
type Local struct {
	Groups cgroup.FS
	Driver Driver
}

// SetMemoryLimit implements Setter.
func (l Local) SetMemoryLimit(ctx context.Context, group cgroup.ID, change gpu.LimitChange) error {
	g, err := l.Groups.Read(group.Path)
	if err != nil {
		return err
	}
	if g.ID != group {
		return fmt.Errorf("the control group %s is another one by now: %w", group.Path, fs.ErrNotExist)
	}
	return l.Driver.SetMemoryLimit(ctx, change)
}

// TryLimit implements Prober.
func (l Local) TryLimit(ctx context.Context, id gpu.DeviceID, b limit.Backend) error {
	set, get := l.calls(ctx)
	return Try(l.Groups, localTry, b, id, set, get)
}

// EndTries implements TryEnder. The next try has the group, and removes it.
func (l Local) EndTries(ctx context.Context, ids []gpu.DeviceID) error {
	if !LeftTry(l.Groups, localTry) {
		return nil
	}
	set, get := l.calls(ctx)
	return endLimits(l.Groups, localTry, ids, set, get)
}

func (l Local) calls(ctx context.Context) (Set, Get) {
	return func(c gpu.LimitChange) error { return l.Driver.SetMemoryLimit(ctx, c) },
		func(q []gpu.LimitQuery) ([]gpu.LimitAnswer, error) { return l.Driver.MemoryLimits(ctx, q) }
}
