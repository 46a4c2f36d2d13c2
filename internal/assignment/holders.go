package assignment

import (
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Holders are those that have a GPU, or an instance of it, through one API.
type Holders struct {
	By    []string // "pod default/train", "claim default/train", "job batch (allocation 1f3c)"; sorted
	Known bool     // By is complete and recent
	First bool     // there was an answer, perhaps without all holders; or there will be none
	Why   string   // By is not complete, with the remedy; "" = it will be in a moment
	Never bool     // by the settings of the agent, Known is never true

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
