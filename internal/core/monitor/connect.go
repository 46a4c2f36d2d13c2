package monitor

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

var errOpenStuck = errors.New("the driver does not answer (nvmlInit)")

// connect opens a session. Opening can hang like any call, so it runs beside the caller; a session that
// comes when nobody wants it any more is closed. Without a session over is closed as soon as nothing is held.
func (m *Monitor) connect(ctx context.Context, over chan<- struct{}) (Session, error) {
	type opened struct {
		session Session
		err     error
	}
	wanted, unwanted := context.WithCancel(ctx)
	defer unwanted()
	came, gone := make(chan opened), make(chan struct{})
	go func() {
		defer close(gone)
		s, err := m.open()
		if err != nil {
			close(over)
		}
		select {
		case came <- opened{s, err}:
		case <-wanted.Done():
			if err == nil {
				m.close(ctx, s, over)
			}
		}
	}()
	patient, cancel := context.WithTimeout(ctx, m.cfg.Health.Deadline)
	defer cancel()
	o, err := standby(patient, m, came)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		m.noDriver(errOpenStuck)
		o, err = standby(ctx, m, came)
	}
	if err != nil {
		unwanted()
		m.abandon(gone, "nvmlInit")
		return nil, err
	}
	return o.session, o.err
}

// pause waits for d, the end of ctx or a maintenance, and reports whether it was cut short because something of the
// driver came or went.
func (m *Monitor) pause(ctx context.Context, d time.Duration) (appeared bool) {
	before := m.driverFingerprint()
	for end := time.Now().Add(d); time.Now().Before(end); {
		t := time.NewTimer(min(time.Until(end), watchEvery))
		_, err := standby(ctx, m, t.C)
		t.Stop()
		if err != nil {
			return false // the caller goes on to see why
		}
		if m.driverFingerprint() != before {
			return true
		}
	}
	return false
}

// standby does everything that needs no session until something arrives. It fails if ctx ends first, and with
// errAway if maintenance begins or ends.
func standby[T any](ctx context.Context, m *Monitor, until <-chan T) (v T, err error) {
	away := m.isAway()
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for m.isAway() == away {
		m.turns.Heartbeat(watchEvery)
		select {
		case v = <-until:
			return v, nil
		case <-m.usage.asked:
			m.usage.finish(nil, core.ErrNoDriver)
		case o := <-m.orders:
			m.obey(o)
		case o := <-m.told:
			m.observe(o)
		case <-m.moved:
			m.settle()
		case <-tick.C:
			if m.State().NeedsTick() {
				m.observe()
			}
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
	return v, errAway
}

// close ends a session and closes over when nothing of it is held any more. A call that is still in the driver
// keeps it open: another try follows, until another session has taken its place and cares for it.
func (m *Monitor) close(ctx context.Context, s Session, over chan<- struct{}) {
	mine := m.held.Load()
	err := s.Close()
	if err != nil {
		m.log.Warn("closing the driver", "error", err)
	}
	for ; err != nil; err = s.Close() {
		rest(ctx, closePause)
		if ctx.Err() != nil || m.held.Load() != mine {
			return
		}
	}
	m.gauges.set(func(s *Stats) { s.Calls = nil })
	close(over)
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
