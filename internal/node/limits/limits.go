// Package limits reads which limits of device memory the driver holds for the control groups of work, sets those that the policy has, and publishes both as a
// limit.Table. It decides nothing: core/limit does.
//
//	Nomad       makes a task's group . . . . . . . . . . . . . . . . . . . . . starts its first process (some 40 ms later)
//	a Limiter     . event . allocation . state on disk . Set . Get . table
package limits

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/recordfile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Driver reads limits, and sets them where this process has the rights for it. *monitor.Monitor is one.
type Driver interface {
	// LimitsUnsupported is why the driver has no limits at all; "" if it may have them. known is false while that is not known.
	LimitsUnsupported() (reason string, known bool)

	// MemoryLimits returns an answer for each query, in their order. The error is of the whole driver: gpu.ErrNoDriver.
	MemoryLimits(context.Context, []gpu.LimitQuery) ([]gpu.LimitAnswer, error)

	// SetMemoryLimit sets a limit; it does not read it back.
	SetMemoryLimit(context.Context, gpu.LimitChange) error
}

// Setter sets limits: the driver of this process, or a component of the node that has the rights for it.
type Setter interface {
	// SetMemoryLimit sets the limit of a group on a GPU. It does not read it back. If the group is not the one with that inode any more it sets nothing, and the
	// error wraps fs.ErrNotExist.
	SetMemoryLimit(ctx context.Context, group cgroup.ID, change gpu.LimitChange) error
}

// Prober is a Setter that can try on a group of its own whether limits can be set.
type Prober interface {
	// TryLimit sets a limit on an empty group and reads it back, for a backend. The error is why no limit can be set.
	TryLimit(ctx context.Context, id gpu.DeviceID, backend limit.Backend) error
}

// TryEnder is a Prober whose tries may be left behind by a process that was killed. One that ends them itself is none.
type TryEnder interface {
	// EndTries ends the limits that tries have left on GPUs.
	EndTries(ctx context.Context, ids []gpu.DeviceID) error
}

// Readier is a Setter that may be unable to set any limit at times.
type Readier interface {
	// Ready returns nil if limits can be set, or why not, with the remedy.
	Ready(ctx context.Context) error
}

// Monitor is what a Limiter follows, and where it sets what takes no work.
type Monitor interface {
	Driver
	State() core.State
	SetLimits(*inventory.Limits)
	Watchdog() *watchdog.Registry
}

// Lookup asks Nomad for one allocation, by a call: the record has what it has, and nothing else.
type Lookup func(ctx context.Context, allocation string) (holders.Record, error)

// Options configure a Limiter. A nil function is not used.
type Options struct {
	Groups       cgroup.FS
	Orchestrator string // holders.Kubernetes, holders.Nomad
	Setter       Setter // nil = limits are only read
	CannotSet    string // with Setter nil: why, with the remedy; "" = that no policy needs it is not known
	File         string // record of the limits that were set; "" = none is kept

	Boot    func() (id string, at time.Time)
	Load    func() string                                                         // which load of the driver it is: nvidia.DriverFingerprint
	Holders func(context.Context, *inventory.Allocatable) (holders.Record, error) // the orchestrator's record; it makes no call
	Lookup  Lookup
	Pods    func() (prepared []limit.Pod, complete bool) // of the resource claims that are prepared; complete = there are no others
	Use     func() use.Table
	WakeUse func() // a newer table is needed

	On  []reconcile.Source
	Log *slog.Logger
}

