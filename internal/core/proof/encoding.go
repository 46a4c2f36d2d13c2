package proof

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
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
			return &durable.ContentError{GPU: r.GPU, Why: why}
		}
		if r.Running != nil {
			numbers[r.Running.Number] = true
		}
	}
	return nil
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
	case len(r.Day) > mostInDay || slices.ContainsFunc(r.Day, time.Time.IsZero):
		return "its proofs of a day can't be"
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
