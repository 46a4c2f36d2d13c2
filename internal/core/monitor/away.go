package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// errAway ends a session, or a wait for one, because maintenance has begun; or maintenance, because it is over.
var errAway = errors.New("maintenance begins or ends")

// HeldError says that the driver was left alone, but that this process still holds it, because a call about it
// has not come back.
type HeldError struct{ Call string } // "" = it is not known which

func (e *HeldError) Error() string {
	return fmt.Sprintf("maintenance has begun, but a driver call (%s) does not return, so this process still holds the driver: "+
		"stop the process if that must not be", cmp.Or(e.Call, "unknown"))
}

// Quiesce leaves the driver alone until Resume, or until a time if that is not zero: every handle and descriptor
// is given back, so that a GPU can be reset or cut up and the kernel module unloaded. Units stay listed and take no
// work. It returns when nothing is held any more, and fails with *HeldError if a call hangs; what was published
// stands then, too. It lasts over a restart of the agent, not over a reboot.
func (m *Monitor) Quiesce(ctx context.Context, until time.Time) error {
	err := m.order(ctx, func(s core.State, now time.Time) (core.State, error) {
		away := core.Maintenance{Since: now.UTC(), Until: until.UTC()}
		if until.IsZero() {
			away.Until = time.Time{}
		}
		if !away.Active(now) {
			return s, &core.ConfigError{Key: "until", Value: until.Format(time.RFC3339), Remedy: "want a time to come"}
		}
		if s.Maintenance.Active(now) {
			away.Since = s.Maintenance.Since
		}
		return s.EnterMaintenance(m.cfg, now, away), nil
	})
	if err != nil {
		return err
	}
	return m.released(ctx)
}

// released waits until nothing of the driver is held.
func (m *Monitor) released(ctx context.Context) error {
	held := m.held.Load()
	if held == nil {
		return nil
	}
	t := time.NewTimer(releaseAtMost)
	defer t.Stop()
	select {
	case <-held:
		return nil
	case <-t.C:
		return &HeldError{nameOf(m.Stats().Calls)}
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ErrNotQuiesced says that there is nothing to resume.
var ErrNotQuiesced = errors.New("the driver is in use already: nothing to resume")

// Resume ends what Quiesce began. It returns at once: what is offered follows with the first reading.
func (m *Monitor) Resume(ctx context.Context) error {
	return m.order(ctx, func(s core.State, now time.Time) (core.State, error) {
		if !s.Maintenance.Active(now) {
			return s, ErrNotQuiesced
		}
		return s.ExitMaintenance(), nil
	})
}

func (m *Monitor) isAway() bool {
	now := m.now()
	return m.State().Maintenance.Active(now)
}

// away sits out a maintenance, if there is one.
//
//	order    Quiesce ............ published, then          Resume ...
//	session  read, wait ......... left, closed             .......... opened, read
//	adapters healthy ............ maintenance ................................... healthy
func (m *Monitor) away(ctx context.Context) {
	for m.isAway() && ctx.Err() == nil {
		m.update(func(s core.State, now time.Time) core.State {
			return s.EnterMaintenance(m.cfg, now, s.Maintenance) // an agent that has just started knows only that
		})
		if _, err := standby[struct{}](ctx, m, nil); errors.Is(err, errAway) {
			m.log.Info("maintenance is over")
		}
	}
	if away := m.State().Maintenance; !away.Since.IsZero() && ctx.Err() == nil {
		m.publish(m.State().ExitMaintenance())
	}
}
