package health

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// with615 returns the file of an eight-GPU machine with a driver of branch 615.
func with615(t *testing.T) string {
	t.Helper()
	text, err := simdriver.With615("h100x8")
	must(t, err)
	file := filepath.Join(t.TempDir(), "machine.conf")
	must(t, os.WriteFile(file, []byte(text), 0o644))
	return file
}

// faultCount is how often the GPU in a slot had an XID.
func (m *agent) faultCount(slot int, code uint64) (n uint64) {
	history, _ := m.state.Ledger.History(gpu.DeviceID(m.UUID(slot)))
	for _, c := range history.FaultCounts {
		if c.Reason == health.ReasonXID && c.Code == code {
			n += c.Count
		}
	}
	return n
}

// The XID of an operational event is the fault of its GPU, as an NVML event of it is; both and the kernel log's line are one.
func TestXIDOfOperationalEvents(t *testing.T) {
	m := newHealthyAgent(t, with615(t))
	must(t, m.Operational(2, "severity=40", "level=50", "group=1", "xid=119"))
	m.update()
	m.expect("the operational event alone", states{2: health.Unhealthy})
	if h := m.health(2); h.Cause() != "XID_119" {
		t.Error(h)
	}
	m.xid(2, 119)
	m.observe(health.Observation{At: gpu.WholeGPU(gpu.DeviceID(m.UUID(2))), Kind: health.XID, Code: 119, FromKernelLog: true})
	if n := m.faultCount(2, 119); n != 1 {
		t.Errorf("counted %d times", n)
	}
	m.xid(3, 13)
	must(t, m.Operational(3, "severity=30", "level=50", "group=2", "xid=13"))
	m.update()
	if n := m.faultCount(3, 13); n != 1 {
		t.Errorf("a program's fault was counted %d times", n)
	}
	m.expect("a program's fault", states{2: health.Unhealthy})
}

// Operational events without an XID of their GPU degrade it for a minute if they are fatal, also with numbers of a later driver. Others have no
// effect on health. All are in the GPU's history.
func TestOperationalEventsWithoutXID(t *testing.T) {
	m := newHealthyAgent(t, with615(t))
	must(t,
		m.Operational(0, "module=GSP", "severity=40", "level=50"),
		m.Operational(1, "severity=40", "level=50", "xid=79", "group_attributes=0x4"), // simulated
		m.Operational(2, "severity=40", "level=50", "xid=79", "attributes=0x4"),       // propagated from another source
		m.Operational(3, "severity=40", "level=50", "xid=79", "group_attributes=0x2"), // of a previous error
		m.Operational(4, "severity=77", "level=88", "attributes=0xff00", "group_attributes=0xff00", "context"),
		m.Operational(5, "level=40", "attributes=0x40"), // events were dropped
	)
	m.update()
	m.expect("then", states{0: health.Degraded, 4: health.Degraded})
	m.step(2 * time.Minute)
	m.expect("after checks", nil)
	for slot := range 6 {
		history, _ := m.state.Ledger.History(gpu.DeviceID(m.UUID(slot)))
		if len(history.Operational) != 1 || history.Operational[0].Count != 1 || len(history.FaultCounts) > 0 || (history.EventsDropped == 1) != (slot == 5) {
			t.Errorf("GPU %d: %+v, %d dropped, faults %+v", slot, history.Operational, history.EventsDropped, history.FaultCounts)
		}
	}
	if history, _ := m.state.Ledger.History(gpu.DeviceID(m.UUID(1))); !history.Operational[0].Event.Simulated() {
		t.Errorf("%+v", history.Operational)
	}
}

