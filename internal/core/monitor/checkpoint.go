package monitor

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	savePause  = time.Second      // between two writes
	saveEvery  = 5 * time.Minute  // interval of writes for what is recorded beside conditions
	saveAtMost = 10 * time.Second // one write, by a disk that does not hang
	lookEvery  = 30 * time.Second // whether the file was removed
)

// checkpointer wakes the goroutine that writes checkpoints, which may wait for a disk.
type checkpointer struct {
	boot     string
	changed  chan struct{}     // capacity 1: a write is due
	requests chan chan<- error // capacity 1 each; nil without a store
}

func newCheckpointer(store Store) checkpointer {
	c := checkpointer{changed: make(chan struct{}, 1)}
	if store != nil {
		c.requests = make(chan chan<- error)
	}
	return c
}

// offer wakes the writer if something has changed that must outlive the process.
func (c checkpointer) offer(prev, next core.State) {
	if slices.EqualFunc(prev.Ledger.Conditions(), next.Ledger.Conditions(), equalButProgress) &&
		slices.Equal(prev.Snapshot.Devices, next.Snapshot.Devices) &&
		slices.Equal(prev.Snapshot.NVLinks(), next.Snapshot.NVLinks()) && prev.Maintenance == next.Maintenance &&
		prev.Binding.Equal(next.Binding) {
		return
	}
	watch.Notify(c.changed)
}

// equalButProgress reports whether two conditions differ in nothing but progress, which begins again after a restart.
func equalButProgress(a, b health.Condition) bool {
	a.Count, a.CleanChecks, a.ClearingSince = b.Count, b.CleanChecks, b.ClearingSince
	return a == b
}

// startCheckpoints starts the goroutine that writes the state after each change, at most once per savePause, and a last time
// when ctx ends. The returned function waits for that, but only for a moment: a disk can hang.
func (m *Monitor) startCheckpoints(ctx context.Context) (finish func()) {
	if m.store == nil {
		return func() {}
	}
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(done)
		m.writeCheckpoints(ctx)
	}()
	return func() {
		cancel()
		if !watch.Await(context.Background(), done, stopAtMost/3) {
			m.log.Warn("last state not written in time")
		}
	}
}

func (m *Monitor) writeCheckpoints(ctx context.Context) {
	task := m.tasks.Register("history")
	defer task.Done()
	every := time.NewTicker(saveEvery)
	defer every.Stop()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	changed, pauseOver := m.checkpoints.changed, (<-chan time.Time)(nil)
	save := m.saver()
	for {
		task.Heartbeat(saveEvery)
		var reply chan<- error
		select {
		case <-changed:
		case <-every.C:
		case <-look.C:
			task.Heartbeat(saveAtMost)
			if !m.store.Missing() {
				continue
			}
		case reply = <-m.checkpoints.requests:
		case <-pauseOver:
			changed, pauseOver = m.checkpoints.changed, nil
			continue
		case <-ctx.Done():
			_ = save() // what changed during the last pause; the store has logged an error
			return
		}
		task.Heartbeat(saveAtMost)
		err := save()
		if reply != nil {
			reply <- err
		}
		changed, pauseOver = nil, time.After(savePause)
	}
}

// saver returns a function that saves the state. A history of another node is set aside first, not replaced.
func (m *Monitor) saver() func() error {
	var setAside *core.ForeignHistory
	return func() error {
		s := m.State()
		if s.Foreign != nil && s.Foreign != setAside {
			setAside = s.Foreign
			m.store.SetAside(setAside)
		}
		return m.store.Save(s.Checkpoint(m.checkpoints.boot))
	}
}

// ErrNoStore is returned if nothing outlives the agent because it has no state directory.
var ErrNoStore = errors.New("no state directory is set")

// NotSavedError is returned if the state is not on disk, so that a restart of the agent loses it.
type NotSavedError struct{ Err error } // ErrNoStore, the store's error, or that of a context: the disk was too slow

// Error states the cause.
func (e *NotSavedError) Error() string {
	if errors.Is(e.Err, context.DeadlineExceeded) {
		return "not on disk yet: the disk does not answer in time"
	}
	return "not on disk: " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *NotSavedError) Unwrap() error { return e.Err }

// Save writes the state now. It returns nil if the state is on disk then, so that the next process of the agent reads it, and
// otherwise *NotSavedError.
func (m *Monitor) Save(ctx context.Context) error {
	if err := m.checkpoints.save(ctx); err != nil {
		return &NotSavedError{err}
	}
	return nil
}

func (c checkpointer) save(ctx context.Context) error {
	if c.requests == nil {
		return ErrNoStore
	}
	reply := make(chan error, 1)
	select {
	case c.requests <- reply:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-reply:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// restore loads the history. No device is offered before, as a GPU that answers may have an unresolved fault. If the disk
// hangs, it logs that and keeps waiting.
func (m *Monitor) restore(ctx context.Context) {
	defer close(m.restored)
	if m.store == nil {
		return
	}
	type history struct {
		record core.Checkpoint
		boot   string
	}
	loaded, store := make(chan history, 1), m.store // the goroutine may outlive this function
	go func() {
		task := m.tasks.Register("history")
		defer task.Done()
		task.Heartbeat(restoreAtMost)
		record, boot := store.Load()
		loaded <- history{record, boot}
	}()
	slow := time.NewTimer(restoreAtMost)
	defer slow.Stop()
	for {
		m.task.Heartbeat(0)
		select {
		case h := <-loaded:
			m.checkpoints.boot = h.boot
			m.now() // the times of the record are by the wall clock of now
			m.state.Replace(core.Restore(m.cfg, h.record, h.boot))
			m.listPriorAt = time.Now().Add(listPriorAfter)
			return
		case <-slow.C:
			m.log.Error("health history not read in time, no device is offered without it: check the disk of the state directory")
			m.readNothing(gpu.NoDriver(gpu.DriverPending, "the health history is not read yet: does the disk hang?"))
		case <-ctx.Done():
			m.store = nil
			return
		}
	}
}

// listPrior lists the devices of the history if the driver is slow to answer for the first time.
func (m *Monitor) listPrior() {
	if s := m.State(); s.AwaitsDriver() && !time.Now().Before(m.listPriorAt) {
		m.update(func(s core.State, now time.Time) core.State { return s.ListPrior(m.cfg, now) })
	}
}

// Restored waits until Run has loaded the history, so that State includes it, and reports whether that was before the end of
// ctx.
func (m *Monitor) Restored(ctx context.Context) bool {
	select {
	case <-m.restored:
		return true
	case <-ctx.Done():
		return false
	}
}
