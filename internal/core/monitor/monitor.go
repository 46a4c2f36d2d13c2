// Package monitor owns the driver: it opens a session, folds its readings and events into the state of the
// machine and hands out the inventory that follows. It is the only impure part above the driver itself.
//
// Two goroutines touch a session, because NVML calls can hang and can't be cancelled: the reader runs
// one request at a time, the waiter sits in the event wait. The monitor's own goroutine never calls the
// driver and never touches a disk, so that it can always publish, answer and stop.
package monitor

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/watch"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Loop is the monitor's own goroutine on its board: without it an agent is of no use.
const Loop = "monitor"

// Session is an open driver. Wait is called from one goroutine, Busy and Nodes from any, the others from one
// other goroutine. A call may hang for ever; Busy then says which.
type Session interface {
	// Snapshot reads the whole machine. A device that can't be read is excluded, not an error; an
	// error (core.ErrDriverLost, core.ErrDriverStale) means that the session is of no more use.
	Snapshot() (core.Snapshot, error)

	// Probe checks the health of every known GPU: an observation each, Checked with what it said unless
	// something is wrong. A GPU that does not answer in a moment is Waiting and keeps nobody: its call goes on
	// alone. Errors are as for Snapshot.
	Probe() ([]core.Observation, error)

	// Wait returns what happened since the last call, blocking for at most max. An error means that
	// events can't be had at present; it is a reason to probe, not a fault.
	Wait(max time.Duration) ([]core.Observation, error)

	// Usage reads the live numbers of every device that answers.
	Usage() ([]core.Usage, error)

	// Nodes lists the device nodes that the host has now, sorted. It asks no driver and returns at once; Snapshot.Nodes
	// is the same list at the time of the reading. The slice is not changed by either side.
	Nodes() []string

	// Busy are the calls in progress, the event wait excepted; the oldest first.
	Busy() []core.Call

	// Close ends the session: no handle and no descriptor outlives it. After an error, because a call is still
	// in the driver, it may be tried again.
	Close() error
}

// Store keeps what must outlive the agent. All methods may be slow, and are called from one goroutine at a time. They log
// themselves what goes wrong, as it keeps nobody from working.
type Store interface {
	// Load returns what was saved last, empty if that is nothing or can't be read, and the machine's boot ID.
	Load() (r core.Checkpoint, boot string)

	// SetAside has the next Save keep what is there under another name instead of replacing it.
	SetAside(why error)

	// Save returns nil once the record is where the next agent finds it.
	Save(core.Checkpoint) error
}

// Pace of the parts that nobody needs to configure.
const (
	waitAtMost    = time.Second             // one event wait
	watchEvery    = 500 * time.Millisecond  // look for a call that is stuck, and let time pass in the ledger
	waitPause     = time.Second             // between event waits that fail
	leaveAtMost   = 1500 * time.Millisecond // for the workers to leave the driver; more than waitAtMost
	releaseAtMost = 2 * leaveAtMost         // for maintenance to begin
	recallAtMost  = 3 * time.Second         // for the disk to give the history
	closePause    = time.Second / 2         // between tries to close what a call keeps open
	openFirst     = 250 * time.Millisecond
	openInterval  = 10 * time.Second
	eagerly       = time.Second      // between checks while events come in
	attentive     = 40 * time.Second // after an event; more than a verdict takes to settle
)

// Monitor follows one machine. Make one with New, then call Run once; the other methods are safe for
// concurrent use before, during and after Run.
type Monitor struct {
	open              func() (Session, error)
	driverFingerprint func() string
	cfg               core.Config
	log               *slog.Logger
	store             Store // nil = nothing is kept
	cell              *watch.Value[core.State]
	usage             *usageReadings
	orders            chan order
	told              chan core.Observation
	host              *watch.Value[core.Host] // what was handed in last
	moved             chan struct{}           // capacity 1: there is something new in host
	said              said
	past              pastLog
	known             chan struct{}                 // closed when the history is taken up
	held              *watch.Value[<-chan struct{}] // closed when the latest session holds nothing any more; nil = there was none
	keeper            keeper
	clock             *clock // Run's own
	gauges            gauges
	board             *watchdog.Registry
	turns             *watchdog.Task // Run's own
}

