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
)

// support is on which GPUs a limit was tried since the driver was opened.
type support struct {
	opened   string // which opening of the driver that was
	tried    map[gpu.DeviceID]string
	triedAt  map[gpu.DeviceID]time.Time
	enableAt time.Time // of the latest attempt to enable a controller that failed
}

// retryProbe is after a limit that could not be tried.
const retryProbe = 30 * time.Second

// probe tries a limit on the GPUs that have shares with one, once for each opening of the driver: a reset, a reload and another driver are followed by one.
func (l *Limiter) probe(ctx context.Context, n seen) {
	s := &l.support
	if opened := fmt.Sprint(n.state.Incarnation, " ", n.state.Snapshot.Driver.Version, " ", n.node); s.opened != opened {
		s.opened, s.tried, s.triedAt = opened, map[gpu.DeviceID]string{}, map[gpu.DeviceID]time.Time{}
	}
	if n.node.Unsupported != "" || n.node.CannotSet != "" {
		return
	}
	next := map[gpu.DeviceID]string{} // another map: the one before is published
	for u := range n.inv.Devices() {
		id := u.Device.ID
		if u.Memory == 0 {
			continue
		}
		why, tried := s.tried[id]
		if !tried || why != "" && time.Since(s.triedAt[id]) >= retryProbe {
			why = l.try(ctx, id, n.node.Backend)
			s.triedAt[id] = time.Now()
		}
		next[id] = why
	}
	s.tried = next
}

// try returns why no limit can be set on a GPU; "" if one can.
func (l *Limiter) try(ctx context.Context, id gpu.DeviceID, b limit.Backend) string {
	p, is := l.opts.Setter.(Prober)
	if !is {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, driverAtMost)
	defer cancel()
	if err := p.TryLimit(ctx, id, b); err != nil {
		return "a try failed: " + err.Error() // the cause of a pool has room for little more
	}
	return ""
}

// retries reports whether a GPU is to be tried again, or a controller to be enabled.
func (s *support) retries(n seen) bool {
	for _, why := range s.tried {
		if why != "" {
			return true
		}
	}
	return n.limits && !s.enableAt.IsZero()
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
	return Try(l.Groups, b, id,
		func(c gpu.LimitChange) error { return l.Driver.SetMemoryLimit(ctx, c) },
		func(q []gpu.LimitQuery) ([]gpu.LimitAnswer, error) { return l.Driver.MemoryLimits(ctx, q) })
}
