package limits

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// tasks are the groups of Nomad's tasks, and the allocations that were asked for because of them.
type tasks struct {
	known  map[cgroup.ID]bool // groups of which it is known whether their work is to be limited
	looked map[string]lookup  // by allocation
	behind time.Time          // since when passes end early for newer tasks; zero = the latest did not
}

// errNewTasks ends a pass early.
var errNewTasks = errors.New("there may be newer tasks")

// newer reports whether a pass is to end early, because a group may have been made whose limit is to be set first. It is not for longer than behindAtMost.
func (l *Limiter) newer() bool {
	if len(l.changed) == 0 {
		return false
	}
	if l.tasks.behind.IsZero() {
		l.tasks.behind = time.Now()
	}
	return time.Since(l.tasks.behind) < behindAtMost
}

const (
	behindAtMost = 2 * time.Second
	readAtOnce   = 16 // limits: some milliseconds
)

// lookup is an allocation that was asked for.
type lookup struct {
	record      holders.Record
	found       bool
	first, next time.Time // when it was asked for first, and when it is to be asked for again
	slow        bool      // it is asked for less often, or not any more
}

// An allocation whose group is there, and that the servers do not show, is asked for: often, because they show a new one within milliseconds, then at times. After
// that it is one that they have forgotten, or of another cluster, unless the orchestrator's record lists it later.
const (
	quickFor, quickly = 2 * time.Second, 50 * time.Millisecond
	slowlyFor, slowly = 30 * time.Second, 2 * time.Second
)

const (
	// watchEvery is between two looks at the folders without an event, and pollEvery while there are no events or no folder.
	watchEvery = time.Minute
	pollEvery  = time.Second
)

// with is a record with the allocations that were looked up, as far as it does not have them.
func (t *tasks) with(r holders.Record) holders.Record {
	r.Holders, r.Work, r.Tasks = slices.Clone(r.Holders), maps.Clone(r.Work), maps.Clone(r.Tasks)
	for _, id := range slices.Sorted(maps.Keys(t.looked)) {
		one := t.looked[id]
		if _, has := r.Work[id]; has || !one.found {
			continue
		}
		if r.Work == nil {
			r.Work = map[string]holders.Work{}
		}
		if r.Tasks == nil {
			r.Tasks = map[holders.Work]holders.Task{}
		}
		r.Holders = append(r.Holders, one.record.Holders...)
		maps.Copy(r.Work, one.record.Work)
		maps.Copy(r.Tasks, one.record.Tasks)
	}
	return r
}

// follow follows the folders of Nomad's tasks, if limits are set on their groups, and writes states. The function that it returns waits for the end, after that of ctx.
func (l *Limiter) follow(ctx context.Context, w *watchdog.Registry) (wait func()) {
	var running sync.WaitGroup
	running.Go(func() { l.saveBehind(ctx) })
	if l.opts.Orchestrator == holders.Nomad && l.opts.Setter != nil {
		for _, slice := range cgroup.NomadSlices {
			running.Go(func() {
				task := w.Register("control groups " + slice)
				defer task.Done()
				dirwatch.Directory{
					Path: l.opts.Groups.Path(slice), Interval: watchEvery, PollInterval: pollEvery, Log: l.opts.Log.With("folder", l.opts.Groups.Path(slice)), Task: task,
				}.Watch(ctx, func() { watch.Notify(l.changed) })
			})
		}
	}
	return running.Wait
}

