package proof

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

const version = 1

// What a state has at most.
const (
	MaxBytes = 2 << 20 // of its text

	maxRecords = 256 // GPUs; those that are not there any more go first
	maxSummary = 256 // bytes
	maxDetail  = 200 // bytes
	maxValues  = 32
	maxName    = 64 // bytes, of a value
	maxCount   = 1000
)

// VersionError means that the text is of a program with another format.
type VersionError struct{ Version int }

// Error names both versions.
func (e *VersionError) Error() string {
	return fmt.Sprintf("its version is %d, and this program reads %d", e.Version, version)
}

// ContentError means that the text is not of this program.
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
func (s State) Encode() ([]byte, error) {
	s.Version = version
	text, err := json.MarshalIndent(s, "", "\t")
	return append(text, '\n'), err
}

// Parse reads a state. It fails with *VersionError, *ContentError or an error of the JSON: then nothing is known.
func Parse(text []byte) (State, error) {
	var s State
	if len(text) > MaxBytes {
		return s, &ContentError{Why: fmt.Sprintf("it has %d bytes, and %d are the most", len(text), MaxBytes)}
	}
	var head struct{ Version int } // first: the rest of another version is unknown
	if err := json.Unmarshal(text, &head); err != nil {
		return s, err
	}
	if head.Version != version {
		return s, &VersionError{head.Version}
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return State{}, err
	}
	if err := s.check(); err != nil {
		return State{}, err
	}
	return s, nil
}

// check returns why the state can't be one that this program wrote.
func (s State) check() error {
	if len(s.Records) > maxRecords {
		return &ContentError{Why: fmt.Sprintf("it has %d GPUs, and %d are the most", len(s.Records), maxRecords)}
	}
	if !s.plausible() {
		return &ContentError{Why: "it has a time that no clock shows"}
	}
	numbers := map[uint64]bool{}
	for i := range s.Records {
		r := &s.Records[i]
		why := r.check()
		switch {
		case why != "":
		case i > 0 && s.Records[i-1].GPU >= r.GPU:
			why = "it is there twice, or not in order"
		case r.Running != nil && (numbers[r.Running.Number] || r.Running.Number > s.Begun):
			why = fmt.Sprintf("its proof has the number %d", r.Running.Number)
		}
		if why != "" {
			return &ContentError{r.GPU, why}
		}
		if r.Running != nil {
			numbers[r.Running.Number] = true
		}
	}
	return nil
}

// plausible reports whether all times are within their bounds.
func (s State) plausible() bool {
	all := []time.Time{s.BootTime}
	s.eachTime(func(t *time.Time) { all = append(all, *t) })
	for i := range s.Records {
		if t := s.Records[i].Tries; t != nil {
			all = append(all, t.Retry)
		}
	}
	return !slices.ContainsFunc(all, func(t time.Time) bool { return !t.IsZero() && (t.Before(earliest) || t.After(latest)) })
}

func (r *Record) check() string {
	switch {
	case r.GPU == "":
		return "no UUID"
	case r.Since.IsZero():
		return "no time"
	case r.NeedsService && !r.Failed():
		return "it needs service without a failure"
	case r.Tries != nil && (r.Tries.Count < 0 || r.Tries.Count > maxCount || r.Tries.At.IsZero() || len(r.Tries.Detail) > maxDetail):
		return "its tries can't be"
	case r.Running != nil && r.Running.Began.IsZero():
		return "its proof has no beginning"
	case r.Last == nil:
		return ""
	case r.Last.At.IsZero() || r.Last.Took < 0 || len(r.Last.Summary) > maxSummary:
		return "its verdict can't be"
	case len(r.Last.Values) > maxValues:
		return fmt.Sprintf("it has %d values", len(r.Last.Values))
	}
	for name := range r.Last.Values {
		if !isName(name) {
			return fmt.Sprintf("%q is no name of a value", name)
		}
	}
	return ""
}

// bounded are the values that are kept: finite numbers with the name of a label, the first of them by name.
func bounded(values map[string]float64) map[string]float64 {
	kept := map[string]float64{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if v := values[name]; v-v == 0 && isName(name) && len(kept) < maxValues { // not 0 for infinity, and for what is no number
			kept[name] = v
		}
	}
	if len(kept) == 0 {
		return nil
	}
	return kept
}

// isName reports whether a text names a value: letters, digits and '_', as in a name of Prometheus.
func isName(text string) bool {
	for i, c := range text {
		letter := c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return text != "" && len(text) <= maxName
}