// Limiter publishes the table of limits. Make one with New. Its methods are safe for concurrent use; Run is called once.
type Limiter struct {
	opts     Options
	table    *watch.Value[limit.Table]
	problems problemset.Set
	changed  chan struct{} // capacity 1: a group of a task was made, or has ended, or its allocation was found, or a call for a pod has failed
	answered chan struct{} // capacity 1: it was not found

	// turn is a lock that a context can end the wait for: it has a value while what follows is not changed.
	turn    chan struct{}
	monitor Monitor // nil before Run
	saved   limit.Saved
	listed  holders.Record // the orchestrator's, when it could be read last
	latest  limit.Table    // of the latest decision: what is published differs from it while limits can't be read
	unread  time.Time      // since when they can't be; zero = they are
	passes  passes
	tasks   tasks
	support support
	logged  logged

	elsewhere  bool     // another process has File: see load
	recordLock *os.File // the lock of File that this process has: see isElsewhere

	disk    sync.Mutex // of file
	file    *recordfile.File[limit.Saved]
	unsaved atomic.Pointer[limit.Saved] // that is to be written; nil = none
	write   chan struct{}               // capacity 1: there is one
}

// Times that are no settings.
const (
	passAtMost   = 30 * time.Second // for a pass, before the watchdog reports it
	driverAtMost = 5 * time.Second  // for the driver to answer
	lookupAtMost = time.Second
	retryFailed  = 2 * time.Second // after a limit that could not be set
	passEvery    = time.Second     // at most, for new tasks: their limits are set before
	unreadAtMost = 4 * time.Second // while limits can't be read, until shares whose limit is required take no more work

	retryElsewhere = time.Second // while another process has the record

	// retryUse is between two requests for a newer table of use, doubled up to useAtMost: the processes of a GPU may never be known.
	retryUse, useAtMost = 500 * time.Millisecond, time.Minute
)

// New returns a limiter. It reads and sets nothing before Run.
func New(o Options) *Limiter {
	l := &Limiter{
		opts: o, table: watch.NewValue(limit.Table{}), problems: problemset.Set{Log: o.Log}, changed: make(chan struct{}, 1), answered: make(chan struct{}, 1), turn: make(chan struct{}, 1),
		write:  make(chan struct{}, 1),
		tasks:  tasks{known: map[cgroup.ID]bool{}, looked: map[string]lookup{}, answers: make(chan answer, lookupsAtOnce)},
		logged: logged{failures: map[target]string{}},
	}
	l.file = l.newFile()
	l.turn <- struct{}{}
	return l
}

// Table returns the latest table.
func (l *Limiter) Table() limit.Table { return l.table.Load() }

// Changed is closed when there is a newer table.
func (l *Limiter) Changed() <-chan struct{} { return l.table.Changed() }

// Problems has what keeps limits from being read or set on this node, and what the table has.
func (l *Limiter) Problems() []problem.Problem {
	return slices.Concat(l.problems.List(), l.Table().Problems)
}

// Run reads and sets limits until ctx ends. Nothing is read while the driver has no limits and the policy has none, either.
func (l *Limiter) Run(ctx context.Context, m Monitor) {
	if !l.await(ctx, m) {
		return
	}
	task := m.Watchdog().Register("limits")
	defer task.Done()
	l.follows(ctx, m)
	defer l.follows(ctx, nil)
	defer l.flush()
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() { l.saveBehind(ctx) })
	defer l.tasks.end()
	on := append(slices.Clone(l.opts.On), reconcile.Signal(l.changed), reconcile.Signal(l.answered))
	reconcile.Loop{On: on, Task: task, Limit: passAtMost}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		if l.lock(ctx) != nil {
			return reconcile.Never
		}
		defer l.unlock()
		return l.step(ctx)
	})
}

// follows sets the monitor that is followed; nil = none any more, and another process may have the record.
func (l *Limiter) follows(ctx context.Context, m Monitor) {
	_ = l.lock(context.WithoutCancel(ctx)) // whose wait does not end
	defer l.unlock()
	l.support.listed = time.Now()
	if l.monitor = m; m == nil {
		l.unlockRecord()
	}
}

// await waits until there is something to do, and reports whether there is.
func (l *Limiter) await(ctx context.Context, m Monitor) (found bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	reconcile.Loop{On: l.opts.On}.Run(ctx, func(context.Context, reconcile.Cause) time.Duration {
		why, known := m.LimitsUnsupported()
		if found = known && why == "" || hasLimits(m.State().Allocatable); found {
			cancel()
		}
		return reconcile.Never
	})
	return found
}

