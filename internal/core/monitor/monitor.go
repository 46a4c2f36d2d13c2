// Package monitor owns the driver: it opens a session, applies its readings and events to a core.State and publishes the
// inventory that follows. Of the core's packages it is the only one above the driver itself with goroutines and a
// clock.
//
// Two goroutines use a session, because NVML calls can hang and can't be cancelled: the reader makes one request at a time,
// the waiter runs the event wait. The monitor's own goroutine never calls the driver and never waits for a disk, so that it
// can always publish, answer and stop.
package monitor

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// TaskName is the name of the monitor's own goroutine in its watchdog: an agent can't work without it.
const TaskName = "monitor"

// Session is an open driver. Wait is called from one goroutine, Busy, Nodes and NodesChanged from any, the other methods from a
// second one. A call may hang forever; Busy then returns it.
type Session interface {
	// Snapshot reads all GPUs. A device that can't be read is excluded, not an error; an error (gpu.ErrDriverLost,
	// gpu.ErrDriverStale) means that the session is of no more use.
	Snapshot() (gpu.Snapshot, error)

	// Probe checks the health of every known GPU and returns an observation each: Checked with the sample unless something is
	// wrong. A GPU that does not answer in time has a health.CallPending observation; its call goes on and delays no other. Errors are as for Snapshot.
	Probe() ([]health.Observation, error)

	// Wait returns the events since the last call and blocks for at most max. An error means that events are unavailable
	// at present; it is a reason to probe, not a fault.
	Wait(max time.Duration) ([]health.Observation, error)

	// Usage reads the usage of every device that answers.
	Usage() ([]gpu.Usage, error)

	// Nodes lists the present device nodes of the node, sorted. It makes no driver call and returns immediately;
	// Snapshot.Nodes is the same list at the time of the reading. Neither side changes the slice.
	Nodes() []string

	// NodesChanged receives when the list of Nodes may be another one, and is always the same channel. Such an event can be
	// missing; nil = all are.
	NodesChanged() <-chan struct{}

	// Busy are the calls in progress without the event wait, the oldest first.
	Busy() []gpu.Call

	// Close ends the session: no handle and no descriptor remains. After an error, which means that a call is still in the
	// driver, it may be called again.
	Close() error
}

// Store is the memory that outlives the agent. All methods may be slow, and are called from one goroutine at a time. They log
// their failures themselves, as the agent works without.
type Store interface {
	// Load returns what was saved last, empty if that is nothing or can't be read, and the boot ID of the node.
	Load() (r core.Checkpoint, boot string)

	// Missing reports whether the file of the latest Save was removed.
	Missing() bool

	// SetAside has the next Save rename the present file instead of replacing it.
	SetAside(why error)

	// Save returns nil once the record is where the next process of the agent finds it.
	Save(core.Checkpoint) error
}

// Intervals and limits that are not configurable.
const (
	waitAtMost    = time.Second             // one event wait; its end is the tick of an idle monitor
	checkEvery    = 500 * time.Millisecond  // tick while a call is in progress or a change is due, and without a session
	idleEvery     = 5 * time.Second         // tick otherwise, for when the event wait does not return
	waitPause     = time.Second             // between event waits that fail
	stopAtMost    = 1500 * time.Millisecond // for the workers to leave the driver; more than waitAtMost
	releaseAtMost = 2 * stopAtMost          // for maintenance to begin
	restoreAtMost = 3 * time.Second         // for the disk to return the history
	closePause    = time.Second / 2         // between tries to close a session with a call in progress
	openFirst     = 250 * time.Millisecond  // before the first retry of open
	openInterval  = 10 * time.Second        // longest pause between two tries
	probePause    = time.Second             // between checks while events arrive
	followUpFor   = 40 * time.Second        // of checks after an event; more than the driver takes to set its recovery action

	// listPriorAfter is after the history is read. It is shorter than the wait of the first fingerprint under Nomad (5 s).
	listPriorAfter = 3 * time.Second
)

// Monitor follows the GPUs of one node. Make one with New, then call Run once; the other methods are safe for concurrent use
// before, during and after Run.
type Monitor struct {
	open              func() (Session, error)
	driverFingerprint func() string
	processRunning    func(gpu.Process) bool // for CheckReservation
	reservationCheck  inventory.CheckMode
	cfg               core.Config // Run's own
	log               *slog.Logger
	store             Store // nil = nothing is saved
	state             *watch.Value[core.State]
	usage             *usageReadings
	limits            *limitCalls
	commands          chan command
	reported          chan health.Observation // by Report
	reservations      reservations            // by Reserved
	host              *watch.Value[inventory.Host]
	announced         *inventory.Allocatable // Run's own: the latest one that was logged
	hostUpdate        sync.Mutex             // held during a change of host
	hostChanged       <-chan struct{}        // Run's own: closed when host has a newer value than the applied one
	logged            logDedup
	logRead           chan struct{}                 // capacity 1: the kernel log was read; nil = Run does not wait for it
	restored          chan struct{}                 // closed when the history is loaded
	listPriorAt       time.Time                     // Run's own: when devices are listed without the driver
	released          *watch.Value[<-chan struct{}] // closed when nothing of the latest session is held; nil = there was none
	checkpoints       checkpointer
	clock             *clock // Run's own
	stats             statsRecorder
	tasks             *watchdog.Registry
	task              *watchdog.Task // Run's own
}