// New returns a monitor that opens sessions with open, which is called from a goroutine of its own,
// never twice at once. With a store it takes up where the last one ended.
func New(open func() (Session, error), cfg core.Config, log *slog.Logger, store Store) *Monitor {
	return &Monitor{
		open: open, driverFingerprint: func() string { return "" }, cfg: cfg, log: log, store: store,
		cell:  watch.NewValue(core.NewState(cfg)),
		usage: newUsageReadings(), orders: make(chan order), told: make(chan core.Observation, 256),
		host: watch.NewValue(core.Host{}), known: make(chan struct{}), moved: make(chan struct{}, 1),
		held: watch.NewValue[<-chan struct{}](nil), keeper: newKeeper(store), clock: newClock(time.Now), board: watchdog.NewRegistry(),
	}
}

// SetDriverProbe has the monitor try again to open the driver as soon as look says something else than before, instead of
// when the next try is due. Call it before Run; look is called twice a second while there is no session.
func (m *Monitor) SetDriverProbe(look func() string) { m.driverFingerprint = look }

// Watchdog is where the monitor's loops beat, and others of the agent may.
func (m *Monitor) Watchdog() *watchdog.Registry { return m.board }

// State is the latest state of the machine.
func (m *Monitor) State() core.State { return m.cell.Load() }

// Current is the latest inventory; never nil.
func (m *Monitor) Current() *core.Inventory { return m.cell.Load().Inventory }

// Watch yields the present inventory and then each that differs, until ctx ends. A slow caller skips.
func (m *Monitor) Watch(ctx context.Context) iter.Seq[*core.Inventory] {
	return func(yield func(*core.Inventory) bool) {
		var last *core.Inventory
		for s := range m.cell.Watch(ctx) {
			if s.Inventory.Equal(last) {
				continue
			}
			if last = s.Inventory; !yield(last) {
				return
			}
		}
	}
}

// Run follows the machine until ctx ends (nil) or a new process is needed (core.ErrDriverStale). It
// returns within two seconds of the end of ctx even if the driver hangs; a hung call is abandoned.
func (m *Monitor) Run(ctx context.Context) error {
	m.turns = m.board.Register(Loop)
	defer m.turns.Done()
	m.recall(ctx)
	m.arrive() // what is known of the host counts from the first reading on
	defer m.keep(ctx)()
	m.awaitLog(ctx)
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = openFirst, openInterval
	for m.away(ctx); ctx.Err() == nil; m.away(ctx) {
		began := time.Now()
		err := m.visit(ctx)
		if ctx.Err() != nil || errors.Is(err, errAway) {
			continue
		}
		m.noDriver(err)
		if errors.Is(err, core.ErrDriverStale) {
			return err
		}
		if time.Since(began) >= openInterval { // else it opens only to fail again
			retry.Reset()
		}
		if m.pause(ctx, retry.NextBackOff()) {
			retry.Reset()
		}
	}
	return nil
}

// visit is one session from its opening to its end.
func (m *Monitor) visit(ctx context.Context) error {
	over := make(chan struct{})
	m.held.Store(over)
	session, err := m.connect(ctx, over)
	if err != nil {
		return err
	}
	return m.follow(ctx, session, over)
}

// noDriver takes in that there is no session, and why. Devices that were seen stay, unhealthy.
func (m *Monitor) noDriver(err error) {
	m.readNothing(core.Unavailable(err))
}

// readNothing takes in that the driver can't be read, and why.
func (m *Monitor) readNothing(reading core.Snapshot) {
	m.update(func(s core.State, now time.Time) core.State { return s.Read(m.cfg, now, reading) })
}

// observe takes in what happened; without observations it lets the time pass.
func (m *Monitor) observe(obs ...core.Observation) (changed bool) {
	changed = m.update(func(s core.State, now time.Time) core.State { return s.Observe(m.cfg, now, obs...) })
	m.past.logWasRead(obs)
	return changed
}

// publish stores a state, and logs in what its inventory differs from the one before. Only Run's goroutine
// publishes.
func (m *Monitor) publish(next core.State) (changed bool) {
	prev := m.cell.Load()
	m.keeper.offer(prev, next)
	m.said.log(m.log, next)
	if next.Inventory.Equal(prev.Inventory) {
		if next.Inventory.Proposed().Equal(prev.Inventory.Proposed()) { // else other agents must be told of the numbers
			next.Inventory = prev.Inventory
		}
		m.cell.Replace(next)
		return false
	}
	m.cell.Store(next)
	m.gauges.transitions(prev.Inventory, next.Inventory)
	logChange(m.log, prev.Inventory, next.Inventory)
	return true
}
