package health

import (
	"runtime"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Ten thousand copies of a fault in a second are one fault, and hide no other.
func TestCase25Storm(t *testing.T) {
	const perSecond, seconds = 10_000, 3
	f := follow(t, simdriver.Start(t, "h100x8"), hasty)
	f.until("eight healthy GPUs", f.all(health.Healthy, 8))
	heap := heapInUse()
	started := time.Now()
	for batch := range seconds * 10 {
		must(t, f.Storm(3, 95, perSecond/10))
		if batch == seconds*5 {
			must(t, f.XID(5, 48))
		}
		<-time.After(time.Until(started.Add(time.Duration(batch+1) * time.Second / 10)))
	}
	f.until("GPU 3 is sick, and so was GPU 5", func(inv *inventory.Inventory) bool {
		u, _ := inv.Unit(inventory.UnitID(f.UUID(3)))
		return u.Health.Cause() == "XID_95"
	})
	until(t, "all are counted", func() bool {
		chart, _ := f.State().Ledger.History(gpu.DeviceID(f.UUID(5)))
		return len(chart.FaultCounts) == 1
	})
	told := f.since(started)
	if n := about(told, gpu.DeviceID(f.UUID(3))); n != 1 {
		t.Errorf("%d publications about GPU 3", n)
	}
	if most := int(time.Since(started).Seconds()) + 1; len(told) > most {
		t.Errorf("%d publications in %v", len(told), time.Since(started))
	}
	if n := len(f.State().Ledger.Conditions()); n > 2 {
		t.Errorf("%d conditions", n)
	}
	if grown := int64(heapInUse()) - int64(heap); grown > 16<<20 {
		t.Errorf("the heap has grown by %d bytes", grown)
	}
	f.until("all is well in the end", f.all(health.Healthy, 8))
}

func heapInUse() uint64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// A fault that stays as it is, is told once: each new text is a write to an orchestrator's state.
func TestCase30OnePublication(t *testing.T) {
	for name, script := range map[string]func(*rig){
		"verdict": func(m *rig) { m.set(3, "recovery_action = 1") },
		"XID":     func(m *rig) { must(m.t, m.XID(3, 46)) },
		"lost":    func(m *rig) { must(m.t, m.Lose(3)) },
		"every call fails": func(m *rig) {
			must(m.t, m.Fail(simdriver.GPU(3), "*", "UNKNOWN", simdriver.Always))
		},
		"remap pending": func(m *rig) { m.set(3, "remapped_pending = yes") },
	} {
		t.Run(name, func(t *testing.T) {
			m := well(t, "h100x8")
			quiet := m.now
			script(m)
			m.step(time.Hour)
			if h := m.health(3); h.State == health.Healthy {
				t.Error(h)
			}
			m.toldOnce(quiet)
		})
	}
	t.Run("an XID every ten seconds", func(t *testing.T) {
		m := well(t, "h100x8")
		quiet := m.now
		for range 360 {
			must(t, m.XID(3, 46))
			m.step(10 * time.Second)
		}
		if m.count(3, 46) != 360 {
			t.Errorf("counted %d times", m.count(3, 46))
		}
		m.toldOnce(quiet)
	})
	t.Run("driver gone", func(t *testing.T) {
		m := well(t, "h100x8")
		must(t, m.Unload())
		m.step(20 * time.Second) // lost first, and then known to be unloaded
		quiet := m.now
		m.step(time.Hour)
		m.expect("unloaded", all(health.Unknown, nil))
		if p := m.since(quiet); len(p) > 0 {
			t.Errorf("%d publications", len(p))
		}
	})
	t.Run("a driver that stutters", func(t *testing.T) { // each look meets the fault in another call
		m := well(t, "h100x8")
		must(t, m.Lose(3))
		m.step(time.Minute)
		quiet := m.now
		for i := range 60 {
			must(t, m.Heal())
			call := []string{"nvmlDeviceGetUUID", "nvmlDeviceGetFieldValues", "nvmlDeviceGetHandleByIndex"}[i%3]
			must(t, m.Fail(simdriver.GPU(3), call, "GPU_IS_LOST", simdriver.Always))
			m.step(time.Minute)
		}
		if p := m.since(quiet); len(p) > 0 {
			t.Errorf("%d publications", len(p))
		}
	})
}

// toldOnce checks that there was one publication since a time.
func (m *rig) toldOnce(since time.Time) {
	m.t.Helper()
	if p := m.since(since); len(p) != 1 {
		m.t.Errorf("%d publications", len(p))
		for _, p := range p[:min(len(p), 5)] {
			u, _ := p.inventory.Unit(inventory.UnitID(m.id(3)))
			m.t.Logf("%v in: %s", p.at.Sub(begin), u.Health)
		}
	}
}
