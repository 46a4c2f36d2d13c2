package kmsg

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// clock returns the least and the greatest time that the kernel may give to a line now; false if they are unknown.
type clock func() (least, most time.Duration, ok bool)

// clockTolerance is how much the clocks of a boot may differ from its beginning on.
const clockTolerance = 2 * time.Second

// kernelClock is the clock of the kernel's log, local_clock. No call returns its time. On most machines it runs as the
// hardware does (CLOCK_MONOTONIC_RAW), in a guest of KVM as the clock of the host (about CLOCK_MONOTONIC). Those
// differ by seconds after a day, because time servers correct the second one.
func kernelClock() (least, most time.Duration, ok bool) {
	var raw, corrected unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &raw)
	if errors.Join(err, unix.ClockGettime(unix.CLOCK_MONOTONIC, &corrected)) != nil {
		return 0, 0, false
	}
	a, b := time.Duration(raw.Nano()), time.Duration(corrected.Nano())
	return min(a, b) - clockTolerance, max(a, b) + clockTolerance, true
}

// arrival is a line that was read, with what is known of its time.
type arrival struct {
	line   Line
	logged time.Duration // by the clock of the log; 0 = unknown
	read   time.Time
	since  time.Time // when the log was last known to end before the line; zero = unknown
}

// arrivesAt returns a line that is read now.
func arrivesAt(line Line, logged time.Duration, since time.Time) arrival {
	return arrival{line, logged, time.Now(), since}
}

// aged returns the line with its age now. It is older than its reading. If the end of the log is read at an interval,
// the line is newer than the reading before; otherwise it was read as it was logged.
func (a arrival) aged(now clock) Line {
	bounds := health.Age{Least: time.Since(a.read), Most: time.Since(a.read)}
	if !a.since.IsZero() {
		bounds.Most = time.Since(a.since)
	}
	a.line.Age = byClock(bounds, a.logged, now)
	return a.line
}

// byClock returns the part of an age that agrees with the clock of the log. If no part does, that clock is not as is
// supposed, and the age stays.
func byClock(age health.Age, logged time.Duration, now clock) health.Age {
	if logged == 0 || now == nil {
		return age
	}
	least, most, ok := now()
	part := health.Age{Least: max(age.Least, least-logged), Most: min(age.Most, most-logged)}
	if !ok || part.Least > part.Most {
		return age
	}
	return part
}

// repeats reports whether a line repeats an earlier one with the same fault. Of lines without times it is unknown.
func repeats(earlier, logged time.Duration) bool {
	return logged > 0 && earlier > 0 && (logged-earlier).Abs() < holdFor
}
