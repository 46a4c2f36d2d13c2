package monitor

import (
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// SetProcessCheck has CheckReservation disregard processes that have ended, of which running reports false. It must not block and be
// safe for concurrent use. Call it before Run.
func (m *Monitor) SetProcessCheck(running func(gpu.Process) bool) { m.processRunning = running }

// CheckReservation checks units that are about to be reserved for new work, by the latest health check and as
// Config.ReservationCheck requires: it returns what was found, with CheckRefuse as an *inventory.CheckError. It makes no driver call and
// does not wait for one.
func (m *Monitor) CheckReservation(units []inventory.Unit) ([]inventory.Finding, error) {
	if !m.reservationCheck.Enabled() {
		return nil, nil
	}
	findings := inventory.Check(m.State().Ledger, units, m.processRunning)
	if len(findings) > 0 && m.reservationCheck == inventory.CheckRefuse {
		return nil, &inventory.CheckError{Findings: findings}
	}
	return findings, nil
}

// reservations are the placements that were reserved for new work since the state was updated last. An orchestrator waits for a
// reservation, so it wakes nothing: the next update, which for a fault is that of the fault, records it first. There is one within
// waitAtMost, so that the checkpoint lacks no older reservation if the process ends. It is safe for concurrent use.
type reservations struct {
	mu         sync.Mutex
	placements []gpu.Placement // distinct
}

func (r *reservations) add(devices []gpu.Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range devices {
		if at := devices[i].At; !slices.Contains(r.placements, at) {
			r.placements = append(r.placements, at)
		}
	}
}

func (r *reservations) pending() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.placements) > 0
}

// take returns the reservations of devices of an inventory as observations, and forgets them.
func (r *reservations) take(inv *inventory.Inventory) []health.Observation {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.placements) == 0 {
		return nil
	}
	shared := map[gpu.Placement]bool{}
	for u := range inv.Devices() {
		shared[u.Device.At] = u.Sharing.Mode != inventory.Exclusive
	}
	var obs []health.Observation
	for _, at := range r.placements {
		obs = append(obs, health.Observation{At: at, Kind: health.Reserved, Shared: shared[at]})
	}
	r.placements = r.placements[:0]
	return obs
}
