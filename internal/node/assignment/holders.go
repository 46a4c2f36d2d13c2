package assignment

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Holders are those that have a GPU, or an instance of it, through one API.
type Holders struct {
	By    []string // "pod default/train", "claim default/train", "job batch (allocation 1f3c)"; sorted
	Known bool     // By is complete and recent

	// Before are those that had it at some time, of which it can't be known whether they still do (Never): no reason against a forced move.
	Before []string

	First bool   // there was an answer, perhaps without all holders; or there will be none
	Why   string // By is not complete, with the remedy; "" = it will be in a moment
	Never bool   // by what the agent may read, Known is never true

	Age time.Duration // of a record that may lack what this agent has given out since
}

// Record returns the holders of a GPU, as one API had recorded them at one time.
type Record func(gpu.DeviceID) Holders

// NewRecord returns the record in which GPUs have these holders, which may be in any order and repeated. What is known of all GPUs is in h.
// The map belongs to the record then.
func NewRecord(h Holders, by map[gpu.DeviceID][]string) Record {
	for id, names := range by {
		slices.Sort(names)
		by[id] = slices.Compact(names)
	}
	return func(id gpu.DeviceID) Holders {
		one := h
		one.By = by[id]
		return one
	}
}

// Unconfirmed is the record with By as Before where nothing confirms that work still has what it once got.
func (r Record) Unconfirmed() Record {
	return func(id gpu.DeviceID) Holders {
		h := r(id)
		if h.Never {
			h.Before, h.By = append(slices.Clone(h.Before), h.By...), nil
		}
		return h
	}
}

// Readers read the records of an agent's APIs. They wait for no disk and no call, but for what an agent is giving out just now, and may be
// called at any time.
type Readers map[inventory.API]func() Record

// Records are the records of an agent's APIs.
type Records map[inventory.API]Record

// Read returns the records, each of which is read once, when it is first asked.
func (all Readers) Read() Records {
	r := Records{}
	for api, read := range all {
		once := sync.OnceValue(read)
		r[api] = func(id gpu.DeviceID) Holders { return once()(id) }
	}
	return r
}

// HoldersOf returns the holders of a GPU by all records.
func (r Records) HoldersOf(id gpu.DeviceID) (by []string) {
	for _, api := range APIs() {
		if record := r[api]; record != nil {
			by = append(by, record(id).By...)
		}
	}
	return by
}

// Named returns the holders of a GPU by all records, with those that had it before, for operators.
func (r Records) Named(id gpu.DeviceID) []string {
	all := slices.Clone(r.HoldersOf(id))
	for _, api := range APIs() {
		if record := r[api]; record != nil {
			all = append(all, record(id).Before...)
		}
	}
	return all
}

// Wait is what an agent waits for before a GPU that it offers no more is no longer its own; the zero value is nothing.
type Wait struct {
	Text  string // "the end of pod default/train"; else the record that is not known
	Held  bool   // work has the GPU
	Never bool   // by what the agent may read, the record is never known
}

// Wait returns what a GPU waits for that the agent offers no more: the end of all work by every record. given is when the agent gave the GPU
// out last; a record counts if it is later. now is from before the records were read.
func (r Records) Wait(id gpu.DeviceID, now time.Duration, given func(gpu.DeviceID) (time.Duration, bool)) Wait {
	if by := r.HoldersOf(id); len(by) > 0 {
		return Wait{Text: "the end of " + strings.Join(by, ", "), Held: true}
	}
	at, known := given(id)
	for _, api := range APIs() {
		if r[api] == nil {
			continue
		}
		if h := r[api](id); !h.Known || known && now-h.Age < at {
			return Wait{Text: cmp.Or(h.Why, "the record of "+string(api)), Never: h.Never}
		}
	}
	return Wait{}
}
