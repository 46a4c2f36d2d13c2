package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// errMaintenance ends a session, or a wait for one, because maintenance has begun, and maintenance because it has ended.
var errMaintenance = errors.New("maintenance began or ended")

// HeldError is returned if maintenance has begun, but this process still uses the driver because a call does not return.
type HeldError struct{ Call string } // "" = it is not known which

// Error names the call and the remedy.
func (e *HeldError) Error() string {
	return fmt.Sprintf("maintenance has begun, but a driver call (%s) does not return, so this process still holds the driver: "+
		"stop the process if that must not be", cmp.Or(e.Call, "unknown"))
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

func (m *Monitor) inMaintenance() bool {
	now := m.now()
	return m.State().Maintenance.Active(now)
}

// awaitMaintenanceEnd waits for the end of maintenance, if it is active.
//
//	command  Quiesce ............ published, then          Resume ...
//	session  read, wait ......... closed .................. opened, read
//	adapters healthy ............ maintenance ................................... healthy
func (m *Monitor) awaitMaintenanceEnd(ctx context.Context) {
	for m.inMaintenance() && ctx.Err() == nil {
		m.update(func(s core.State, now time.Time) core.State {
			return s.EnterMaintenance(m.cfg, now, s.Maintenance) // after a restart: the checkpoint has the times only
		})
		if _, err := serveWithoutSession[struct{}](ctx, m, nil); errors.Is(err, errMaintenance) {
			m.log.Info("maintenance ended")
		}
	}
	if s := m.State(); !s.Maintenance.Since.IsZero() && ctx.Err() == nil {
		m.publish(s.ExitMaintenance())
	}
}
