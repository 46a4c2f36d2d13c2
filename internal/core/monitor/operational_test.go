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
