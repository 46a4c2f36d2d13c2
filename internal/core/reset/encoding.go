package reset

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
)

const version = 1

// What a state has at most.
const (
	MaxBytes = 1 << 20 // of its text

	maxRecords = 128 // GPUs; those that are not there any more go first
	maxID      = 96  // bytes, of a UUID: NVML_DEVICE_UUID_V2_BUFFER_SIZE
	maxCause   = 64  // bytes
	maxText    = 512 // bytes
	maxCount   = 1000
	maxBegun   = 1 << 53
)

// Encode returns the text of a state.
func (s State) Encode() ([]byte, error) {
	s.Version = version
	return durable.Encode(s)
}

// Parse reads a state. It fails with *durable.VersionError, *durable.ContentError or an error of the JSON: then nothing is known.
func Parse(text []byte) (State, error) { return durable.Parse(text, MaxBytes, version, State.check) }

// check returns why the state can't be one that this program wrote.
func (s State) check() error {
	if len(s.Records) > maxRecords {
		return &durable.ContentError{Why: fmt.Sprintf("it has %d GPUs, and %d are the most", len(s.Records), maxRecords)}
	}
	if err := durable.Check(times{&s}); err != nil {
		return err
	}
	if s.Begun > maxBegun {
		return &durable.ContentError{Why: fmt.Sprintf("it has %d resets, and %d are the most", s.Begun, uint64(maxBegun))}
	}
	running := 0
	for i := range s.Records {
		r := &s.Records[i]
		why := r.check(s.Begun)
		if r.Running != nil {
			running++
		}
		switch {
		case why != "":
		case i > 0 && s.Records[i-1].GPU >= r.GPU:
			why = "it is there twice, or not in order"
		case running > 1:
			why = "another GPU is reset at the same time"
		}
		if why != "" {
			return &durable.ContentError{GPU: r.GPU, Why: why}
		}
	}
	return nil
}

func (r *Record) check(begun uint64) string {
	counts := func(n int) bool { return n >= 0 && n <= maxCount }
	last, running := r.Last, r.Running
	switch {
	case r.GPU == "" || len(r.GPU) > maxID:
		return "no UUID"
	case !counts(r.Attempts) || !counts(r.Refusals) || len(r.NotBegun) > maxText:
		return "its attempts can't be"
	case last == nil && r.Attempts+r.Refusals > 0:
		return "it has attempts without an end"
	case len(r.Day) > mostInDay || slices.ContainsFunc(r.Day, time.Time.IsZero):
		return "its attempts of a day can't be"
	case last == nil && r.NotBegun == "" && !r.Retry.IsZero():
		return "it waits after no reset"
	case last != nil && (last.Outcome == Cancelled || last.At.IsZero() || last.Took < 0 || len(last.Cause) > maxCause || len(last.Text) > maxText):
		return "its last end can't be"
	case last != nil && last.Number > begun, running != nil && running.Number > begun:
		return "its number is of no reset that was begun"
	case running != nil && (running.Number == 0 || running.Began.IsZero() || len(running.Cause) > maxCause):
		return "its reset can't be"
	}
	return ""
}
