package nomadadapter

import (
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
)

// groupNamer gives every reader of inventories the same names, for as long as the process lives, and tells a keeper which
// are to be kept for the next process. The zero value has given none, and keeps none.
type groupNamer struct {
	mu    sync.Mutex
	given assignment

	recall  chan struct{} // closed once what was kept is known; nil = nothing is kept
	wake    chan struct{} // tells the keeper that something is to be written; capacity 1; nil = nothing is kept
	dirty   bool          // what is given is not written
	unsaved chan struct{} // closed after the next attempt to write it; nil = all was tried
	saving  bool          // that attempt has begun: what is given from now on needs another
}

// of are the names for inv. Announce none before recalled.
func (r *groupNamer) of(inv *core.Inventory, by GroupBy) assignment {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.given.by = by
	next := r.given.with(inv)
	if changed := !next.equal(r.given); changed && r.wake != nil {
		if r.dirty = true; r.unsaved == nil || r.saving {
			r.unsaved, r.saving = make(chan struct{}), false
		}
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
	r.given = next
	return next
}

// recalled is closed once the names that earlier processes announced are known; nil = they are, or none are kept.
func (r *groupNamer) recalled() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.recall == nil || closed(r.recall) {
		return nil
	}
	return r.recall
}

// written is closed once it was tried to write all names that were given; nil = it was.
func (r *groupNamer) written() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unsaved
}

// keep has names kept from now on; what is returned is what a keeper needs.
func (r *groupNamer) keep() (recall, wake chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recall, r.wake = make(chan struct{}), make(chan struct{}, 1)
	r.dirty, r.saving = len(r.given.names) > 0, false // a keeper before may hang, or have had another file
	r.wake <- struct{}{}
	return r.recall, r.wake
}

// forget has no names kept from now on.
func (r *groupNamer) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recall, r.wake, r.dirty, r.unsaved, r.saving = nil, nil, false, nil, false
}

// take adds what was kept to the names.
func (r *groupNamer) take(kept assignment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.given = r.given.merge(kept)
}

// changed reports whether there are names that are not written.
func (r *groupNamer) changed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dirty
}

// begin is what is to be written: all names, those that were kept added. Call done with whether that was done.
func (r *groupNamer) begin(kept assignment) (all assignment, done func(written bool)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.given = r.given.merge(kept)
	attempt := r.unsaved // nil = one that failed is repeated
	r.dirty, r.saving = false, true
	return r.given, func(written bool) { r.end(attempt, written) }
}

func (r *groupNamer) end(attempt chan struct{}, written bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dirty = r.dirty || !written
	if r.unsaved != attempt { // more was given meanwhile, or another keeper was quicker, as this one hung
		if attempt != nil && !closed(attempt) {
			close(attempt)
		}
		return
	}
	if r.saving = false; attempt != nil {
		close(attempt)
		r.unsaved = nil
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
