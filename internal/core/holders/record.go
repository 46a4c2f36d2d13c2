package holders

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Record is what was recorded of the work that has devices through an API, at one time. It is immutable.
type Record struct {
	Holders []Holder

	// Complete means that no holder is missing from Holders. Missing is why one may be, with the remedy; "" = it will be complete in a moment.
	Complete bool
	Missing  string
	Remedy   string // of Missing, in some words: what to set; "" = it is in Missing, or there is none

	First bool // there was an answer of the orchestrator, perhaps without all holders; or there will be none
	Never bool // by what the agent may read, Complete is never true

	// MayHaveEnded means that holders may have ended, and that nothing will show whether they have (Never): no reason against a forced move.
	MayHaveEnded bool

	At time.Time // of a record that may lack what this agent has given out since; zero = it lacks nothing of that

	// HeldSince is since when a device that has a holder is held, as far as that was recorded; the earliest time, where it has several. It outlives a
	// restart of the agent, which the agent's own readings do not.
	HeldSince map[gpu.DeviceID]time.Time

	// Work has the work that the record lists, with devices or without, by Work.ID. It gives processes the names of their work.
	Work map[string]Work

	// Tasks has what is recorded of tasks of Nomad that have devices; nil = nothing is.
	Tasks map[Work]Task

	// AllWork means that work which is not in Work is not running any more.
	AllWork bool
}

// Task is what is recorded of a task of Nomad.
type Task struct {
	Driver  string // "exec", "docker"; "" = unknown
	Running bool   // its processes were started, and have not ended
}

// InContainer reports whether the task's driver has a program of its own make the control group of the task.
func (t Task) InContainer() bool { return t.Driver == "docker" || t.Driver == "podman" }

// Locate returns the record with the placements of its holders. While one has a device that is not among them, the record is not complete.
func (r Record) Locate(placements map[gpu.DeviceID]gpu.Placement) Record {
	r.Holders = slices.Clone(r.Holders)
	for i := range r.Holders {
		h := &r.Holders[i]
		if h.At.GPU != "" {
			continue
		}
		if at, ok := placements[h.Device]; ok {
			h.At = at
		} else {
			r.Complete, r.Missing = false, "the end of "+h.Work.String()+", whose device "+string(h.Device)+" is not known to the driver"
		}
	}
	return r
}

// Since returns the record that follows from this one and from the holders that records before it have shown: a holder that was seen remains until
// a complete record lacks it. So a record that fails, or that lacks work for a moment, frees nothing.
func (r Record) Since(seen []Holder) Record {
	if r.Complete || len(seen) == 0 {
		return r
	}
	has := make(map[Holder]bool, len(r.Holders))
	for _, h := range r.Holders {
		has[h] = true
	}
	r.Holders = slices.Clone(r.Holders)
	for _, h := range seen {
		if !has[h] {
			has[h] = true
			r.Holders = append(r.Holders, h)
		}
	}
	return r
}

// Began records that a device has been held since a time, if none before is recorded. The zero time records nothing.
func (r *Record) Began(device gpu.DeviceID, at time.Time) {
	if was, ok := r.HeldSince[device]; at.IsZero() || ok && !at.Before(was) {
		return
	}
	if r.HeldSince == nil {
		r.HeldSince = map[gpu.DeviceID]time.Time{}
	}
	r.HeldSince[device] = at
}

// On returns the names of the work that has a GPU or an instance of it, sorted.
func (r Record) On(id gpu.DeviceID) []string { return r.OnPlacement(gpu.WholeGPU(id)) }

// OnPlacement returns the names of the work that has hardware at a placement of a GPU, sorted.
func (r Record) OnPlacement(at gpu.Placement) (names []string) {
	for i := range r.Holders {
		if h := &r.Holders[i]; h.At.GPU == at.GPU && h.At.Overlaps(at) {
			names = append(names, h.Work.String())
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
