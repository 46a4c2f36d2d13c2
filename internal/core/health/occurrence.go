package health

import (
	"slices"
	"time"
)

// Age is how long ago something happened: for at least Least, and for at most Most. The zero value is just now.
type Age struct{ Least, Most time.Duration }

// UnknownAge is the age of what may have happened at any time.
var UnknownAge = Age{Most: 1<<63 - 1}

const (
	// reportDelay is how much later than its age a fault may be reported: an event set is read within seconds, a line
	// of the kernel log waits for two, and clocks differ.
	reportDelay = 10 * time.Second

	// occurrenceSpan is how long an occurrence is kept after it, to find its other reports, if there are newer ones.
	// The kernel log is read within 62 seconds.
	occurrenceSpan = 2 * time.Minute

	// maxOccurrences bounds the occurrences that are kept: one each second for longer than the kernel log is late.
	maxOccurrences = 64
)

// source is where an XID is reported. Each source reports an occurrence at most once.
type source uint8

const (
	sourceEvent       source = iota // NVML's event
	sourceOperational               // an operational event
	sourceKernelLog
)

func (o Observation) source() source {
	switch {
	case o.FromKernelLog:
		return sourceKernelLog
	case o.FromOperational:
		return sourceOperational
	}
	return sourceEvent
}

// Occurrence is one occurrence of a fault, with the sources that have reported it.
type Occurrence struct {
	Earliest, Latest time.Time // when it happened
	FromEvent        bool      `json:",omitzero"`
	FromOperational  bool      `json:",omitzero"`
	FromKernelLog    bool      `json:",omitzero"`
}

// occurrenceOf returns the occurrence of a fault that an observation reports. No other report follows a line that was
// logged before the agent started. If it may have been logged before the latest reset of the GPU or after it, it counts
// as logged after it.
func occurrenceOf(o Observation, now, reset time.Time) Occurrence {
	if !o.Reported.IsZero() {
		now = o.Reported.UTC().Truncate(time.Millisecond)
	}
	seen := Occurrence{Earliest: now.Add(-o.Age.Most).Add(-reportDelay), Latest: now.Add(-o.Age.Least)}
	if o.Backlog && reset.After(seen.Earliest) && seen.Latest.After(reset) {
		seen.Earliest = reset
	}
	*seen.from(o.source()) = true
	return seen
}

// from returns whether a source has reported it, to be changed.
func (c *Occurrence) from(s source) *bool {
	return [...]*bool{&c.FromEvent, &c.FromOperational, &c.FromKernelLog}[s]
}

// withOccurrence appends an occurrence, and drops the first ones that are too old or too many.
func withOccurrence(all []Occurrence, seen Occurrence) []Occurrence {
	for len(all) > 0 && (len(all) >= maxOccurrences || seen.Latest.Sub(all[0].Latest) > occurrenceSpan) {
		all = all[1:]
	}
	return append(all, seen)
}

// find returns the index of the occurrence that a source reports and another one has reported; -1 = there is none. This
// is the one rule for all sources: it is the first occurrence that the source has not reported, if both may have
// happened at the same time. Each source reports an occurrence once and in order, so two reports of one source are two
// occurrences.
func find(all []Occurrence, seen Occurrence, s source) int {
	return slices.IndexFunc(all, func(c Occurrence) bool {
		return !*c.from(s) && seen.Earliest.Before(c.Latest) && c.Earliest.Before(seen.Latest)
	})
}
