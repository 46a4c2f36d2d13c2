package inventory

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

// WithRetiring returns inv as the successor of prev. A unit that is in prev but not in inv stays listed as
// unhealthy for the time grace, because an orchestrator may be about to allocate it (kubelet 1.37 can panic when
// an ID is removed during an allocation).
func (inv *Inventory) WithRetiring(prev *Inventory, now time.Time, grace time.Duration) *Inventory {
	next := *inv
	next.retiring = map[UnitID]time.Time{}
	var gone []Unit
	for u := range prev.Units() {
		since, ok := prev.retiring[u.ID]
		if !ok {
			since = now
		}
		if _, offered := inv.byID[u.ID]; offered || now.Sub(since) >= grace {
			continue
		}
		u.Health = health.Health{State: health.Unhealthy, Reason: health.ReasonWithdrawn}
		gone = append(gone, u)
		next.retiring[u.ID] = since
	}
	if gone == nil {
		return &next
	}
	next.units = slices.Concat(inv.units, gone)
	slices.SortFunc(next.units, compareUnits)
	return next.withIndex()
}

// Retiring reports whether units wait for removal. If so, call WithRetiring again when their grace is over.
func (inv *Inventory) Retiring() bool { return len(inv.orEmpty().retiring) > 0 }

// Shift returns inv with the times since which units are retiring moved by d.
func (inv *Inventory) Shift(d time.Duration) *Inventory {
	if !inv.Retiring() {
		return inv
	}
	next := *inv
	next.retiring = make(map[UnitID]time.Time, len(inv.retiring))
	for id, since := range inv.retiring {
		next.retiring[id] = since.Add(d)
	}
	return &next
}
