package monitor_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// A kind of operational events is logged once for each GPU, with a warning if events were dropped. Only those that may be of a fault are
// followed by a check.
func TestOperationalEventsAreLogged(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		send := func(n int, e health.OperationalEvent) {
			m.SendEvent(health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.Operational, Operational: e})
			r.after(0)
		}
		checks := m.Calls()["Probe"]
		for range 3 {
			send(0, health.OperationalEvent{Module: "GSP", Code: 7, Severity: health.SeverityCorrected})
		}
		send(1, health.OperationalEvent{Module: "GSP", Code: 7, Severity: health.SeverityCorrected})
		if n := m.Calls()["Probe"] - checks; n > 0 {
			t.Errorf("%d checks after events that are no sign of a fault", n)
		}
		r.logged("operational event of the driver", 2)
		send(1, health.OperationalEvent{Severity: health.SeverityInformational, Attributes: 1 << 6})
		r.logged("the driver dropped operational events", 1)
		r.logged("informational, events dropped", 1)
		if r.after(time.Second); m.Calls()["Probe"] == checks {
			t.Error("no check after events were dropped")
		}
		r.expect("after them", map[int]health.State{})
	})
}

// Events for which there is nothing to tell apart, of a GPU that the driver does not name or of an unknown kind, are no storm of full readings: each reading includes a
// check. One that may be of other GPUs is followed by a full reading, also if one was made just before.
func TestEventsWithoutGPU(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, m *coretest.Machine, r *running) {
		storm := func(o health.Observation) (snapshots, checks int) {
			r.after(time.Minute) // so that nothing follows an event of before
			before := m.Calls()
			for range 100 {
				m.SendEvent(o)
				r.after(10 * time.Millisecond)
			}
			r.after(time.Second)
			after := m.Calls()
			return after["Snapshot"] - before["Snapshot"], after["Probe"] - before["Probe"]
		}
		fatal := health.Observation{At: gpu.Node, Kind: health.Operational, Operational: health.OperationalEvent{Module: "GSP", Code: 7, Severity: health.SeverityFatal}}
		unknown := health.Observation{At: gpu.Node, Detail: "event of data type 7"}
		if snapshots, checks := storm(fatal); snapshots > 0 || checks < 1 || checks > 3 {
			t.Errorf("operational events: %d full readings, %d checks", snapshots, checks)
		}
		r.logged("OPERATIONAL_GSP_7", 1)
		if snapshots, checks := storm(unknown); snapshots < 1 || snapshots > 3 || checks > 6 {
			t.Errorf("events of an unknown kind: %d full readings, %d checks", snapshots, checks)
		}

		r.after(time.Minute)
		m.SendEvent(unknown)
		r.after(10 * time.Millisecond)
		before := m.Calls()["Snapshot"]
		m.SendEvent(unknown)
		if r.after(2 * time.Second); m.Calls()["Snapshot"] != before+1 {
			t.Errorf("%d full readings after an event within the pause", m.Calls()["Snapshot"]-before)
		}
	})
}
