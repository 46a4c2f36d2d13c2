package core

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// All times in a State are on one steady clock: differences between them are elapsed time. When the wall clock is
// set, by an operator or by NTP, every time is moved by the same amount (Shift), so that order and differences do
// not change. Within a process, the caller uses the monotonic clock to detect this. Over a restart of the agent
// the boot time shows it, because the time since the boot is not affected.
//
//	wall clock   10:00 XID 119   10:01 reset   08:01 (2 h back)        08:02
//	State        10:00 XID 119   10:01 reset   08:00, 08:01 (Shift)    08:02: the reset is still after the XID

// Boot is one boot of the node.
type Boot struct {
	ID   string    // random(4): /proc/sys/kernel/random/boot_id; "" = unknown
	Time time.Time // when it booted by the present wall clock: now minus the time since the boot (CLOCK_BOOTTIME); zero = unknown
}

// Shift returns s with every time moved by d, because the wall clock was set by d. The times in the health of
// units change with the next call that rebuilds the inventory.
func (s State) Shift(d time.Duration) State {
	s.Ledger = s.Ledger.Shift(d)
	s.kernelLog = s.kernelLog.shift(d)
	s.Maintenance = s.Maintenance.Shift(d)
	s.Release.Since = health.ShiftTime(s.Release.Since, d)
	s.bootTime = health.ShiftTime(s.bootTime, d)
	s.Allocatable = s.Allocatable.Shift(d)
	return s
}

// Rebase returns r with its times on the present wall clock, which may have been set forward or back since r was
// written. Within one boot, the boot time shows by how much. Otherwise only a time in the future shows it: the
// latest time is then moved to now, or to the boot if the node was booted since, and all others by the same
// amount.
func (r Checkpoint) Rebase(boot Boot, now time.Time) Checkpoint {
	latest, limit := r.latest(), now
	unknown := r.BootID == "" || boot.ID == ""
	switch {
	case boot.Time.IsZero():
	case unknown, r.BootTime.IsZero() && r.BootID == boot.ID:
		r.BootTime = boot.Time
	case r.BootID != boot.ID:
		limit, r.BootTime = boot.Time, boot.Time
	default:
		if d := boot.Time.Sub(r.BootTime); d.Abs() > health.ClockTolerance {
			r, latest = r.shift(d), health.ShiftTime(latest, d)
		}
	}
	if latest.After(limit) {
		r = r.shift(limit.Sub(latest))
		if !boot.Time.IsZero() {
			r.BootTime = boot.Time
		}
	}
	return r
}

// latest is the latest time of an occurrence in the checkpoint.
func (r Checkpoint) latest() time.Time {
	latest := r.ledger().Latest()
	if r.Maintenance.Since.After(latest) {
		return r.Maintenance.Since
	}
	return latest
}

func (r Checkpoint) shift(d time.Duration) Checkpoint {
	r.BootTime, r.Maintenance = health.ShiftTime(r.BootTime, d), r.Maintenance.Shift(d)
	return r.withLedger(r.ledger().Shift(d))
}
