package health

import (
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// effects are what a fault makes of a healthy GPU.
var effects = map[xid.Effect]health.State{
	xid.None: health.Healthy, xid.Degrades: health.Degraded, xid.Withdraws: health.Unhealthy, xid.Loses: health.GPULost,
}

// Every XID there may be, once through the driver. That the table is NVIDIA's, and the documents the table's,
// the tests of package fault say.
func TestCase33EveryCode(t *testing.T) {
	m := well(t, "h100x8")
	codes := []uint64{999, 1 << 31}
	for code := range uint64(200) {
		codes = append(codes, code+1)
	}
	for i, code := range codes {
		slot := i % 8
		rule := xid.XID(code)
		if rule.Class == 0 || rule.Meaning == "" {
			t.Errorf("XID %d: %+v", code, rule)
		}
		m.heard(slot, simdriver.EventXID, code)
		m.expect(fmt.Sprintf("XID %d", code), sick(effects[rule.Effect], slot))
		h := m.health(slot)
		if h.State != health.Healthy && h.Cause() != fmt.Sprintf("XID_%d", code) {
			t.Errorf("XID %d: %s", code, h)
		}
		if m.count(slot, code) != 1 {
			t.Errorf("XID %d was counted %d times", code, m.count(slot, code))
		}
		if code > 185 && (rule.Class != xid.Suspect || h.State != health.Degraded) {
			t.Errorf("XID %d: %+v: %s", code, rule, h)
		}
		m.forget(slot)
	}
}

// The same for the events that are no XIDs.
func TestCase33EveryEvent(t *testing.T) {
	m := well(t, "h100x8")
	for bit := range 16 {
		kind := uint64(1) << bit
		if kind == simdriver.EventXID {
			continue
		}
		rule, _ := xid.Event(kind)
		m.heard(2, kind, 0)
		m.expect(fmt.Sprintf("event %#x", kind), sick(effects[rule.Effect], 2))
		m.forget(2)
	}
}

// heard raises an event and folds it, without asking the GPU anything: what the event alone does.
func (m *rig) heard(slot int, kind, data uint64) {
	m.t.Helper()
	must(m.t, m.Event(slot, kind, data))
	m.now = m.now.Add(time.Second)
	m.hear()
}

// forget is an operator's order about everything that stands against a GPU, if anything does.
func (m *rig) forget(slot int) {
	m.t.Helper()
	for _, c := range m.state.Ledger.Conditions() {
		if c.At.GPU == m.id(slot) {
			must(m.t, m.clear(slot, "", m.now))
			break
		}
	}
	m.expect("cleared", nil)
}
