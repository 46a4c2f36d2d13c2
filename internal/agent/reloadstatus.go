package agent

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// ReloadStatus is the outcome of the reads of the configuration since the process began. It is safe for concurrent use. The zero
// value has no outcome yet.
type ReloadStatus struct {
	mu      sync.Mutex
	success time.Time // latest read without a problem
	failure time.Time // latest read with one, if that was later
	problem string    // of it, in one line
}

// Loaded records a read without a problem.
func (r *ReloadStatus) Loaded(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.success, r.failure, r.problem = now, time.Time{}, ""
}

// Refused records a read with a problem.
func (r *ReloadStatus) Refused(now time.Time, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failure, r.problem = now, strings.ReplaceAll(err.Error(), "\n", "; ")
}

// Last reports whether the latest read succeeded, and when a read last did.
func (r *ReloadStatus) Last() (ok bool, success time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failure.IsZero(), r.success
}

// Problems has the reason if the configuration in force is not the latest one. It may be called on nil.
func (r *ReloadStatus) Problems() []problem.Problem {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failure.IsZero() {
		return nil
	}
	at := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	return []problem.Problem{{Code: problem.Configuration, Text: fmt.Sprintf("configuration not reloaded at %s, that of %s is in force: %s", at(r.failure), at(r.success), r.problem)}}
}