// newTasks sets the limits of tasks whose groups were not there at the pass before, before all else: their first process comes within milliseconds. It reports
// when the allocation of one that is not known so far is to be asked for.
func (l *Limiter) newTasks(ctx context.Context, n seen) (again time.Duration) {
	again = reconcile.Never
	if l.opts.Orchestrator != holders.Nomad || !n.limits || n.node.Unsupported != "" || n.node.CannotSet != "" {
		return again
	}
	all, err := l.opts.Groups.Tasks()
	if err != nil {
		return again // the pass reports it
	}
	known, allocations, fresh := map[cgroup.ID]bool{}, map[string]bool{}, map[string]bool{}
	var unknown []cgroup.ID
	record, _ := l.record(ctx, n.inv)
	for _, at := range all {
		g, err := l.opts.Groups.Read(at)
		if err != nil {
			continue
		}
		id := cgroup.MemberOf(at).Work.ID
		allocations[id] = true
		_, listed := record.Work[id]
		switch {
		case l.tasks.known[g.ID]:
			known[g.ID] = true
		case listed:
			known[g.ID], fresh[at] = true, true
		default:
			unknown = append(unknown, g.ID)
		}
	}
	maps.DeleteFunc(l.tasks.looked, func(id string, _ lookup) bool { return !allocations[id] })
	l.tasks.known = known
	if len(fresh) > 0 {
		l.limitNew(ctx, n, fresh)
	}
	for _, g := range unknown { // each has its limit before the next one is asked for
		found, next := l.find(ctx, cgroup.MemberOf(g.Path).Work.ID)
		if again = earlier(again, next); found {
			known[g] = true
			l.limitNew(ctx, n, map[string]bool{g.Path: true})
		}
	}
	return again
}

// find asks for an allocation, if that is due. It reports whether it is known, and if not, when it is to be asked for again.
func (l *Limiter) find(ctx context.Context, id string) (found bool, again time.Duration) {
	if l.opts.Lookup == nil {
		return false, reconcile.Never
	}
	now, one := time.Now(), l.tasks.looked[id]
	if one.first.IsZero() {
		one.first, one.next = now, now
	}
	if one.found {
		return true, reconcile.Never
	}
	if one.next.IsZero() || now.Before(one.next) {
		return false, one.wait(now)
	}
	limited, cancel := context.WithTimeout(ctx, lookupAtMost)
	defer cancel()
	var err error
	one.record, err = l.opts.Lookup(limited, id)
	_, one.found = one.record.Work[id]
	if one = one.later(now); one.slow && !l.tasks.looked[id].slow && !one.found {
		l.opts.Log.Info("allocation of a control group not found: no limit of device memory is set for it until it is", "allocation", id, "error", err)
	}
	if l.tasks.looked[id] = one; one.found {
		return true, reconcile.Never
	}
	return false, one.wait(now)
}

// later is a lookup that was made at a time.
func (o lookup) later(now time.Time) lookup {
	switch age := now.Sub(o.first); {
	case age < quickFor:
		o.next = now.Add(quickly)
	case age < slowlyFor:
		o.next, o.slow = now.Add(slowly), true
	default:
		o.next, o.slow = time.Time{}, true
	}
	return o
}

// wait is for how long an allocation is not asked for.
func (o lookup) wait(now time.Time) time.Duration {
	if o.next.IsZero() {
		return reconcile.Never
	}
	return max(o.next.Sub(now), 0)
}

// limitNew sets the limits of new groups, and reads them back.
func (l *Limiter) limitNew(ctx context.Context, n seen, groups map[string]bool) {
	var done []limit.Done
	for range 2 {
		r := l.begin(n, done)
		r.Partial, r.Parents = true, nil
		record, _ := l.record(ctx, n.inv)
		for _, h := range limit.Holdings(record, n.inv) {
			if h.Groups = l.groupsOf(h, &r, nil); h.Way == limit.ByTask && slices.ContainsFunc(h.Groups, func(at string) bool { return groups[at] }) {
				r.Shares = append(r.Shares, h)
			}
		}
		if len(r.Shares) == 0 || l.addGroups(ctx, n, &r, groups) != nil {
			return
		}
		out := limit.Next(l.saved, l.Table(), r)
		if done != nil || len(out.Changes) == 0 {
			l.store(out.Saved)
			l.count(out.Table.Counts)
			return
		}
		l.store(out.Saved)
		done = l.apply(ctx, out.Changes)
	}
}

// count publishes what was counted before the pass has a table.
func (l *Limiter) count(c limit.Counts) {
	t := l.Table()
	t.Counts = c
	l.table.Replace(t)
}
