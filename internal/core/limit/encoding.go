package limit

import (
	"fmt"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

const version = 1

// What a state has at most.
const (
	MaxBytes = 4 << 20 // of its text

	maxRecords   = 4096
	maxPods      = 4096
	maxLeftovers = 4096
	maxUncounted = 4096 // processes of a record
	maxID        = 96   // bytes, of a UUID: NVML_DEVICE_UUID_V2_BUFFER_SIZE
	maxText      = 4096 // bytes: PATH_MAX
)

// Encode returns the text of a state.
func (s Saved) Encode() ([]byte, error) {
	s.Version = version
	return durable.Encode(s)
}

// Parse reads a state. It fails with *durable.VersionError, *durable.ContentError or an error of the JSON: then nothing is known.
func Parse(text []byte) (Saved, error) { return durable.Parse(text, MaxBytes, version, Saved.check) }

// check returns why the state can't be one that this program wrote.
func (s Saved) check() error {
	if len(s.Records) > maxRecords || len(s.Pods) > maxPods || len(s.Leftovers) > maxLeftovers || len(s.Driver) > maxText {
		return &durable.ContentError{Why: fmt.Sprintf("it has %d groups, %d pods and %d leftovers, and %d are the most", len(s.Records), len(s.Pods), len(s.Leftovers), maxRecords)}
	}
	if err := durable.Check(times{&s}); err != nil {
		return err
	}
	switch {
	case !ascends(s.Records, compareRecords), !ascends(s.Pods, comparePods), !ascends(s.Leftovers, compareLeftovers):
		return &durable.ContentError{Why: "something is there twice, or not in order"}
	}
	for i := range s.Records {
		r := &s.Records[i]
		if !isID(r.GPU) || r.Path == "" || len(r.Path) > maxText || len(r.Uncounted) > maxUncounted {
			return &durable.ContentError{GPU: r.GPU, Why: "the group " + r.Path + " can't be one"}
		}
	}
	for i := range s.Pods {
		if p := &s.Pods[i]; !isID(p.GPU) || p.Work.ID == "" || p.Bytes == 0 {
			return &durable.ContentError{GPU: p.GPU, Why: "the limit of " + p.Work.String() + " can't be one"}
		}
	}
	for _, l := range s.Leftovers {
		if !isID(l.GPU) {
			return &durable.ContentError{Why: "a leftover is of no GPU"}
		}
	}
	return nil
}

func isID(id gpu.DeviceID) bool { return id != "" && len(id) <= maxID }

func ascends[T any](all []T, compare func(a, b T) int) bool {
	for i := 1; i < len(all); i++ {
		if compare(all[i-1], all[i]) >= 0 {
			return false
		}
	}
	return true
}
