package core

import "time"

// Maintenance is a time during which the agent leaves the driver alone, by an operator's order, so that a GPU can
// be reset or cut up and the kernel module unloaded. The zero value is none.
type Maintenance struct {
	Since time.Time
	Until time.Time // it ends by itself then; zero = by an order only
}

// Active reports whether it has begun and not ended by itself.
func (m Maintenance) Active(now time.Time) bool {
	return !m.Since.IsZero() && (m.Until.IsZero() || now.Before(m.Until))
}

// String says what is going on; stable while it lasts.
func (m Maintenance) String() string {
	const released = "driver released by order"
	if m.Until.IsZero() {
		return released
	}
	return released + " until " + m.Until.UTC().Format("2006-01-02T15:04:05Z")
}
