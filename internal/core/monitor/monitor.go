// Package monitor owns the driver: it opens a session, folds its readings and events into inventories
// and hands out the latest. It is the only impure part above the driver itself.
//
// Two goroutines touch a session, because NVML calls can hang and can't be cancelled: the reader runs
// one request at a time, the waiter sits in the event wait. The monitor's own goroutine never calls the
// driver, so that it can always publish, answer and stop.
package monitor

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Session is an open driver. Wait is called from one goroutine, Busy from any, the others from one
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

	// Busy are the calls in progress, the event wait excepted; the oldest first.
	Busy() []core.Call

	// Close ends the session. No handle outlives it.
	Close() error
}

// Pace of the parts that nobody needs to configure.
const (
	waitAtMost   = time.Second             // one event wait
	watchEvery   = 500 * time.Millisecond  // look for a call that is stuck
	waitPause    = time.Second             // between event waits that fail
	leaveAtMost  = 1500 * time.Millisecond // for the workers to leave the driver; more than waitAtMost
	openFirst    = 250 * time.Millisecond
	openInterval = 10 * time.Second
)

// Monitor follows one machine. Make one with New, then call Run once; the other methods are safe for
// concurrent use before, during and after Run.
type Monitor struct {
	open  func() (Session, error)
	cfg   core.Config
	log   *slog.Logger
	cell  *Cell[*core.Inventory]
	usage chan usageRequest
	fold  fold // owned by Run
}

type usageRequest struct{ reply chan<- usageReply } // capacity 1: answering never blocks

type usageReply struct {
	usage []core.Usage
	err   error
}

// New returns a monitor that opens sessions with open, which is called from a goroutine of its own,
// never twice at once.
func New(open func() (Session, error), cfg core.Config, log *slog.Logger) *Monitor {
	inv := core.Build(core.NoDriver(core.DriverPending, "not asked yet"), core.Ledger{}, cfg)
	return &Monitor{
		open: open, cfg: cfg, log: log,
		cell:  NewCell(inv),
		usage: make(chan usageRequest),
		fold:  fold{cfg: cfg, inventory: inv},
	}
}

// Current is the latest inventory; never nil.
func (m *Monitor) Current() *core.Inventory { return m.cell.Load() }

// Watch yields the present inventory and then each that differs, until ctx ends. A slow caller skips.
func (m *Monitor) Watch(ctx context.Context) iter.Seq[*core.Inventory] { return m.cell.Watch(ctx) }

// Usage reads the live numbers. It fails with core.ErrNoDriver while no session is open and with the
// context's error when the driver does not answer in time.
func (m *Monitor) Usage(ctx context.Context) ([]core.Usage, error) {
	reply := make(chan usageReply, 1)
	select {
	case m.usage <- usageRequest{reply}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case r := <-reply:
		return r.usage, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Run follows the machine until ctx ends (nil) or a new process is needed (core.ErrDriverStale). It
// returns within two seconds of the end of ctx even if the driver hangs; a hung call is abandoned.
func (m *Monitor) Run(ctx context.Context) error {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = openFirst, openInterval
	for {
		session, err := m.connect(ctx)
		if err == nil {
			began := time.Now()
			err = m.follow(ctx, session)
			if time.Since(began) >= openInterval { // else it opens only to fail again
				retry.Reset()
			}
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end of ctx is what Run waits for, whatever else went wrong meanwhile
		}
		m.publish(m.fold.noDriver(err))
		if errors.Is(err, core.ErrDriverStale) {
			return err
		}
		if !m.pause(ctx, retry.NextBackOff()) {
			return nil
		}
	}
}

// connect opens a session. Opening can hang like any call, so it runs beside the caller; a session that
// comes when nobody wants it any more is closed.
func (m *Monitor) connect(ctx context.Context) (Session, error) {
	type opened struct {
		session Session
		err     error
	}
	came, over := make(chan opened), make(chan struct{})
	go func() {
		defer close(over)
		s, err := m.open()
		select {
		case came <- opened{s, err}:
		case <-ctx.Done():
			if err == nil {
				_ = s.Close()
			}
		}
	}()
	stuck := time.NewTimer(m.cfg.Health.Deadline)
	defer stuck.Stop()
	for {
		select {
		case o := <-came:
			return o.session, o.err
		case <-stuck.C:
			m.publish(m.fold.noDriver(errOpenStuck))
		case r := <-m.usage:
			r.reply <- usageReply{err: core.ErrNoDriver}
		case <-ctx.Done():
			m.abandon(over, "nvmlInit")
			return nil, ctx.Err()
		}
	}
}

// abandon waits for work in the driver to be over, but not for ever: what hangs there can't be helped.
func (m *Monitor) abandon(over <-chan struct{}, call string) {
	t := time.NewTimer(leaveAtMost)
	defer t.Stop()
	select {
	case <-over:
	case <-t.C:
		m.log.Warn("driver call abandoned", "call", call)
	}
}

var errOpenStuck = errors.New("the driver does not answer (nvmlInit)")

// pause waits for d; false if ctx ends first.
func (m *Monitor) pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			return true
		case r := <-m.usage:
			r.reply <- usageReply{err: core.ErrNoDriver}
		case <-ctx.Done():
			return false
		}
	}
}

// publish stores an inventory that differs from the current one, and logs the difference.
func (m *Monitor) publish(inv *core.Inventory) (changed bool) {
	prev := m.cell.Load()
	if inv.Equal(prev) {
		return false
	}
	m.cell.Store(inv)
	logChange(m.log, prev, inv)
	return true
}
