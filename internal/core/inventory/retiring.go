package inventory

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// WithRetiring returns a as the successor of prev. A unit that is in prev but not in a stays listed as
// unhealthy for the time grace, because an orchestrator may be about to allocate it (kubelet 1.37 can panic when
// an ID is removed during an allocation).
func (a *Allocatable) WithRetiring(prev *Allocatable, now time.Time, grace time.Duration) *Allocatable {
	next := *a
	next.retiring = map[UnitID]time.Time{}
	var gone []Unit
	for u := range prev.Units() {
		since, ok := prev.retiring[u.ID]
		if !ok {
			since = now
		}
		if _, offered := a.byID[u.ID]; offered || now.Sub(since) >= grace {
			continue
		}
		u.Health = health.Health{State: health.Unhealthy, Reason: health.ReasonWithdrawn}
		gone = append(gone, u)
		next.retiring[u.ID] = since
	}
	if gone == nil {
		return &next
	}
	units := slices.Concat(a.units, gone)
	slices.SortFunc(units, compareUnits)
	next.unitList = newUnitList(units)
	return &next
}

// Retiring reports whether units wait for removal. If so, call WithRetiring again when their grace is over.
func (a *Allocatable) Retiring() bool { return len(a.retiring) > 0 }

// Shift returns a with the times since which units are retiring moved by d.
func (a *Allocatable) Shift(d time.Duration) *Allocatable {
	if !a.Retiring() {
		return a
	}
	next := *a
	next.retiring = make(map[UnitID]time.Time, len(a.retiring))
	for id, since := range a.retiring {
		next.retiring[id] = since.Add(d)
	}
	return &next
}
