package limits

import (
	"context"
	"errors"
	"maps"
	"os"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// tasks are the groups of Nomad's tasks, and the allocations that were asked for because of them.
type tasks struct {
	stop   func()             // ends what follows the folders, and waits for that; nil = nothing does
	known  map[cgroup.ID]bool // groups of which it is known whether their work is to be limited
	looked map[string]lookup  // by allocation
	behind time.Time          // since when passes end early for newer tasks; zero = the latest did not

	lookups sync.WaitGroup
	asking  int // lookups whose answer was not taken
	answers chan answer
}

// answer is that of a lookup.
type answer struct {
	allocation string
	record     holders.Record
	err        error
}

// errNewTasks ends a pass early.
var errNewTasks = errors.New("there may be newer tasks")

// newer reports whether a pass is to end early, because a group may have been made whose limit is to be set first. It is not for longer than behindAtMost.
func (l *Limiter) newer() bool {
	if len(l.changed) == 0 || l.opts.Orchestrator != holders.Nomad {
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
	asking      bool      // there will be an answer
	first, next time.Time // when it was asked for first, and when it is to be asked for again; next zero = not any more
	slow        bool      // it is asked for less often, or not any more
}

// An allocation whose group is there, and that the servers do not show, is asked for: often, because they show a new one within milliseconds, then at times. After
// that it is one that they have forgotten, or of another cluster, unless the orchestrator's record lists it later.
const (
	quickFor, quickly = 2 * time.Second, 50 * time.Millisecond
	slowlyFor, slowly = 30 * time.Second, 2 * time.Second
	lookupsAtOnce     = 8
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

// setsTasks reports whether limits are to be set on the groups of Nomad's tasks, and can be.
func (l *Limiter) setsTasks(n seen) bool {
	return l.opts.Orchestrator == holders.Nomad && n.limits && n.node.Unsupported == "" && n.node.CannotSet == ""
}

// follow follows the folders of Nomad's tasks, until unfollow or the end of ctx.
func (l *Limiter) follow(ctx context.Context) {
	if l.tasks.stop != nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	for _, slice := range cgroup.NomadSlices {
		running.Go(func() { l.followSlice(ctx, slice) })
	}
	l.tasks.stop = func() { cancel(); running.Wait() }
}

// followSlice wakes the loop when the groups in a folder, or the controllers that they have, are others. The folder is looked at without an event, too.
func (l *Limiter) followSlice(ctx context.Context, slice string) {
	task := l.monitor.Watchdog().Register("control groups " + slice)
	defer task.Done()
	var before []cgroup.ID
	var controllers string
	dirwatch.Directory{
		Path: l.opts.Groups.Path(slice), Interval: watchEvery, PollInterval: pollEvery, Log: l.opts.Log.With("folder", l.opts.Groups.Path(slice)), Task: task,
	}.Watch(ctx, func() {
		text, _ := os.ReadFile(l.opts.Groups.Path(slice + "/cgroup.subtree_control"))
		if is := l.groupsIn(slice); !slices.Equal(before, is) || controllers != string(text) {
			before, controllers = is, string(text)
			watch.Notify(l.changed)
		}
	})
}

func (t *tasks) unfollow() {
	if t.stop != nil {
		t.stop()
		t.stop = nil
	}
}

// end waits for the end of what follows folders, and of lookups, after that of their context.
func (t *tasks) end() {
	t.unfollow()
	t.lookups.Wait()
}

// groupsIn are the groups directly in another one, sorted by path; none without that.
func (l *Limiter) groupsIn(group string) (all []cgroup.ID) {
	names, _ := l.opts.Groups.Children(group)
	for _, name := range names {
		if id, err := l.opts.Groups.ID(path.Join(group, name)); err == nil { // else it has ended
			all = append(all, id)
		}
	}
	return all
}

// newTasks sets the limits of tasks whose groups were not there before, before all else: their first process comes within milliseconds. It reports when the
// allocation of one that is not known so far is to be asked for.
func (l *Limiter) newTasks(ctx context.Context, n seen) (again time.Duration) {
	if !l.setsTasks(n) {
		l.tasks.unfollow()
		return reconcile.Never
	}
	l.follow(ctx)
	l.takeAnswers()
	known, allocations, fresh, unknown := map[cgroup.ID]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
	record, _ := l.record(ctx, n.inv)
	for _, slice := range cgroup.NomadSlices {
		for _, g := range l.groupsIn(slice) {
			id := cgroup.MemberOf(g.Path).Work.ID
			if id == "" {
				continue
			}
			allocations[id] = true
			_, listed := record.Work[id]
			switch {
			case l.tasks.known[g]:
				known[g] = true
			case listed:
				known[g], fresh[g.Path] = true, true
			default:
				unknown[id] = true
			}
		}
	}
	maps.DeleteFunc(l.tasks.looked, func(id string, _ lookup) bool { return !allocations[id] })
	l.tasks.known = known
	if len(fresh) > 0 {
		l.limitNew(ctx, n, fresh)
	}
	return l.lookUp(ctx, unknown)
}

// lookUp asks for the allocations for which that is due, some at a time: each answer wakes the loop. It reports when the next is to be asked for.
func (l *Limiter) lookUp(ctx context.Context, unknown map[string]bool) (again time.Duration) {
	again = reconcile.Never
	if l.opts.Lookup == nil {
		return again
	}
	now := time.Now()
	for _, id := range slices.Sorted(maps.Keys(unknown)) {
		one, known := l.tasks.looked[id]
		if !known {
			one.first, one.next = now, now
		}
		switch {
		case one.asking, one.next.IsZero():
		case now.Before(one.next):
			again = earlier(again, one.next.Sub(now))
		case l.tasks.asking < lookupsAtOnce:
			one.asking = true
			l.tasks.asking++
			l.tasks.lookups.Go(func() { l.ask(ctx, id) })
		}
		l.tasks.looked[id] = one
	}
	return again
}

// ask asks for an allocation.
func (l *Limiter) ask(ctx context.Context, id string) {
	limited, cancel := context.WithTimeout(ctx, lookupAtMost)
	defer cancel()
	record, err := l.opts.Lookup(limited, id)
	l.tasks.answers <- answer{id, record, err} // which has room for all that are asked for
	if _, found := record.Work[id]; found {
		watch.Notify(l.changed)
	} else {
		watch.Notify(l.answered) // no pass ends early for that
	}
}

// takeAnswers keeps the answers that have come.
func (l *Limiter) takeAnswers() {
	for ; len(l.tasks.answers) > 0; l.tasks.asking-- {
		a := <-l.tasks.answers
		was, known := l.tasks.looked[a.allocation]
		if !known { // its group has ended
			continue
		}
		one := was.later(time.Now())
		one.asking, one.record = false, a.record
		_, one.found = a.record.Work[a.allocation]
		if one.slow && !was.slow && !one.found {
			l.opts.Log.Info("allocation of a control group not found: no limit of device memory is set for it until it is", "allocation", a.allocation, "error", a.err)
		}
		l.tasks.looked[a.allocation] = one
	}
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

// limitNew sets the limits of new groups, and reads them back. A pass follows, also if that failed.
func (l *Limiter) limitNew(ctx context.Context, n seen, groups map[string]bool) {
	var done []limit.Done
	for range 2 {
		r := l.begin(n, done)
		r.Partial, r.Parents = true, nil
		record, _ := l.record(ctx, n.inv)
		for _, h := range limit.Holdings(record, n.inv) {
			if h.Way != limit.ByTask {
				continue
			}
			if h.Groups = l.groupsOfTask(h.Work); slices.ContainsFunc(h.Groups, func(at string) bool { return groups[at] }) {
				r.Shares = append(r.Shares, h)
			}
		}
		if len(r.Shares) == 0 {
			return
		}
		if l.addGroups(ctx, n, &r, groups) != nil {
			l.passes.soon()
			return
		}
		out := limit.Next(l.saved, l.latest, r)
		l.store(out.Saved)
		if done != nil || len(out.Changes) == 0 {
			l.count(out.Table.Counts)
			l.passes.soon()
			return
		}
		done = l.apply(ctx, out.Changes)
	}
}
