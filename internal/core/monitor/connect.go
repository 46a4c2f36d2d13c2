package monitor

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

var errOpenStuck = errors.New("the driver does not answer (nvmlInit)")

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
	patient, cancel := context.WithTimeout(ctx, m.cfg.Health.Deadline)
	defer cancel()
	o, ok := standby(patient, m, came)
	if !ok && ctx.Err() == nil {
		m.noDriver(errOpenStuck)
		o, ok = standby(ctx, m, came)
	}
	if !ok {
		m.abandon(over, "nvmlInit")
		return nil, ctx.Err()
	}
	return o.session, o.err
}

// pause waits for d; false if ctx ends first.
func (m *Monitor) pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	_, ok := standby(ctx, m, t.C)
	return ok
}

// standby does everything that needs no session until something arrives; false if ctx ends first.
func standby[T any](ctx context.Context, m *Monitor, until <-chan T) (v T, ok bool) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case v = <-until:
			return v, true
		case r := <-m.usage:
			r.reply <- usageReply{err: core.ErrNoDriver}
		case o := <-m.orders:
			m.obey(o)
		case o := <-m.told:
			m.observe(o)
		case <-tick.C:
			if m.State().Restless() {
				m.observe()
			}
		case <-ctx.Done():
			return v, false
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
