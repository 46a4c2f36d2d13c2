package monitor

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

var errInitHangs = errors.New("the driver does not answer (nvmlInit)")

// connect opens a session. Opening can hang like any call, so it runs in a goroutine of its own; a session that opens after
// connect has returned is closed. Without a session, released is closed as soon as nothing of the driver is held.
func (m *Monitor) connect(ctx context.Context, released chan<- struct{}) (Session, error) {
	type result struct {
		session Session
		err     error
	}
	wanted, cancelOpen := context.WithCancel(ctx)
	defer cancelOpen()
	opened, done := make(chan result), make(chan struct{})
	go func() {
		defer close(done)
		s, err := m.open()
		if err != nil {
			close(released)
		}
		select {
		case opened <- result{s, err}:
		case <-wanted.Done():
			if err == nil {
				m.closeSession(ctx, s, released)
			}
		}
	}()
	bounded, cancel := context.WithTimeout(ctx, m.cfg.Health.CallDeadline)
	defer cancel()
	r, err := serveWithoutSession(bounded, m, opened)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		m.noDriver(errInitHangs)
		r, err = serveWithoutSession(ctx, m, opened)
	}
	if err != nil {
		cancelOpen()
		m.awaitOrAbandon(done, "nvmlInit")
		return nil, err
	}
	return r.session, r.err
}

// pauseBeforeRetry waits for d, the end of ctx or a pause, and reports whether it ended early because the driver's
// fingerprint has changed.
func (m *Monitor) pauseBeforeRetry(ctx context.Context, d time.Duration) (changed bool) {
	before := m.driverFingerprint()
	for end := time.Now().Add(d); time.Now().Before(end); {
		t := time.NewTimer(min(time.Until(end), checkEvery))
		_, err := serveWithoutSession(ctx, m, t.C)
		t.Stop()
		if err != nil {
			return false // the caller checks ctx and the pause
		}
		if m.driverFingerprint() != before {
			return true
		}
	}
	return false
}

// serveWithoutSession handles everything that needs no session until a value arrives. It fails if ctx ends first, and with
// errMaintenance if maintenance or a release of the driver begins or ends.
func serveWithoutSession[T any](ctx context.Context, m *Monitor, until <-chan T) (v T, err error) {
	before := m.pause()
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for m.pause() == before {
		m.task.Heartbeat(checkEvery)
		select {
		case v = <-until:
			return v, nil
		case <-m.usage.requested:
			m.usage.finish(nil, gpu.ErrNoDriver)
		case <-m.limits.requested:
			m.limits.end()
		case c := <-m.commands:
			m.apply(c)
		case o := <-m.reported:
			m.observe(o)
		case <-m.hostChanged:
			m.applyHost()
		case <-tick.C:
			m.passTime()
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
	return v, errMaintenance
}

// closeSession closes a session, and released when nothing of it is held any more. A call that is still in the driver keeps
// the session open: it is closed again until that succeeds or a later session has replaced it.
func (m *Monitor) closeSession(ctx context.Context, s Session, released chan<- struct{}) {
	mine := m.released.Load()
	err := s.Close()
	if err != nil {
		m.log.Warn("closing the driver failed", "error", err)
	}
	for ; err != nil; err = s.Close() {
		if !watch.Sleep(ctx, closePause) || m.released.Load() != mine {
			return
		}
	}
	m.stats.set(func(s *Stats) { s.Calls = nil })
	close(released)
}

// awaitOrAbandon waits for at most stopAtMost until work in the driver is done: a hung call can't be cancelled.
func (m *Monitor) awaitOrAbandon(done <-chan struct{}, call string) {
	if !watch.Await(context.Background(), done, stopAtMost) {
		m.log.Warn("driver call abandoned", "call", call)
	}
}
