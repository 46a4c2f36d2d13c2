package monitor

import (
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

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

// take returns the reservations as observations, and forgets them.
func (r *reservations) take() []health.Observation {
	r.mu.Lock()
	defer r.mu.Unlock()
	var obs []health.Observation
	for _, at := range r.placements {
		obs = append(obs, health.Observation{At: at, Kind: health.Reserved})
	}
	r.placements = r.placements[:0]
	return obs
}
