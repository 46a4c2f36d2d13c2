package limits

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// publish publishes a table, and on which GPUs new work can be limited.
func (l *Limiter) publish(ctx context.Context, n seen, r limit.Result) {
	l.unread = time.Time{}
	l.problems.End(problem.LimitsUnknown, "", "limits of device memory are read again")
	l.logShares(l.latest, r.Table)
	l.latest = r.Table
	l.table.Store(r.Table)
	n.support.Waiting = r.Table.Waiting
	n.support.ControllerOff = l.controllerOff(n.node.Backend)
	n.support.Tried = l.support.why()
	n.support.Unlisted = l.unlisted(ctx, n)
	n.support.Given = r.Table.Given
	can := n.support.Limits(n.inv)
	l.monitor.SetLimits(can)
	if !n.support.Elsewhere { // which passes
		l.noteSupport(can)
	}
}

// unreadable publishes that nothing is known. A reading that fails now and then keeps no work from a GPU.
func (l *Limiter) unreadable(n seen, err error) {
	text := "limits of device memory can't be read: " + err.Error()
	l.problems.Put(problem.Problem{Code: problem.LimitsUnknown, Text: text}, slog.LevelWarn, text)
	l.publishUnread(text, n.limits)
	if n.limits && time.Since(l.unread) >= unreadAtMost {
		n.support.Unread = text
		l.monitor.SetLimits(n.support.Limits(n.inv))
	}
}

// publishUnread publishes that no limit is known, with the reason: a table without shares if nothing was read so far and the policy has limits, so that the problem is
// in metrics, too.
func (l *Limiter) publishUnread(why string, wanted bool) {
	now := time.Now()
	if l.unread.IsZero() {
		l.unread = now
	}
	if wanted || !l.latest.At.IsZero() {
		l.table.Store(l.latest.Unread(now, l.unread, why))
	}
}

// count publishes what was counted before a pass has a table. A share that is late is counted when it is in one.
func (l *Limiter) count(c limit.Counts) {
	c.Late = l.latest.Counts.Late
	l.latest.Counts = c
	t := l.Table()
	t.Counts = c
	l.table.Replace(t)
}

// noteSupport keeps a problem while the policy has limits that can't be set.
func (l *Limiter) noteSupport(can *inventory.Limits) {
	if can != nil {
		for _, id := range slices.Sorted(maps.Keys(can.Withheld)) {
			if why := can.Withheld[id]; why.Reason == health.ReasonNoLimit {
				text := "the policy has limits of device memory, and none can be set on " + string(id) + ": " + why.Detail
				l.problems.Put(problem.Problem{Code: problem.LimitUnsupported, Text: text, Remedy: "see docs/sharing.md for what limits need"}, slog.LevelWarn, text)
				return
			}
		}
	}
	l.problems.End(problem.LimitUnsupported, "", "limits of device memory can be set")
}

// logged is what the log has already.
type logged struct {
	failures map[target]string // changes that failed, by the latest error
	problems []problem.Problem // of tables
}

// target is a group on a GPU.
type target struct {
	group string
	inode uint64
	gpu   gpu.DeviceID
}

func targetOf(c limit.Change) target { return target{c.Path, c.Inode, c.GPU} }

// keep forgets failures of changes that are not to be made any more.
func (g *logged) keep(changes []limit.Change) {
	maps.DeleteFunc(g.failures, func(t target, _ string) bool {
		return !slices.ContainsFunc(changes, func(c limit.Change) bool { return targetOf(c) == t })
	})
}

// logChange logs a change that failed, once for each error.
func (l *Limiter) logChange(one limit.Done) {
	at := targetOf(one.Change)
	switch before, known := l.logged.failures[at]; {
	case one.Err == "":
		delete(l.logged.failures, at)
	case !known || before != one.Err:
		l.logged.failures[at] = one.Err
		l.opts.Log.Warn("limit of device memory not set", "group", one.Path, "gpu", one.GPU, "limit", mebibytes(one.Hard), "error", one.Err)
	}
}

// logProblems logs the problems of tables that are new by code and object.
func (l *Limiter) logProblems(all []problem.Problem) {
	for _, p := range all {
		if !slices.ContainsFunc(l.logged.problems, func(o problem.Problem) bool { return o.Code == p.Code && o.Object == p.Object }) {
			l.opts.Log.Warn(p.String(), "code", p.Code)
			l.logged.problems = append(l.logged.problems, p)
		}
	}
	l.logged.problems = slices.Clone(all)
}

// logShares logs the shares whose state has changed.
func (l *Limiter) logShares(was, is limit.Table) {
	for i := range is.Shares {
		s := &is.Shares[i]
		if before, known := was.Share(s.Work, s.GPU); known && before.State == s.State {
			continue
		}
		level := slog.LevelInfo
		if s.State != limit.Limited && s.State != limit.Unknown {
			level = slog.LevelWarn
		}
		l.opts.Log.Log(context.Background(), level, "limit of device memory", "work", s.Work.String(), "gpu", s.GPU, "state", s.State, "limit", mebibytes(s.Want), "reason", s.Reason)
	}
}

// mebibytes is a limit for the log: Nomad's has a number of bytes as 1.7179869184e+10.
func mebibytes(limit uint64) string {
	if limit == gpu.NoMemoryLimit {
		return "none"
	}
	return strconv.FormatUint(limit>>20, 10) + " MiB"
}
