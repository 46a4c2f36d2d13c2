package monitor

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

const (
	keepPause = time.Second     // between two writes
	keepEvery = 5 * time.Minute // what is remembered beside conditions is written so often

	saveAtMost = 10 * time.Second // one write, by a disk that does not hang
)

// keeper wakes the goroutine that may wait for a disk.
type keeper struct {
	boot  string
	dirty <-chan struct{}   // capacity 1
	wake  chan<- struct{}   // dirty, from the other side
	asked chan chan<- error // capacity 1 each; nil without a store
}

func newKeeper(store Store) keeper {
	dirty := make(chan struct{}, 1)
	k := keeper{dirty: dirty, wake: dirty}
	if store != nil {
		k.asked = make(chan chan<- error)
	}
	return k
}

// offer wakes the keeper if something changed that must not be lost with the process.
func (k keeper) offer(prev, next core.State) {
	if slices.EqualFunc(prev.Ledger.Conditions(), next.Ledger.Conditions(), alike) &&
		slices.Equal(prev.Snapshot.Devices, next.Snapshot.Devices) &&
		slices.Equal(prev.Snapshot.NVLinks(), next.Snapshot.NVLinks()) && prev.Maintenance == next.Maintenance &&
		prev.Binding.Equal(next.Binding) {
		return
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// alike reports whether two conditions differ in nothing but progress, which a restart begins anew anyhow.
func alike(a, b core.Condition) bool {
	a.Count, a.CleanChecks, a.ClearingSince = b.Count, b.CleanChecks, b.ClearingSince
	return a == b
}

// keep writes the state whenever it changed, at once and then at most once a pause, and a last time when ctx
// ends. The returned function waits for that, but not for ever: a disk can hang too.
func (m *Monitor) keep(ctx context.Context) (finish func()) {
	if m.store == nil {
		return func() {}
	}
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(done)
		m.write(ctx)
	}()
	return func() {
		cancel()
		t := time.NewTimer(leaveAtMost / 3)
		defer t.Stop()
		select {
		case <-done:
		case <-t.C:
			m.log.Warn("the last state was not written in time")
		}
	}
}

func (m *Monitor) write(ctx context.Context) {
	l := m.board.Register("history")
	defer l.Done()
	every := time.NewTicker(keepEvery)
	defer every.Stop()
	var dirty, rested = m.keeper.dirty, (<-chan time.Time)(nil)
	save := m.saver()
	for {
		l.Heartbeat(keepEvery)
		var kept chan<- error
		select {
		case <-dirty:
		case <-every.C:
		case kept = <-m.keeper.asked:
		case <-rested:
			dirty, rested = m.keeper.dirty, nil
			continue
		case <-ctx.Done():
			_ = save() // what came during the last rest; the store has logged an error
			return
		}
		l.Heartbeat(saveAtMost)
		err := save()
		if kept != nil {
			kept <- err
		}
		dirty, rested = nil, time.After(keepPause)
	}
}

// saver returns a function that saves the state. A history that is another machine's is not replaced but set aside.
func (m *Monitor) saver() func() error {
	var setAside *core.ForeignHistory
	return func() error {
		s := m.State()
		if s.Foreign != nil && s.Foreign != setAside {
			setAside = s.Foreign
			m.store.SetAside(setAside)
		}
		return m.store.Save(s.Checkpoint(m.keeper.boot))
	}
}

// ErrNoStore says that nothing outlives the agent, as it has no state directory.
var ErrNoStore = errors.New("no state directory is set")

// NotSavedError says that a restart of the agent forgets what has happened.
type NotSavedError struct{ Err error } // ErrNoStore, the store's error, or that of a context: the disk was too slow

func (e *NotSavedError) Error() string {
	if errors.Is(e.Err, context.DeadlineExceeded) {
		return "not on disk yet: the disk does not answer in time"
	}
	return "not on disk: " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *NotSavedError) Unwrap() error { return e.Err }

// Save writes the state now. It returns nil if the state is on disk then, so that the next agent knows it, and
// otherwise *NotSavedError.
func (m *Monitor) Save(ctx context.Context) error {
	if m.keeper.asked == nil {
		return &NotSavedError{ErrNoStore}
	}
	kept := make(chan error, 1)
	select {
	case m.keeper.asked <- kept:
	case <-ctx.Done():
		return &NotSavedError{ctx.Err()}
	}
	select {
	case err := <-kept:
		if err != nil {
			return &NotSavedError{err}
		}
		return nil
	case <-ctx.Done():
		return &NotSavedError{ctx.Err()}
	}
}

// recall takes up the history. Nothing is offered without it, as a GPU may be sick that looks well. A disk can hang:
// that is said, and waited for.
func (m *Monitor) recall(ctx context.Context) {
	defer close(m.known)
	if m.store == nil {
		return
	}
	type history struct {
		record core.Checkpoint
		boot   string
	}
	came, store := make(chan history, 1), m.store // who reads may outlive this function
	go func() {
		l := m.board.Register("history")
		defer l.Done()
		l.Heartbeat(recallAtMost)
		record, boot := store.Load()
		came <- history{record, boot}
	}()
	slow := time.NewTimer(recallAtMost)
	defer slow.Stop()
	for {
		m.turns.Heartbeat(0)
		select {
		case h := <-came:
			m.keeper.boot = h.boot
			m.now() // the record is on the wall clock as it is now
			m.cell.Replace(core.Restore(m.cfg, h.record, h.boot))
			return
		case <-slow.C:
			m.log.Error("the health history can't be read and nothing is offered without it: does the disk hang?")
			m.readNothing(core.NoDriver(core.DriverPending, "the health history is not read yet: does the disk hang?"))
		case <-ctx.Done():
			m.store = nil
			return
		}
	}
}

// rest waits for d or the end of ctx.
func rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
