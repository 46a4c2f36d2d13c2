package health

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/kmsg"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Each value that a check reads from the driver is a condition of its own GPU alone.
func TestSignals(t *testing.T) {
	type signal struct {
		lines string // of the machine's configuration, separated by ";"
		state health.State
		cause string
	}
	for batch := range slices.Chunk([]signal{
		{"recovery_action = 1", health.Unhealthy, "RECOVERY_ACTION_GPU_RESET"},
		{"recovery_action = 2", health.Unhealthy, "RECOVERY_ACTION_NODE_REBOOT"},
		{"recovery_action = 3", health.Unhealthy, "RECOVERY_ACTION_DRAIN_P2P"},
		{"recovery_action = 4", health.Unhealthy, "RECOVERY_ACTION_DRAIN_AND_RESET"},
		{"recovery_action = 5", health.Unhealthy, "RECOVERY_ACTION_RECOVER_IMEX_DOMAIN"},
		{"recovery_action = 99", health.Unhealthy, "RECOVERY_ACTION_UNKNOWN_ACTION"}, // no name in this version of nvml.h
		{"remapped_failed = yes", health.Unhealthy, "ROW_REMAP_FAILED"},
		{"remapped_pending = yes", health.Degraded, "ROW_REMAP_PENDING"},

		{"unrepairable_memory = yes", health.Unhealthy, "MEMORY_UNREPAIRABLE"},
		{"sram_threshold_exceeded = yes", health.Unhealthy, "SRAM_THRESHOLD"},
		{"channel_repair_pending = yes", health.Degraded, "REPAIR_PENDING"},
		{"links_down = 0x5", health.Degraded, "NVLINK_DOWN"},
		{"pcie_width = 8; utilization_gpu = 95", health.Degraded, "PCIE_WIDTH"},
		{"fabric_state = 2", health.Unknown, "FABRIC_STARTING"},
		{"fabric_health_summary = 2", health.Unhealthy, "FABRIC_UNHEALTHY"},
		{"fabric_health_summary = 3", health.Degraded, "FABRIC_LIMITED"},

		{"fabric_status = 999", health.Unhealthy, "FABRIC_UNHEALTHY"},
		{"pcie_width = 4; pcie_gen = 1; utilization_gpu = 0", health.Healthy, ""}, // an idle link
	}, 8) {
		t.Run(batch[0].cause, func(t *testing.T) {
			m := newHealthyAgent(t, "h100x8")
			want := states{}
			for slot, s := range batch {
				m.set(slot, strings.Split(s.lines, "; ")...)
				want[slot] = s.state
			}
			m.step(6 * time.Minute) // some values are read every five minutes
			m.expect("then", want)
			for slot, s := range batch {
				if h := m.health(slot); h.Cause() != s.cause {
					t.Errorf("%s: %s, want %s", s.lines, h, s.cause)
				}
			}
		})
	}
}

// The health mask of a fabric counts where the driver reports one.
func TestFabricHealthMask(t *testing.T) {
	m := newHealthyAgent(t, "gb200")
	m.set(1, "fabric_health_mask = 0x11a9", "fabric_health_summary = 0") // bandwidth degraded
	m.set(2, "fabric_health_mask = 0x12aa", "fabric_health_summary = 0") // incorrect system GUID
	m.step(2 * time.Minute)
	m.expect("then", states{1: health.Degraded, 2: health.Unhealthy})
}

// Counters of time and of replays are compared over ten minutes, the counter of errors with the previous check.
func TestCounters(t *testing.T) {
	m := newHealthyAgent(t, "h100x8")
	m.set(0, fmt.Sprintf("hw_thermal_slowdown_ns = %d", 7*time.Minute))
	m.set(1, fmt.Sprintf("hw_power_brake_ns = %d", 7*time.Minute))
	m.set(2, "pcie_replays = 100000")
	m.set(3, "ecc_uncorrected_volatile = 7")
	m.step(time.Minute)
	m.expect("uncorrectable errors", states{3: health.Degraded})
	m.step(9 * time.Minute)
	m.expect("after a window", states{0: health.Degraded, 1: health.Degraded, 2: health.Degraded})
	for slot, cause := range []string{"SLOWDOWN_THERMAL", "SLOWDOWN_POWER", "PCIE_REPLAYS"} {
		if h := m.health(slot); h.Cause() != cause {
			t.Error(h)
		}
	}
	m.step(12 * time.Minute)
	m.expect("after another", nil)
}

