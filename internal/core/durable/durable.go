// Package durable has what the states of decisions that are kept on disk have in common: a version, bounds, and times that follow the wall clock when that
// is set.
package durable

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// VersionError means that a text is of a program with another format.
type VersionError struct{ Version, Reads int }

// Error names both versions.
func (e *VersionError) Error() string {
	return fmt.Sprintf("its version is %d, and this program reads %d", e.Version, e.Reads)
}

// ContentError means that a text is not of this program.
type ContentError struct {
	GPU gpu.DeviceID // whose record it is; "" = of the whole
	Why string
}

// Error names the GPU, and why.
func (e *ContentError) Error() string {
	if e.GPU == "" {
		return e.Why
	}
	return "the record of " + string(e.GPU) + ": " + e.Why
}

// Encode returns the text of a state.
func Encode(state any) ([]byte, error) {
	text, err := json.MarshalIndent(state, "", "\t")
	return append(text, '\n'), err
}

// Parse reads a state of a version from a text of at most so many bytes. It fails with *VersionError, *ContentError, an error of the JSON, or that of check,
// and returns the zero state then: nothing is known.
func Parse[S any](text []byte, most, version int, check func(S) error) (S, error) {
	var none, s S
	if len(text) > most {
		return none, &ContentError{Why: fmt.Sprintf("it has %d bytes, and %d are the most", len(text), most)}
	}
	var head struct{ Version int } // first: the rest of another version is unknown
	if err := json.Unmarshal(text, &head); err != nil {
		return none, err
	}
	if head.Version != version {
		return none, &VersionError{head.Version, version}
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return none, err
	}
	if err := check(s); err != nil {
		return none, err
	}
	return s, nil
}

// The bounds of all times. Those between them can be written, also after they were moved by as much as a time.Duration can be.
var (
	earliest = time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC)
	latest   = time.Date(9000, 1, 1, 0, 0, 0, 0, time.UTC)
)

// Clock is a time without its monotonic part, as it is on disk.
func Clock(now time.Time) time.Time { return now.UTC().Round(0) }

// State is a state that may be changed. All its times are on the clock of one boot.
type State interface {
	// Booted returns the ID of the boot of the last decision, and when that was. They may be changed.
	Booted() (id *string, at *time.Time)

	EachPast(do func(*time.Time)) // the times at which something was
	EachDue(do func(*time.Time))  // the times that are to come
}

// SetClock moves the times of a state if the wall clock was set since: within a boot, the boot time shows by how much. Otherwise only a time in the
// future shows it: the latest is moved to now, and all others by as much. So their order and distances stay. boot and booted are as they are now.
func SetClock(s State, boot string, booted, now time.Time) {
	id, at := s.Booted()
	set := booted.Sub(*at)
	switch known := !at.IsZero() && !booted.IsZero(); {
	case *id == "" || *id != boot || !known:
		*id, *at = boot, Clock(booted)
	case set.Abs() > health.ClockTolerance:
		shift(s, set)
		*at = Clock(booted)
	}
	var last time.Time
	s.EachPast(func(t *time.Time) {
		if t.After(last) {
			last = *t
		}
	})
	if last.After(now) {
		shift(s, now.Sub(last))
	}
}

func shift(s State, d time.Duration) {
	move := func(t *time.Time) {
		if *t = health.ShiftTime(*t, d); !t.IsZero() && t.Before(earliest) {
			*t = earliest
		}
	}
	s.EachPast(move)
	s.EachDue(move)
}

// Check returns *ContentError if a state has a time out of bounds.
func Check(s State) error {
	ok := true
	see := func(t *time.Time) { ok = ok && (t.IsZero() || !t.Before(earliest) && !t.After(latest)) }
	_, at := s.Booted()
	see(at)
	s.EachPast(see)
	s.EachDue(see)
	if !ok {
		return &ContentError{Why: "it has a time that no clock shows"}
	}
	return nil
}
