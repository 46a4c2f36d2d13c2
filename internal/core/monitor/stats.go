package monitor

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Stats are counters and gauges of the monitor since New.
type Stats struct {
	Checks      uint64                  // rounds of checks of all GPUs
	CheckTime   time.Duration           // spent in them
	LastCheck   time.Time               // end of the latest; zero = none yet
	Stuck       int                     // driver calls that are past their deadline now
	Calls       []gpu.Call              // driver calls in progress a moment ago, the event wait excepted
	Transitions map[gpu.DeviceID]uint64 // changes of health
	EventsFail  bool                    // the latest event wait failed, or has not come back
}

// Stats returns the present values.
func (m *Monitor) Stats() Stats {
	m.stats.mu.Lock()
	defer m.stats.mu.Unlock()
	s := m.stats.values
	s.Transitions, s.Calls = maps.Clone(s.Transitions), slices.Clone(s.Calls)
	return s
}

type statsRecorder struct {
	mu     sync.Mutex
	values Stats
}

func (r *statsRecorder) set(change func(*Stats)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.values)
}

func (r *statsRecorder) checked(took time.Duration) {
	r.set(func(s *Stats) {
		s.Checks++
		s.CheckTime += took
		s.LastCheck = time.Now()
	})
}

// transitions counts the changes of health between two inventories. The counter of a device that is gone is removed.
func (r *statsRecorder) transitions(prev, next *inventory.Allocatable) {
	was := byDevice(prev)
	r.set(func(s *Stats) {
		counts := make(map[gpu.DeviceID]uint64, len(was))
		for u := range next.Devices() {
			counts[u.Device.ID] = s.Transitions[u.Device.ID]
			if old, ok := was[u.Device.ID]; ok && old.Health.State != u.Health.State {
				counts[u.Device.ID]++
			}
		}
		s.Transitions = counts
	})
}

// byDevice maps each device to one of its units.
func byDevice(inv *inventory.Allocatable) map[gpu.DeviceID]inventory.Unit {
	units := map[gpu.DeviceID]inventory.Unit{}
	for u := range inv.Devices() {
		units[u.Device.ID] = u
	}
	return units
}