// Only a reset ends these faults, and the driver shows it in different ways.
func TestReset(t *testing.T) {
	t.Run("recovery action", func(t *testing.T) {
		m := newHealthyAgent(t, "h100x8")
		for _, slot := range []int{2, 6} {
			m.set(slot, "recovery_action = 1")
			m.xid(slot, 95)
		}
		m.step(time.Hour)
		m.expect("before", states{2: health.Unhealthy, 6: health.Unhealthy})
		must(t, m.Reset(2), m.Reset(6), m.Invalidate(6)) // the handle of GPU 6 is not valid after it
		m.step(50 * time.Second)
		m.expect("before the end of the dwell time", states{2: health.Unhealthy, 6: health.Unhealthy})
		m.step(70 * time.Second)
		m.expect("after it", nil)
	})
	t.Run("page retirement", func(t *testing.T) { // before Ampere
		m := newHealthyAgent(t, "t4")
		m.set(0, "retired_dbe = 1", "retired_pending = yes")
		m.xid(0, 63)
		m.step(time.Hour)
		m.expect("pending", states{0: health.Degraded})
		must(t, m.Reset(0))
		m.step(80 * time.Second)
		m.expect("reset", nil)
	})
	t.Run("counters in a vGPU guest", func(t *testing.T) { // where the recovery action is always None
		m := newAgent(t, "h200")
		m.set(0, "virtualization = vgpu", "pcie_replays = 7")
		m.update()
		m.expect("at the start", nil)
		m.xid(0, 95)
		m.step(2 * time.Hour)
		m.expect("later", states{0: health.Unhealthy})
		if text := m.health(0).String(); !strings.Contains(text, "recovery action not reported") {
			t.Error(text)
		}
		must(t, m.Reset(0))
		m.step(3 * time.Minute)
		m.expect("energy and replays fell", nil)
	})
}

// Without events, checks show the faults, and the health text contains the limitation.
func TestWithoutEvents(t *testing.T) {
	t.Run("not supported", func(t *testing.T) {
		m := newAgent(t, "h200")
		m.set(0, "events = none")
		m.update()
		m.xid(0, 95)
		m.expect("no event", nil)
		m.set(0, "recovery_action = 1")
		m.step(10 * time.Second)
		m.expect("the next check", states{0: health.Unhealthy})
		if text := m.health(0).String(); !strings.HasSuffix(text, "(health limited: no XID events)") {
			t.Error(text)
		}
	})
	t.Run("registration fails once", func(t *testing.T) {
		m := newAgent(t, "h200")
		must(t, m.Fail(simdriver.GPU(0), "nvmlDeviceRegisterEvents", "UNKNOWN", 1))
		m.update()
		m.step(10 * time.Second)
		if made, freed := m.calls("nvmlEventSetCreate"), m.calls("nvmlEventSetFree"); made < 2 || freed != made-1 {
			t.Errorf("%d event sets created, %d freed", made, freed) // nvml.h: the set is undefined then
		}
		if text := m.health(0).String(); text != "healthy" {
			t.Error(text)
		}
		m.xid(0, 95)
		m.expect("an event", states{0: health.Unhealthy})
	})
}

