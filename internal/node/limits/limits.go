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
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
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
	changed  chan struct{} // capacity 1: a group was made, or has ended

	// turn is a lock that a context can end the wait for: it has a value while what follows is not changed.
	turn    chan struct{}
	monitor Monitor // nil before Run
	saved   limit.Saved
	tasks   tasks
	support support

	recorded holders.Record // the orchestrator's, when it could be read last

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
	retryUse     = 500 * time.Millisecond
)

// New returns a limiter. It reads and sets nothing before Run.
func New(o Options) *Limiter {
	l := &Limiter{
		opts: o, table: watch.NewValue(limit.Table{}), problems: problemset.Set{Log: o.Log}, changed: make(chan struct{}, 1), turn: make(chan struct{}, 1),
		write: make(chan struct{}, 1),
		tasks: tasks{known: map[cgroup.ID]bool{}, looked: map[string]lookup{}},
	}
	l.file = recordfile.New(recordfile.Options[limit.Saved]{
		Path: o.File, MaxBytes: limit.MaxBytes, Parse: limit.Parse, Encode: limit.Saved.Encode, Problems: &l.problems, Code: problem.LimitState,
		Name: "the record of limits", Without: "no limit of device memory is read or set", Damaged: "limits that were set before are taken for those of another program",
	})
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
	done := l.follow(ctx, m.Watchdog())
	defer l.flush()
	defer done()
	_ = l.lock(context.WithoutCancel(ctx)) // whose wait does not end
	l.monitor = m
	l.unlock()
	on := append(slices.Clone(l.opts.On), reconcile.Signal(l.changed))
	reconcile.Loop{On: on, Task: task, Limit: passAtMost}.Run(ctx, func(ctx context.Context, _ reconcile.Cause) time.Duration {
		if l.lock(ctx) != nil {
			return reconcile.Never
		}
		defer l.unlock()
		return l.pass(ctx)
	})
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

// pass reads everything, sets what is to be set, reads it back, and publishes the table. It returns when the next pass is due. The caller has the lock.
func (l *Limiter) pass(ctx context.Context) time.Duration {
	n, open := l.see(ctx)
	if !open { // limits may end with its session: no new work before they are looked at again. The state of the driver wakes this loop
		if n.limits {
			l.monitor.SetLimits(&inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{}})
		}
		return reconcile.Never
	}
	if l.file.Load(&l.saved) != nil { // its problem has the error. After the driver is open: an agent before this one in the process has ended then
		n.support.Node.CannotSet = "the record of limits can't be read: see " + string(problem.LimitState) + " in inspect"
		l.monitor.SetLimits(n.support.Limits(n.inv))
		return retryFailed
	}
	again := l.newTasks(ctx, n)
	r, err := l.decide(ctx, n)
	if ctx.Err() != nil {
		return reconcile.Never
	}
	if errors.Is(err, errNewTasks) {
		return again // this loop is woken at once
	}
	l.tasks.behind = time.Time{}
	if err != nil {
		text := "limits of device memory can't be read: " + err.Error()
		l.problems.Put(problem.Problem{Code: problem.LimitsUnknown, Text: text}, slog.LevelWarn, text)
		return retryFailed
	}
	l.problems.End(problem.LimitsUnknown, "", "limits of device memory are read again")
	l.publish(n, r)
	if r.Undecided {
		l.opts.WakeUse()
		again = earlier(again, retryUse)
	}
	if len(r.Changes) > 0 || l.support.retries(n) {
		again = earlier(again, retryFailed)
	}
	return again
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
	l.probe(ctx, n)
	reading, err := l.read(ctx, n, nil)
	if err != nil {
		return limit.Result{}, err
	}
	first := limit.Next(l.saved, l.Table(), reading)
	l.enable(n, first.Enable)
	if len(first.Changes) == 0 && len(first.Enable) == 0 {
		l.store(first.Saved)
		return first, nil
	}
	l.store(first.Saved)
	done := l.apply(ctx, first.Changes)
	if reading, err = l.read(ctx, n, done); err != nil {
		return limit.Result{}, err
	}
	r := limit.Next(l.saved, first.Table, reading)
	l.store(r.Saved)
	return r, nil
}

// apply makes the changes of a decision.
func (l *Limiter) apply(ctx context.Context, changes []limit.Change) (done []limit.Done) {
	for _, c := range changes {
		one := limit.Done{Change: c}
		if err := l.set(ctx, c); err != nil {
			one.Err = err.Error()
			l.opts.Log.Warn("limit of device memory not set", "group", c.Path, "gpu", c.GPU, "limit", mebibytes(c.Hard), "error", err)
		}
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
	l.saved = s
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

// publish publishes a table, and on which GPUs new work can be limited.
func (l *Limiter) publish(n seen, r limit.Result) {
	was := l.Table()
	l.table.Store(r.Table)
	n.support.Waiting = r.Table.Waiting
	n.support.ControllerOff = l.controllerOff(n.node.Backend)
	n.support.Tried = l.support.tried
	can := n.support.Limits(n.inv)
	l.monitor.SetLimits(can)
	l.noteSupport(can)
	for i := range r.Table.Shares {
		s := &r.Table.Shares[i]
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

// errNotRunning is before Run has seen the driver.
var errNotRunning = fmt.Errorf("the agent has not read the driver so far: %w", gpu.ErrNoDriver)
