package health

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Where there are no events the polls do it all, and the health says so.
func TestCase19NoEvents(t *testing.T) {
	t.Run("not supported", func(t *testing.T) {
		m := newRig(t, "h200")
		m.set(0, "events = none")
		m.look()
		if text := m.health(0).String(); text != "healthy (health limited: no XID events)" {
			t.Error(text)
		}
		m.xid(0, 95)
		m.expect("nobody hears", nil)
		m.set(0, "recovery_action = 1")
		m.step(10 * time.Second)
		m.expect("the poll sees", sick(health.Unhealthy, 0))
		if text := m.health(0).String(); !strings.HasSuffix(text, "(health limited: no XID events)") {
			t.Error(text)
		}
	})
	t.Run("registering fails once", func(t *testing.T) {
		m := newRig(t, "h200")
		must(t, m.Fail(simdriver.GPU(0), "nvmlDeviceRegisterEvents", "UNKNOWN", 1))
		m.look()
		m.step(10 * time.Second)
		if made, freed := m.calls("nvmlEventSetCreate"), m.calls("nvmlEventSetFree"); made < 2 || freed != made-1 {
			t.Errorf("%d event sets made, %d freed", made, freed) // nvml.h: the set is undefined then
		}
		if text := m.health(0).String(); text != "healthy" {
			t.Error(text)
		}
		m.xid(0, 95)
		m.expect("heard", sick(health.Unhealthy, 0))
	})
	t.Run("waiting fails", func(t *testing.T) {
		m := well(t, "h200")
		must(t, m.Fail(simdriver.All, "nvmlEventSetWait", "UNKNOWN", 1))
		m.step(20 * time.Second)
		m.xid(0, 95)
		m.expect("heard", sick(health.Unhealthy, 0))
	})
}

// A GPU of an NVSwitch machine takes work only once the fabric is up.
func TestCase26Fabric(t *testing.T) {
	state := func(m *rig, state, summary int) {
		m.set(1, fmt.Sprintf("fabric_state = %d", state), fmt.Sprintf("fabric_health_summary = %d", summary))
		m.step(2 * time.Minute)
	}
	const notStarted, inProgress, completed = 1, 2, 3 // NVML_GPU_FABRIC_STATE_*
	const unsaid, healthy, unhealthy, limited = 0, 1, 2, 3
	t.Run("coming up", func(t *testing.T) {
		m := newRig(t, "h100x8")
		m.set(1, "fabric_state = 1")
		m.look()
		m.expect("not started", sick(health.Unknown, 1))
		if text := m.health(1).String(); !strings.Contains(text, "waiting for the NVLink fabric") {
			t.Error(text)
		}
		state(m, inProgress, unsaid)
		m.expect("in progress", sick(health.Unknown, 1))
		state(m, completed, unsaid)
		m.expect("completed", nil)
	})
	t.Run("never coming up", func(t *testing.T) {
		m := newRig(t, "h100x8")
		m.set(1, "fabric_state = 1")
		m.look()
		m.step(9 * time.Minute)
		m.expect("waiting", sick(health.Unknown, 1))
		m.step(2 * time.Minute)
		m.expect("that is too long", sick(health.Unhealthy, 1))
	})
	t.Run("summary", func(t *testing.T) {
		m := well(t, "h100x8")
		state(m, completed, healthy)
		m.expect("healthy", nil)
		state(m, completed, unhealthy)
		m.expect("unhealthy", sick(health.Unhealthy, 1))
		state(m, completed, limited)
		m.step(2 * time.Minute)
		m.expect("limited", sick(health.Degraded, 1))
		state(m, completed, unsaid)
		m.step(2 * time.Minute)
		m.expect("an H100 gives no summary", nil)
	})
	t.Run("completed with an error", func(t *testing.T) {
		m := well(t, "h100x8")
		m.set(1, "fabric_status = 999")
		m.step(2 * time.Minute)
		m.expect("status unknown", sick(health.Unhealthy, 1))
	})
	t.Run("what the health mask says", func(t *testing.T) {
		for mask, want := range map[string]health.State{
			"0x11aa": health.Healthy,
			"0x11a9": health.Degraded,  // bandwidth is degraded
			"0x12aa": health.Unhealthy, // the system's GUID is wrong
		} {
			m := newRig(t, "gb200")
			m.set(1, "fabric_health_mask = "+mask, "fabric_health_summary = 0")
			m.look()
			m.step(2 * time.Minute)
			m.expect("mask "+mask, sick(want, 1))
			m.close()
		}
	})
	t.Run("not part of a fabric", func(t *testing.T) {
		well(t, "consumer")
	})
}

// Throttling is a fault of its surroundings only when it is there most of the time.
func TestCase27Slowdown(t *testing.T) {
	for key, cause := range map[string]string{"hw_thermal_slowdown_ns": "SLOWDOWN_THERMAL", "hw_power_brake_ns": "SLOWDOWN_POWER"} {
		t.Run(cause, func(t *testing.T) {
			m := well(t, "h200")
			var total time.Duration
			throttled := func(share float64, d time.Duration) {
				for end := m.now.Add(d); m.now.Before(end); {
					total += time.Duration(share * float64(10*time.Second))
					m.set(0, fmt.Sprintf("%s = %d", key, total))
					m.step(10 * time.Second)
				}
			}
			throttled(0.5, 30*time.Minute)
			m.expect("half of the time", nil)
			throttled(0.7, 30*time.Minute)
			m.expect("70 % of the time", sick(health.Degraded, 0))
			if h := m.health(0); h.Cause() != cause {
				t.Error(h)
			}
			throttled(0.1, 30*time.Minute)
			m.expect("cool again", nil)
		})
	}
}

// An idle link saves lanes and speed; a busy one that is narrow has lost them.
func TestCase28PCIeWidth(t *testing.T) {
	m := well(t, "h200")
	m.set(0, "pcie_width = 4", "pcie_gen = 1", "utilization_gpu = 0")
	m.step(10 * time.Minute)
	m.expect("idle", nil)
	m.set(0, "pcie_gen = 5", "utilization_gpu = 95")
	m.step(10 * time.Minute)
	m.expect("busy and narrow", sick(health.Degraded, 0))
	if h := m.health(0); h.Reason != health.ReasonPCIeWidth {
		t.Error(h)
	}
	m.set(0, "utilization_gpu = 0")
	m.step(10 * time.Minute)
	m.expect("idle again says nothing", sick(health.Degraded, 0))
	m.set(0, "pcie_width = 16", "utilization_gpu = 95")
	m.step(10 * time.Minute)
	m.expect("busy and wide", nil)
}
