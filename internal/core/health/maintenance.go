package health

import "time"

// Maintenance is a time during which the agent does not call the driver, by an operator's command, so that a GPU
// can be reset or partitioned and the kernel module unloaded. The zero value is none.
type Maintenance struct {
	Since time.Time
	Until time.Time // end; zero = only an operator's command ends it
}

// Active reports whether maintenance has begun and has not ended.
func (m Maintenance) Active(now time.Time) bool {
	return !m.Since.IsZero() && (m.Until.IsZero() || now.Before(m.Until))
}

// String returns the reason that the driver and its units report. It does not change during maintenance.
func (m Maintenance) String() string {
	const released = "driver released by quiesce"
	if m.Until.IsZero() {
		return released
	}
	return released + " until " + m.Until.UTC().Format("2006-01-02T15:04:05Z")
}
