package ownership

import (
	"cmp"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Readers read the records of an agent's APIs. They wait for no disk and no call, but for what an agent is giving out just now, and may be
// called at any time.
type Readers map[inventory.API]func() holders.Record

// Records are the records of an agent's APIs, each read when it is first asked.
type Records map[inventory.API]func() holders.Record

// Read returns the records, each of which is read once.
func (all Readers) Read() Records {
	r := Records{}
	for api, read := range all {
		r[api] = sync.OnceValue(read)
	}
	return r
}

// HoldersOf returns the work that has a GPU by all records.
func (r Records) HoldersOf(id gpu.DeviceID) []string { return r.named(gpu.WholeGPU(id), false) }

// holdersAt returns the work that has hardware at a placement by all records.
func (r Records) holdersAt(at gpu.Placement) []string { return r.named(at, false) }

// Named returns the work that has a GPU by all records, with that of which it can't be known whether it has ended, for operators.
func (r Records) Named(id gpu.DeviceID) []string {
	return append(r.HoldersOf(id), r.named(gpu.WholeGPU(id), true)...)
}

func (r Records) named(at gpu.Placement, ended bool) (names []string) {
	for _, api := range APIs() {
		if r[api] == nil {
			continue
		}
		if record := r[api](); record.MayHaveEnded == ended {
			names = append(names, record.OnPlacement(at)...)
		}
	}
	return names
}

// Wait is what an agent waits for before a GPU that it offers no more is no longer its own; the zero value is nothing.
type Wait struct {
	Text  string // "the end of pod default/train"; else the record that is not known
	Held  bool   // work has the GPU
	Never bool   // by what the agent may read, the record is never known
}

// Wait returns what a GPU waits for that the agent offers no more: the end of all work by every record. given is when the agent gave the GPU
// out last; a record counts if it is later. now is from before the records
// were read, and is the time of one that has none.
func (r Records) Wait(id gpu.DeviceID, c Clock, now time.Duration, given func(gpu.DeviceID) (time.Duration, bool)) Wait {
	if by := r.HoldersOf(id); len(by) > 0 {
		return Wait{Text: "the end of " + strings.Join(by, ", "), Held: true}
	}
	at, known := given(id)
	for _, api := range APIs() {
		if r[api] == nil {
			continue
		}
		if h := r[api](); !h.Complete || known && c.readAt(h, now) < at {
			return Wait{Text: cmp.Or(h.Missing, "the record of "+string(api)), Never: h.Never}
		}
	}
	return Wait{}
}
