package health

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// id is the GPU in a slot.
func (m *rig) id(slot int) gpu.DeviceID { return gpu.DeviceID(m.UUID(slot)) }

// health is what is published of the GPU in a slot.
func (m *rig) health(slot int) health.Health {
	m.t.Helper()
	return m.unit(m.id(slot)).Health
}

// unit is what is published of a GPU or a MIG instance.
func (m *rig) unit(id gpu.DeviceID) inventory.Unit {
	m.t.Helper()
	u, ok := m.state.Inventory.Unit(inventory.UnitID(id))
	if !ok {
		m.t.Fatalf("%s is not listed", id)
	}
	return u
}

// expect checks the state of every GPU of the machine: those that want does not name are healthy.
func (m *rig) expect(what string, want map[int]health.State) {
	m.t.Helper()
	slots, err := m.Slots()
	must(m.t, err)
	for _, slot := range slots {
		if instances, err := m.Instances(slot); err != nil || len(instances) > 0 {
			continue // those are expected by name
		}
		if h := m.health(slot); h.State != want[slot] {
			m.t.Errorf("%s (%v in): GPU %d: %s; want %s", what, m.now.Sub(begin), slot, h, want[slot])
		}
	}
}

// neverHealthy checks that the GPU in a slot was never published as healthy.
func (m *rig) neverHealthy(slot int) {
	m.t.Helper()
	for _, p := range m.published {
		if u, ok := p.inventory.Unit(inventory.UnitID(m.id(slot))); ok && u.Health.State == health.Healthy {
			m.t.Errorf("GPU %d was published as healthy %v in", slot, p.at.Sub(begin))
		}
	}
}

// about counts the changes of a unit's health in publications; well before the first, it is taken for well.
func about(told []publication, id gpu.DeviceID) (changes int) {
	var last health.Health
	for _, p := range told {
		if u, ok := p.inventory.Unit(inventory.UnitID(id)); ok && u.Health != last {
			changes, last = changes+1, u.Health
		}
	}
	return changes
}

// since are the publications from a time on.
func (m *rig) since(t time.Time) []publication {
	i := slices.IndexFunc(m.published, func(p publication) bool { return p.at.After(t) })
	if i < 0 {
		return nil
	}
	return m.published[i:]
}

// clear is an operator's order about a cause, verified at a time.
func (m *rig) clear(slot int, cause string, verified time.Time) error {
	next, _, err := m.state.Clear(m.cfg, m.now, health.Command{GPU: m.id(slot), Cause: cause, VerifiedAt: verified})
	if err == nil {
		m.publish(next)
	}
	return err
}

// chart is what is remembered of the GPU in a slot.
func (m *rig) chart(slot int) health.GPUHistory {
	c, _ := m.state.Ledger.History(m.id(slot))
	return c
}

// count is how often an XID of the GPU in a slot was counted.
func (m *rig) count(slot int, code uint64) (n uint64) {
	for _, t := range m.chart(slot).FaultCounts {
		if t.Reason == health.ReasonXID && t.Code == code {
			n = t.Count
		}
	}
	return n
}

// sick are slots in one state.
func sick(state health.State, slots ...int) map[int]health.State {
	return maps.Collect(func(yield func(int, health.State) bool) {
		for _, slot := range slots {
			if !yield(slot, state) {
				return
			}
		}
	})
}

// until waits for something that happens in another thread.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never:", what)
		}
	}
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