// hasLimits reports whether units are to be limited.
func hasLimits(inv *inventory.Allocatable) bool {
	for u := range inv.Devices() {
		if u.Memory > 0 {
			return true
		}
	}
	return false
}

func (l *Limiter) lock(ctx context.Context) error {
	select {
	case <-l.turn:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *Limiter) unlock() { l.turn <- struct{}{} }

// step sets the limits of new tasks, and makes a pass if one is due. It returns when the next step is due. The caller has the lock.
func (l *Limiter) step(ctx context.Context) time.Duration {
	n, open, err := l.see(ctx)
	if !open { // limits may end with its session: no new work before they are looked at again. The state of the driver wakes this loop
		l.tasks.unfollow()
		l.passes.basis = basis{}
		if n.limits {
			l.monitor.SetLimits(&inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{}})
		}
		l.publishUnread("the driver is not open", false)
		return reconcile.Never
	}
	if err != nil {
		l.passes.basis = basis{}
		l.unreadable(n, err)
		return retryFailed
	}
	again := reconcile.Never
	switch err := l.load(n.limits); {
	case errors.Is(err, limit.ErrElsewhere):
		n.node.CannotSet = err.Error()
		n.support.Node, n.support.Elsewhere, again = n.node, true, retryElsewhere
	case err != nil:
		n.support.Node.CannotSet = "the record of limits can't be read: see " + string(problem.LimitState) + " in inspect"
		l.monitor.SetLimits(n.support.Limits(n.inv))
		return retryFailed
	}
	again = earlier(again, l.newTasks(ctx, n))
	if n.limits && n.node.CannotSet != "" && l.opts.Setter != nil {
		again = earlier(again, retryFailed) // nothing else reports that the component is there
	}
	if wait := l.passes.wait(l.basisOf(n)); wait != 0 {
		return earlier(again, wait)
	}
	next := l.pass(ctx, n)
	l.passes.due = time.Time{}
	if next != reconcile.Never {
		l.passes.due = time.Now().Add(next)
	}
	return earlier(again, next)
}

// pass reads everything, sets what is to be set, reads it back, and publishes the table. It returns when the next pass is due if nothing changes.
func (l *Limiter) pass(ctx context.Context, n seen) time.Duration {
	r, err := l.decide(ctx, n)
	switch {
	case ctx.Err() != nil:
		return reconcile.Never
	case errors.Is(err, errNewTasks): // this loop is woken at once
		l.passes.basis = basis{}
		return reconcile.Never
	}
	l.tasks.behind = time.Time{}
	if err != nil {
		l.unreadable(n, err)
		return retryFailed
	}
	l.publish(ctx, n, r)
	if r.Undecided && !n.support.Elsewhere && l.passes.wakesUse() {
		l.opts.WakeUse()
	} else if !r.Undecided {
		l.passes.pause = 0
	}
	again := l.support.again(n)
	if len(r.Changes) > 0 {
		again = earlier(again, retryFailed)
	}
	return again
}

// passes are when passes are due: at once when what they depend on has changed, at a time, and not for each new task.
type passes struct {
	basis basis     // of the latest
	began time.Time // the latest
	due   time.Time // the next one without a change; zero = none is

	pause   time.Duration // after the latest request for a newer table of use; 0 = none is needed
	pauseTo time.Time
}

// basis is what a pass depends on, apart from groups.
type basis struct {
	inv    *inventory.Allocatable
	opened int
	node   limit.Node
	off    string // see limit.Support.ControllerOff
	use    time.Time
}

func (l *Limiter) basisOf(n seen) basis {
	b := basis{inv: n.inv, opened: n.state.Incarnation, node: n.node, off: l.controllerOff(n.node.Backend)}
	if l.opts.Use != nil {
		b.use = l.opts.Use().At
	}
	return b
}

// wait is for how long no pass is due.
func (p *passes) wait(b basis) time.Duration {
	switch {
	case p.basis != b:
		return 0
	case p.due.IsZero():
		return reconcile.Never
	}
	return max(time.Until(p.due), 0)
}

