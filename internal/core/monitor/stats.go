package monitor

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Stats are the monitor's own numbers since it was made.
type Stats struct {
	Checks      uint64                   // rounds of checks of all GPUs
	CheckTime   time.Duration            // spent in them
	LastCheck   time.Time                // end of the latest; zero = none yet
	Stuck       int                      // driver calls that are past their deadline now
	Calls       []core.Call              // driver calls in progress a moment ago, the event wait excepted
	Transitions map[core.DeviceID]uint64 // changes of health
	EventsFail  bool                     // the latest event wait failed, or has not come back
}

// Stats returns the numbers now.
func (m *Monitor) Stats() Stats {
	m.gauges.mu.Lock()
	defer m.gauges.mu.Unlock()
	s := m.gauges.stats
	s.Transitions, s.Calls = maps.Clone(s.Transitions), slices.Clone(s.Calls)
	return s
}

type gauges struct {
	mu    sync.Mutex
	stats Stats
}

func (g *gauges) set(change func(*Stats)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change(&g.stats)
}

func (g *gauges) checked(took time.Duration) {
	g.set(func(s *Stats) {
		s.Checks++
		s.CheckTime += took
		s.LastCheck = time.Now()
	})
}

// transitions counts the changes of health between two inventories. A device that is gone is not counted any
// more.
func (g *gauges) transitions(prev, next *core.Inventory) {
	was := byDevice(prev)
	g.set(func(s *Stats) {
		counts := make(map[core.DeviceID]uint64, len(was))
		for u := range next.Devices() {
			counts[u.Device.ID] = s.Transitions[u.Device.ID]
			if old, ok := was[u.Device.ID]; ok && old.Health.State != u.Health.State {
				counts[u.Device.ID]++
			}
		}
		s.Transitions = counts
	})
}

// byDevice has a unit of each device.
func byDevice(inv *core.Inventory) map[core.DeviceID]core.Unit {
	units := map[core.DeviceID]core.Unit{}
	for u := range inv.Devices() {
		units[u.Device.ID] = u
	}
	return units
}