// On a GPU in MIG mode the XID of an instance stays one of that instance.
func TestOperationalEventOfAnInstance(t *testing.T) {
	m := newAgent(t, with615(t))
	must(t, m.SetMIG(3, "1g.10gb", "1g.10gb"))
	m.update()
	id := gpu.DeviceID(m.UUID(3))
	i := slices.IndexFunc(m.state.Snapshot.Devices, func(d gpu.Device) bool { return d.At.GPU == id && d.Profile != "" })
	at := m.state.Snapshot.Devices[i].At
	must(t, m.Operational(3, "severity=30", "level=50", "xid=94"))
	m.xid(3, 94, simdriver.At{GI: int(at.GI), CI: int(at.CI)})
	m.step(30 * time.Second)
	for _, c := range m.state.Ledger.Conditions() {
		if c.At != at {
			t.Errorf("%+v", c)
		}
	}
	if n := m.faultCount(3, 94); n != 1 {
		t.Errorf("counted %d times", n)
	}
}

// A check follows an operational event that may be of a fault, and one before which others were dropped, at once; the next regular one is an
// hour away.
func TestCheckAfterOperationalEvents(t *testing.T) {
	for name, words := range map[string][]string{
		"recoverable": {"severity=30", "level=40"}, "fatal": {"severity=40", "level=50"}, "a later severity": {"severity=99", "level=50"},
		"events dropped": {"severity=10", "level=40", "attributes=0x40"}, "an XID": {"severity=10", "level=40", "xid=63", "attributes=0x4"},
	} {
		t.Run(name, func(t *testing.T) {
			f := monitorOf(t, simdriver.Start(t, with615(t)), func(c *core.Config) { c.Probe, c.Rescan = time.Hour, time.Hour })
			f.awaitAll(health.Healthy)
			must(t, f.Set(5, "recovery_action", "4"), f.Operational(5, words...))
			f.awaitOnly(5, health.Unhealthy, "RECOVERY_ACTION_DRAIN_AND_RESET")
		})
	}
	t.Run("none after others", func(t *testing.T) {
		f := monitorOf(t, simdriver.Start(t, with615(t)), func(c *core.Config) { c.Probe, c.Rescan = time.Hour, time.Hour })
		f.awaitAll(health.Healthy)
		checks := f.Stats().Checks
		must(t, f.Operational(5, "severity=20", "level=40"), f.Operational(6, "severity=40", "level=50", "xid=79", "group_attributes=0x4"))
		await(t, "both are in the history", func() bool {
			five, _ := f.State().Ledger.History(gpu.DeviceID(f.UUID(5)))
			six, _ := f.State().Ledger.History(gpu.DeviceID(f.UUID(6)))
			return len(five.Operational) == 1 && len(six.Operational) == 1
		})
		if n := f.Stats().Checks - checks; n > 0 {
			t.Errorf("%d checks", n)
		}
	})
}

// An operational event with an XID is in the inventory of the monitor.
func TestOperationalXIDInTheInventory(t *testing.T) {
	f := monitorOf(t, simdriver.Start(t, with615(t)), func(c *core.Config) { c.Probe, c.Rescan = time.Hour, time.Hour })
	f.awaitAll(health.Healthy)
	must(t, f.Operational(6, "severity=40", "level=50", "xid=119"))
	f.awaitOnly(6, health.Unhealthy, "XID_119")
	if u, _ := f.Current().Unit(inventory.UnitID(f.UUID(6))); u.Health.Schedulable() {
		t.Error(u.Health)
	}
}

// A bank remap that is pending degrades its GPU like that of a row. The fabric of a driver with the fourth struct counts as before.
func TestSignalsOfNewerDrivers(t *testing.T) {
	m := newHealthyAgent(t, with615(t))
	m.set(0, "bank_remap_pending = yes")
	m.set(1, "fabric_health_summary = 2")
	m.set(2, "fabric_health_mask = 0xa000") // no partition is assigned, the global fabric manager is not connected
	m.step(6 * time.Minute)
	m.expect("then", states{0: health.Degraded, 1: health.Unhealthy})
	if h := m.health(0); h.Cause() != "ROW_REMAP_PENDING" || h.Detail != "memory bank" {
		t.Errorf("%s, %q", h, h.Detail)
	}
	m.set(0, "bank_remap_pending = no")
	m.step(6 * time.Minute)
	m.expect("no longer pending", states{1: health.Unhealthy})
}