// soon has a pass follow that shows the limits of new tasks.
func (p *passes) soon() {
	if at := p.began.Add(passEvery); p.due.IsZero() || at.Before(p.due) {
		p.due = at
	}
}

// wakesUse reports whether a newer table of use is to be asked for now. Each one that comes is followed by a pass.
func (p *passes) wakesUse() bool {
	now := time.Now()
	if p.pause > 0 && now.Before(p.pauseTo) {
		return false
	}
	p.pause = min(max(2*p.pause, retryUse), useAtMost)
	p.pauseTo = now.Add(p.pause)
	return true
}

// earlier returns the shorter of two times until a pass.
func earlier(a, b time.Duration) time.Duration {
	if a == reconcile.Never || b != reconcile.Never && b < a {
		return b
	}
	return a
}

// decide reads, decides, sets, and decides again by what is read then.
func (l *Limiter) decide(ctx context.Context, n seen) (limit.Result, error) {
	l.passes.basis, l.passes.began = l.basisOf(n), time.Now()
	l.probe(ctx, n)
	reading, err := l.read(ctx, n, nil)
	if err != nil {
		return limit.Result{}, err
	}
	first := limit.Next(l.saved, l.latest, reading)
	l.enable(n, first.Enable)
	l.store(first.Saved)
	l.logged.keep(first.Changes)
	if len(first.Changes) == 0 && len(first.Enable) == 0 {
		l.logProblems(first.Table.Problems)
		return first, nil
	}
	done := l.apply(ctx, first.Changes)
	if reading, err = l.read(ctx, n, done); err != nil {
		return limit.Result{}, err
	}
	r := limit.Next(l.saved, first.Table, reading)
	l.store(r.Saved)
	l.logProblems(slices.Concat(first.Table.Problems, r.Table.Problems)) // what was mended is in the first alone
	return r, nil
}

// apply makes the changes of a decision.
func (l *Limiter) apply(ctx context.Context, changes []limit.Change) (done []limit.Done) {
	for _, c := range changes {
		one := limit.Done{Change: c}
		err := l.set(ctx, c)
		if err != nil {
			one.Err = err.Error()
		}
		if err != nil && ctx.Err() == nil {
			l.support.failed(c.GPU, err)
		}
		l.logChange(one)
		done = append(done, one)
	}
	return done
}

func (l *Limiter) set(ctx context.Context, c limit.Change) error {
	ctx, cancel := context.WithTimeout(ctx, driverAtMost)
	defer cancel()
	q := gpu.LimitQuery{GPU: c.GPU, Group: l.opts.Groups.Path(c.Path)}
	return l.opts.Setter.SetMemoryLimit(ctx, cgroup.ID{Path: c.Path, Inode: c.Inode}, gpu.LimitChange{LimitQuery: q, Soft: c.Soft, Hard: c.Hard})
}

// store keeps a state, and has it written, if that can be done: limits are set without it, too. It does not wait for the disk, which takes longer than the first
// process of a task. A task whose limit is in no record is late at most.
func (l *Limiter) store(s limit.Saved) {
	if l.saved = s; l.elsewhere {
		return
	}
	l.unsaved.Store(&s)
	watch.Notify(l.write)
}

// save writes a state to disk.
func (l *Limiter) save(s limit.Saved) error {
	l.disk.Lock()
	defer l.disk.Unlock()
	l.unsaved.Store(nil)
	return l.file.Store(s)
}

// flush writes the state that is not written so far.
func (l *Limiter) flush() {
	l.disk.Lock()
	defer l.disk.Unlock()
	if s := l.unsaved.Swap(nil); s != nil {
		_ = l.file.Store(*s) // its problem has the error
	}
}

// saveBehind writes states behind the passes until ctx ends.
func (l *Limiter) saveBehind(ctx context.Context) {
	for {
		select {
		case <-l.write:
			l.flush()
		case <-ctx.Done():
			return
		}
	}
}

// errNotRunning is before Run has seen the driver.
var errNotRunning = fmt.Errorf("the agent has not read the driver so far: %w", gpu.ErrNoDriver)
