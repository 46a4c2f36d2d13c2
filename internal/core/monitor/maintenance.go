package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// errMaintenance ends a session, or a wait for one, because maintenance or a release of the driver for a reset has begun, and these because they have
// ended.
var errMaintenance = errors.New("maintenance, or a release of the driver, began or ended")

// HeldError is returned if this process makes no more calls to the driver, for maintenance or a reset, but still uses it because one does not return.
type HeldError struct{ Call string } // "" = it is not known which

// Error names the call and the remedy.
func (e *HeldError) Error() string {
	return fmt.Sprintf("a driver call (%s) does not return, so this process still holds the driver: stop the process if that must not be", cmp.Or(e.Call, "unknown"))
}

// Quiesce releases the driver until Resume, or until a time if that is not zero: every handle and descriptor is closed, so
// that a GPU can be reset or repartitioned and the kernel module unloaded. Units stay listed and take no work. It returns
// when nothing is held any more, and fails with *HeldError if a call hangs; maintenance has begun then, too. Maintenance
// survives a restart of the agent, not a reboot.
func (m *Monitor) Quiesce(ctx context.Context, until time.Time) error {
	err := m.do(ctx, func(s core.State, now time.Time) (core.State, error) {
		next := health.Maintenance{Since: now.UTC(), Until: until.UTC()}
		if until.IsZero() {
			next.Until = time.Time{}
		}
		if !next.Active(now) {
			return s, &setting.Error{Key: "until", Value: until.Format(time.RFC3339), Remedy: "want a time to come"}
		}
		if s.Maintenance.Active(now) {
			next.Since = s.Maintenance.Since
		}
		return s.EnterMaintenance(m.cfg, now, next), nil
	})
	if err != nil {
		return err
	}
	if err = m.awaitClosed(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("maintenance has begun, but %w", err)
	}
	return err
}

// awaitClosed waits for at most releaseAtMost until nothing of the driver is held, when no session is to be open any more.
func (m *Monitor) awaitClosed(ctx context.Context) error {
	if released := m.released.Load(); released == nil || watch.Await(ctx, released, releaseAtMost) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return &HeldError{oldestCall(m.Stats().Calls)}
}

// ErrNotQuiesced is returned by Resume without maintenance.
var ErrNotQuiesced = errors.New("the driver is in use already: nothing to resume")

// Resume ends the maintenance that Quiesce began. It returns immediately: the inventory follows with the first reading.
func (m *Monitor) Resume(ctx context.Context) error {
	return m.do(ctx, func(s core.State, now time.Time) (core.State, error) {
		if !s.Maintenance.Active(now) {
			return s, ErrNotQuiesced
		}
		return s.ExitMaintenance(), nil
	})
}

// pause is why the driver is not called; the zero value means that it is.
type pause struct {
	maintenance bool
	reset       gpu.DeviceID // for whose reset the driver is released
}

func (m *Monitor) pause() pause {
	now := m.now()
	s := m.State()
	return pause{s.Maintenance.Active(now), s.Host.Ownership.DriverReleased}
}

func (m *Monitor) paused() bool { return m.pause() != pause{} }

// awaitPauseEnd waits for the end of maintenance and of a release of the driver, and reports whether there was one.
//
//	command  Quiesce ............ published, then          Resume ...
//	session  read, wait ......... closed .................. opened, read
//	adapters healthy ............ maintenance ................................... healthy
func (m *Monitor) awaitPauseEnd(ctx context.Context) (paused bool) {
	last := pause{}
	for p := m.pause(); p != (pause{}) && ctx.Err() == nil; p = m.pause() {
		m.logPause(last, p)
		if last, paused = p, true; p.maintenance {
			m.update(func(s core.State, now time.Time) core.State {
				return s.EnterMaintenance(m.cfg, now, s.Maintenance) // after a restart: the checkpoint has the times only
			})
		}
		m.passTime()
		_, _ = serveWithoutSession[struct{}](ctx, m, nil) // until that changes, or ctx ends
	}
	if ctx.Err() == nil {
		m.logPause(last, pause{})
	}
	if s := m.State(); !s.Maintenance.Since.IsZero() && ctx.Err() == nil {
		m.publish(s.ExitMaintenance())
	}
	return paused
}

func (m *Monitor) logPause(was, is pause) {
	if was.maintenance && !is.maintenance {
		m.log.Info("maintenance ended")
	}
	switch {
	case is.reset == was.reset:
	case is.reset != "":
		m.log.Info("driver released for the reset of a GPU", "id", is.reset)
	default:
		m.log.Info("driver is no longer released for a reset", "id", was.reset)
	}
}
