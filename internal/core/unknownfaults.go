package core

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// unknownFaults is what is left to do because a health history could not be read: each GPU may have a fault that was
// in it. The GPUs get their condition when the driver lists them for the first time.
type unknownFaults struct {
	pending bool           // not all GPUs have been listed
	seen    []gpu.DeviceID // GPUs that have been, sorted
}

// WithUnknownFaults returns r as the rest of a record that could not be read completely. All its GPUs may have a
// fault that is not in it, and so may those that it does not have.
func (r Checkpoint) WithUnknownFaults(now time.Time) Checkpoint {
	for _, id := range r.gpuIDs() {
		r = r.WithUnknownFault(now, id, "")
	}
	r.FaultsUnknown = true
	return r
}

// WithUnknownFault returns r with an unknown fault of one GPU. why is the reason why the fault is not known; "" = that is
// not known either.
func (r Checkpoint) WithUnknownFault(now time.Time, id gpu.DeviceID, why string) Checkpoint {
	there := func(c health.Condition) bool {
		return c.Reason == health.ReasonFaultUnknown && c.At == gpu.WholeGPU(id)
	}
	if !slices.ContainsFunc(r.Conditions, there) {
		r.Conditions = append(slices.Clip(r.Conditions), health.UnknownFaults(id, now, why))
	}
	return r
}

// withUnknownFaults gives the condition to the GPUs that a reading lists for the first time.
func (s State) withUnknownFaults(cfg Config, now time.Time, reading gpu.Snapshot) State {
	if !s.faultsUnknown.pending || reading.Driver.State != gpu.DriverReady {
		return s
	}
	var listed []gpu.DeviceID
	for _, d := range s.Snapshot.Devices {
		listed = append(listed, d.At.GPU)
	}
	for _, e := range s.Snapshot.Excluded {
		listed = append(listed, e.At.GPU)
	}
	seen := s.faultsUnknown.seen
	known := func(id gpu.DeviceID) bool { return id == "" || slices.Contains(seen, id) }
	added := slices.DeleteFunc(sortedIDs(listed), known)
	s.Ledger = s.Ledger.WithUnknownFaults(cfg.Health, now, added...)
	s.faultsUnknown = unknownFaults{pending: !listsAll(reading), seen: sortedIDs(slices.Concat(seen, added))}
	return s
}

// withKnownFaults records that every XID since the load of the driver has been read.
func (s State) withKnownFaults(cfg Config, now time.Time) State {
	if health.UnknownFaultsEnd(cfg.Health) {
		s.faultsUnknown = unknownFaults{}
		s.Ledger = s.Ledger.WithKnownFaults(cfg.Health, now)
	}
	return s
}