// New returns a monitor that opens sessions with open, which is called from a goroutine of its own, never twice at a time. With
// a store it continues with the saved history.
func New(open func() (Session, error), cfg core.Config, log *slog.Logger, store Store) *Monitor {
	m := &Monitor{
		open: open, driverFingerprint: func() string { return "" },
		processRunning: func(gpu.Process) bool { return true }, reservationCheck: cfg.ReservationCheck, cfg: cfg, log: log, store: store,
		state: watch.NewValue(core.NewState(cfg)), usage: newUsageReadings(), limits: newLimitCalls(),
		commands: make(chan command), reported: make(chan health.Observation, 256), host: watch.NewValue(inventory.Host{}),
		restored: make(chan struct{}), released: watch.NewValue[<-chan struct{}](nil),
		checkpoints: newCheckpointer(store), clock: newClock(time.Now), tasks: watchdog.NewRegistry(),
	}
	_, m.hostChanged = m.host.LoadNext()
	m.announced = m.Current()
	return m
}

// SetDriverProbe has the monitor retry opening the driver as soon as fingerprint returns another value, instead of when the
// next try is due. Call it before Run; fingerprint is called twice a second while there is no session.
func (m *Monitor) SetDriverProbe(fingerprint func() string) { m.driverFingerprint = fingerprint }

// Watchdog is the registry of the monitor's tasks; other tasks of the agent may register there.
func (m *Monitor) Watchdog() *watchdog.Registry { return m.tasks }

// State is the latest state.
func (m *Monitor) State() core.State { return m.state.Load() }

// Current is what takes work now; never nil.
func (m *Monitor) Current() *inventory.Allocatable { return m.state.Load().Allocatable }

// Watch yields what takes work now and then each newer value that differs from its predecessor, until ctx ends. A slow caller
// skips to the latest, which may be equal to the one that it has.
func (m *Monitor) Watch(ctx context.Context) iter.Seq[*inventory.Allocatable] {
	return func(yield func(*inventory.Allocatable) bool) {
		for s := range m.state.Watch(ctx) {
			if !yield(s.Allocatable) {
				return
			}
		}
	}
}

// Changed returns a channel that is closed when there is a newer state than the present one, of which the inventory, what takes work or
// the proposed numbers differ.
func (m *Monitor) Changed() <-chan struct{} { return m.state.Changed() }

// Run follows the GPUs until ctx ends (nil) or a new process is needed (gpu.ErrDriverStale). It returns within two seconds of
// the end of ctx even if the driver hangs; a hung call is abandoned.
func (m *Monitor) Run(ctx context.Context) error {
	m.task = m.tasks.Register(TaskName)
	defer m.task.Done()
	m.restore(ctx)
	select {
	case <-m.hostChanged: // counts from the first reading on
		m.applyHost()
	default:
	}
	defer m.startCheckpoints(ctx)()
	m.awaitLog(ctx)
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = openFirst, openInterval
	for ctx.Err() == nil {
		if m.awaitPauseEnd(ctx) {
			retry.Reset()
		}
		if ctx.Err() != nil {
			break
		}
		began := time.Now()
		err := m.runSession(ctx)
		if ctx.Err() != nil || errors.Is(err, errMaintenance) {
			continue
		}
		m.noDriver(err)
		if errors.Is(err, gpu.ErrDriverStale) {
			return err
		}
		if time.Since(began) >= openInterval { // a session that fails right after it opened does not reset the back-off
			retry.Reset()
		}
		if m.pauseBeforeRetry(ctx, retry.NextBackOff()) {
			retry.Reset()
		}
	}
	return nil
}

// noDriver records that there is no session, and why. Devices that were read stay listed, unhealthy.
func (m *Monitor) noDriver(err error) { m.readNothing(gpu.Unavailable(err)) }

// readNothing records that the driver can't be read, and why.
func (m *Monitor) readNothing(reading gpu.Snapshot) {
	m.update(func(s core.State, now time.Time) core.State { return s.Read(m.cfg, now, reading) })
}

// observe applies observations; without any it lets time pass.
func (m *Monitor) observe(obs ...health.Observation) (changed bool) {
	changed = m.update(func(s core.State, now time.Time) core.State { return s.Observe(m.cfg, now, obs...) })
	m.noteLogRead(obs)
	return changed
}

// publish stores a state, and wakes the watchers and logs the differences if what takes work differs from before. Numbers that are
// proposed wake them too: they are written for other agents. Only Run's goroutine publishes.
func (m *Monitor) publish(next core.State) (changed bool) {
	prev := m.state.Load()
	m.checkpoints.offer(prev, next)
	m.logged.log(m.log, next)
	equal := next.Allocatable.Equal(prev.Allocatable)
	if equal && next.ProposedNumbering().Equal(prev.ProposedNumbering()) {
		next.Inventory, next.Allocatable = prev.Inventory, prev.Allocatable
		m.state.Replace(next)
		return false
	}
	if m.state.Store(next); equal {
		return false
	}
	if !next.Allocatable.AwaitsNumbers() && !next.Allocatable.AwaitsFirstPass() { // else devices are missing or unhealthy for milliseconds
		m.stats.transitions(m.announced, next.Allocatable)
		logChange(m.log, m.announced, next.Allocatable)
		m.announced = next.Allocatable
	}
	return true
}
