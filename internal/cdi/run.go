package cdi

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Intervals and limits, which are not configurable.
const (
	firstAtMost    = 1500 * time.Millisecond // for a pass, before devices are reported as not defined
	passAtMost     = 30 * time.Second        // for a pass, before the watchdog reports it
	stopAtMost     = 500 * time.Millisecond  // for a pass to end with the agent
	withdrawAtMost = 200 * time.Millisecond  // for the monitor to take devices out of the offer
	retryFirst     = time.Second             // before a pass is repeated that failed
	retryLongest   = time.Minute
	checkEvery     = time.Minute            // between looks at the folder and at all files without an event
	fileEvery      = time.Hour              // the same because of one file, which each of those looks sees, too
	pollEvery      = 2 * time.Second        // the same while the folder is missing or inotify is unavailable
	eventPause     = 100 * time.Millisecond // between passes because of events
)

// slow is the problem while a pass takes long.
const slow = "not written yet: a disk with files of the driver, or with the folder of specifications, does not respond"

// Run keeps the specifications in step with the driver until ctx ends. It then returns within half a second even if a disk hangs: the
// goroutine that hangs is abandoned. Specifications stay, because containers may restart while no agent runs.
//
// It does nothing as long as no unit needs a specification and none of an earlier agent is there, and while the driver is not ready.
func (w *Writer) Run(ctx context.Context, m Monitor) {
	if w.opts.Vendor == "" {
		return
	}
	task := m.Watchdog().Register("CDI specifications")
	defer task.Done()
	l := loop{
		Writer: w, monitor: m, task: task, changed: make(chan struct{}, 1), disk: make(chan struct{}, 1),
		results: make(chan outcome, 1), backoff: backoff.NewExponentialBackOff(),
	}
	l.backoff.InitialInterval, l.backoff.MaxInterval = retryFirst, retryLongest
	w.withdraw = l.withdraw
	l.watching.Go(func() {
		for range m.Watch(ctx) { // begins with the present one
			watch.Notify(l.changed)
		}
	})
	l.start(func() outcome { return outcome{present: w.sweep()} })
	l.run(ctx)
	ended := make(chan struct{})
	go func() { l.watching.Wait(); close(ended) }()
	if !watch.Await(context.Background(), ended, stopAtMost) {
		w.opts.Log.Warn("the work on CDI specifications has not ended in time: check the disk of the folder " + w.opts.Folder)
	}
}

// loop is one call of Run. Its goroutine does not wait for a disk: passes have their own.
type loop struct {
	*Writer
	monitor  Monitor
	task     *watchdog.Task
	watching sync.WaitGroup
	changed  chan struct{} // capacity 1: another inventory
	disk     chan struct{} // capacity 1: another content of the folder
	results  chan outcome  // capacity 1
	backoff  *backoff.ExponentialBackOff

	busy    bool        // a pass runs
	since   time.Time   // when it began
	present bool        // a specification of this agent is there
	watched bool        // the folder is
	library watchedFile // of the driver: a package manager that replaces it removes it, and containers can't start any more
	hooks   watchedFile // the hook program: another version has other hooks
	last    *input      // of the latest pass; nil = there was none
	current *inventory.CDI
	setting sync.Mutex       // of current, which a pass may change, too
	retry   <-chan time.Time // nil = nothing has failed
}

func (l *loop) run(ctx context.Context) {
	force := false
	for {
		var late <-chan time.Time
		if l.busy && !l.known() {
			late = time.After(max(firstAtMost-time.Since(l.since), 0))
		}
		select {
		case <-l.changed:
		case <-l.disk:
			force = true
		case <-l.retry:
			force, l.retry = true, nil
		case r := <-l.results:
			l.apply(ctx, r)
		case <-late:
			l.set(l.opts.undefined(l.monitor.State(), slow))
		case <-ctx.Done():
			return
		}
		if l.busy {
			continue
		}
		s := l.monitor.State()
		in := newInput(s)
		switch {
		case !l.present && !in.needed:
		case in.driver.State != gpu.DriverReady:
			if l.current == nil && in.driver.State != gpu.DriverPending {
				l.set(l.notReady(s))
			}
		case force || l.last == nil || !l.last.equal(in):
			force, l.last = false, in
			l.start(func() outcome { return l.pass(ctx, s) })
		}
	}
}

// known reports whether the monitor has what the specifications define for the present incarnation of the driver.
func (l *loop) known() bool {
	l.setting.Lock()
	defer l.setting.Unlock()
	return l.current != nil && l.current.Incarnation == l.monitor.State().Incarnation
}

// start runs a pass in a goroutine of its own. There is one at a time.
func (l *loop) start(pass func() outcome) {
	l.busy, l.since = true, time.Now()
	l.task.Heartbeat(passAtMost)
	l.watching.Go(func() {
		r := pass()
		l.task.Heartbeat(0)
		l.results <- r
	})
}

