package core

import "time"

// All times in a State lie on one steady clock, whose differences are time that has passed. It reads as the wall
// clock does. When the wall clock jumps, by an operator or by NTP, every time is moved by the same amount (Shift), so
// that order and spans stay as they were. Within a process the caller has a monotonic clock for that; over a restart of
// the agent the boot moment shows the jump, NewHealth the uptime does not jump.
//
//	wall clock   10:00 XID 119   10:01 reset   08:01 (2 h back)        08:02
//	State        10:00 XID 119   10:01 reset   08:00, 08:01 (Shift)    08:02: the reset still follows the XID

// Boot is one boot of the machine.
type Boot struct {
	ID   string    // random(4): /proc/sys/kernel/random/boot_id; "" = unknown
	Time time.Time // its moment by the wall clock as it is now: now less proc(5) uptime; zero = unknown
}

// Shift returns s with every time moved by d, NewHealth the wall clock has jumped by d. What is offered is rebuilt at the
// next change, with the moved times.
func (s State) Shift(d time.Duration) State {
	s.Ledger = s.Ledger.Shift(d)
	s.Maintenance = s.Maintenance.Shift(d)
	s.bootTime = ShiftTime(s.bootTime, d)
	s.Inventory = s.Inventory.Shift(d)
	return s
}

// Rebase returns r with its times on the wall clock as it is now. The clock may have jumped since r was kept, in either
// direction. Within one boot the boot moment shows by how much. Otherwise only a time in the future shows it; the
// latest one is then taken to be now, or the boot if there was one since, and the others keep their distance from it.
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
		if d := boot.Time.Sub(r.BootTime); d.Abs() > ClockTolerance {
			r, latest = r.shift(d), ShiftTime(latest, d)
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

// latest is the latest time at which something of the checkpoint happened.
func (r Checkpoint) latest() time.Time {
	latest := r.ledger().Latest()
	if r.Maintenance.Since.After(latest) {
		return r.Maintenance.Since
	}
	return latest
}

func (r Checkpoint) shift(d time.Duration) Checkpoint {
	r.BootTime, r.Maintenance = ShiftTime(r.BootTime, d), r.Maintenance.Shift(d)
	return r.withLedger(r.ledger().Shift(d))
}