// XIDs in the kernel log count for the GPUs of this node, by their PCI addresses.
func TestKernelLog(t *testing.T) {
	m := newHealthyAgent(t, "h100x8")
	text, err := os.ReadFile("testdata/node.kmsg")
	must(t, err)
	log := string(text)
	for slot := range 4 { // @N is the PCI address of GPU N
		pci, err := m.Get(slot, "pci")
		must(t, err)
		log = strings.ReplaceAll(log, fmt.Sprint("@", slot), strings.TrimSuffix(pci, ".0"))
	}
	lines := 0
	for record := range strings.Lines(log) {
		if l, ok := kmsg.Parse(record); ok {
			lines++
			m.observe(health.Observation{PCI: l.PCI, Kind: health.XID, Code: l.XID, Detail: l.Text, FromKernelLog: true})
		}
	}
	m.expect("then", states{0: health.GPULost, 1: health.Degraded, 2: health.Unhealthy})
	for slot, code := range map[int]uint64{0: 79, 1: 149, 2: 119} {
		if h := m.health(slot); h.Code != code || !strings.Contains(h.Detail, xid.XID(code).Meaning) {
			t.Errorf("GPU %d: %s", slot, h)
		}
	}
	if lines != 5 || m.count(0, 154) != 1 || m.count(3, 48) != 0 {
		t.Errorf("%d XIDs; XID 154: %d, XID 48: %d", lines, m.count(0, 154), m.count(3, 48))
	}
}

// count returns how often the GPU in a slot had an XID.
func (m *agent) count(slot int, code uint64) uint64 {
	history, _ := m.state.Ledger.History(gpu.DeviceID(m.UUID(slot)))
	for _, t := range history.FaultCounts {
		if t.Reason == health.ReasonXID && t.Code == code {
			return t.Count
		}
	}
	return 0
}

// All units of a device have the same health, in the same publication: those of a GPU and of all its instances for a fault of the
// GPU, those of one instance for a fault of the instance.
func TestReplicas(t *testing.T) {
	const cut, third = 4, 2 // the GPU with seven instances of the machine "a100-mig", and one of them
	thirdAt := simdriver.At{GI: 9, CI: 0}
	whole := func(m *agent) []string { return []string{m.UUID(0)} }
	instances := func(m *agent) []string { ids, err := m.Instances(cut); must(t, err); return ids }
	for _, tc := range []struct {
		name    string
		slot    int
		code    uint64
		at      []simdriver.At
		devices func(*agent) []string // the affected ones
	}{
		{"a GPU", 0, 46, nil, whole},
		{"all instances", cut, 94, nil, instances},
		{"all instances of a GPU that needs a reset", cut, 46, []simdriver.At{thirdAt}, instances},
		{"one instance", cut, 94, []simdriver.At{thirdAt}, func(m *agent) []string { return instances(m)[third : third+1] }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newAgent(t, "a100-mig", func(c *core.Config) {
				c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}}
				c.Health.DegradedTakesNoWork = true
			})
			m.update()
			m.step(10 * time.Second)
			before := m.now
			m.step(10 * time.Second)
			m.xid(tc.slot, tc.code, tc.at...)
			if tc.code == 46 {
				m.set(tc.slot, "recovery_action = 1")
				m.step(10 * time.Second)
				must(t, m.Reset(tc.slot))
			}
			m.step(5 * time.Minute)
			published, affected := since(m.published, before), tc.devices(m)
			for i, p := range published {
				ofDevice := map[gpu.DeviceID]health.Health{}
				for u := range p.allocatable.Units() {
					unhealthy := slices.Contains(affected, string(u.Device.ID)) && i < len(published)-1
					if h, ok := ofDevice[u.Device.ID]; u.Health.Schedulable() == unhealthy || ok && h != u.Health {
						t.Errorf("publication %d of %d: %s is %s", i+1, len(published), u.ID, u.Health)
					}
					ofDevice[u.Device.ID] = u.Health
				}
			}
			if n := m.count(tc.slot, tc.code); len(published) < 2 || n != 1 {
				t.Errorf("%d publications, XID %d was counted %d times", len(published), tc.code, n)
			}
		})
	}
}