// apply publishes the result of a pass.
func (l *loop) apply(ctx context.Context, r outcome) {
	l.busy = false
	l.present = l.present || r.present
	if r.cdi == nil {
		return
	}
	l.set(r.cdi)
	l.present = true // or it will be, as a device needs it
	if !r.failed {
		l.backoff.Reset()
		l.retry = nil
	} else if l.retry == nil {
		l.retry = time.After(l.backoff.NextBackOff())
	}
	if !l.watched { // after the first pass, which makes the folder
		l.watched = true
		l.watching.Go(func() { l.watchFolder(ctx, l.opts.Folder, checkEvery, specfile.IsSpec) })
	}
	l.watchFile(ctx, &l.library, r.library)
	l.watchFile(ctx, &l.hooks, r.hooks)
}

// watchedFile is a file whose folder is watched.
type watchedFile struct {
	path string // "" = none
	end  func() // nil = none
}

// watchFile makes a pass follow each change of the file at a path, instead of the one that was watched before.
func (l *loop) watchFile(ctx context.Context, f *watchedFile, path string) {
	if path == "" || path == f.path {
		return
	}
	if f.end != nil {
		f.end()
	}
	ctx, f.end = context.WithCancel(ctx)
	f.path = path
	base := filepath.Base(path)
	l.watching.Go(func() {
		l.watchFolder(ctx, filepath.Dir(path), fileEvery, func(name string) bool { return name == base || name == base+besideScript })
	})
}

// set publishes what the specifications define, if that is another value.
func (l *loop) set(c *inventory.CDI) {
	l.setting.Lock()
	defer l.setting.Unlock()
	if !c.Equal(l.current) {
		l.current = c
		l.monitor.SetCDI(c) // never blocks
	}
}

// withdraw publishes that no device is defined but those to keep, and waits until that counts, before a pass takes the names of the
// others out of the file. A device that is read again meanwhile must not be taken for defined.
func (l *loop) withdraw(ctx context.Context, keep []gpu.DeviceID) {
	l.setting.Lock()
	defer l.setting.Unlock()
	if l.current == nil {
		return
	}
	next := *l.current
	next.Defined = slices.DeleteFunc(slices.Clone(next.Defined), func(id gpu.DeviceID) bool { return !slices.Contains(keep, id) })
	if len(next.Defined) == len(l.current.Defined) {
		return
	}
	l.current = &next
	l.monitor.SetCDI(&next)
	ctx, cancel := context.WithTimeout(ctx, withdrawAtMost)
	defer cancel()
	for !l.monitor.State().Host.CDI.Equal(&next) && watch.Sleep(ctx, time.Millisecond) {
	}
}

// watchFolder notices changes of files in a folder by others, until ctx ends.
func (l *loop) watchFolder(ctx context.Context, folder string, every time.Duration, relevant func(name string) bool) {
	var last time.Time
	dirwatch.Directory{
		Path: folder, Interval: every, PollInterval: pollEvery, Relevant: relevant, Log: l.opts.Log.With("directory", folder),
	}.Watch(ctx, func() {
		if pause := eventPause - time.Since(last); pause > 0 {
			watch.Sleep(ctx, pause)
		}
		last = time.Now()
		watch.Notify(l.disk)
	})
}

// notReady is the value while the driver is not ready and no specification was written by this process.
func (w *Writer) notReady(s core.State) *inventory.CDI {
	c := w.opts.undefined(s, "the driver is not ready")
	c.Reason = c.Problem
	return c
}

// sweep removes temporary files that a killed agent left, and reports whether there is a specification of an earlier agent, or containers that have one from before a
// reboot.
func (w *Writer) sweep() (present bool) {
	w.gpus.Sweep()
	w.limits.Sweep()
	for _, c := range w.others {
		c.file.Sweep()
	}
	w.stored = w.readStored()
	_, err := os.Lstat(w.gpus.Path)
	return err == nil || len(w.stored) > 0
}

// input is the part of a state on which the specifications depend.
type input struct {
	driver      gpu.Driver
	incarnation int
	devices     []gpu.Device
	nodes       []string
	lost        map[gpu.DeviceID]bool
	needed      bool // by a unit
	limits      limits
}

func newInput(s core.State) *input {
	return &input{
		s.Snapshot.Driver, s.Incarnation, s.Snapshot.Devices, s.Snapshot.Nodes, s.Ledger.Lost(s.Snapshot.Devices), s.Allocatable.NeedsCDI(), limitsOf(s),
	}
}

func (i *input) equal(o *input) bool {
	return i.driver == o.driver && i.incarnation == o.incarnation && slices.Equal(i.devices, o.devices) && slices.Equal(i.nodes, o.nodes) &&
		maps.Equal(i.lost, o.lost) && i.needed == o.needed && i.limits.equal(o.limits)
}
