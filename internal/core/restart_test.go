package core_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// restartFixture is a host over restarts of its agent. The samples of its GPUs can be set.
type restartFixture struct {
	testing.TB
	cfg     core.Config
	now     time.Time
	host    gpu.Snapshot
	samples map[gpu.DeviceID]*health.Sample
	state   core.State
}

// newRestartFixture begins with healthy GPUs and one snapshot.
func newRestartFixture(t testing.TB, machine gpu.Snapshot) *restartFixture {
	t.Helper()
	l := &restartFixture{TB: t, cfg: core.DefaultConfig(), now: testStart, host: machine, samples: map[gpu.DeviceID]*health.Sample{}}
	l.cfg.MIG = inventory.MIGMixed
	for _, o := range healthyChecks(machine) {
		l.samples[o.At.GPU] = &o.Sample
	}
	l.state = core.NewState(l.cfg)
	l.read(1)
	return l
}

// gpuAt returns the placement of the n-th GPU of coretest.GPUs.
func gpuAt(n int) gpu.Placement { return gpu.WholeGPU(coretest.GPU(n)) }

// read reads n snapshots with health checks, one per checkInterval.
func (l *restartFixture) read(n int) {
	for range n {
		l.now = l.now.Add(checkInterval)
		var checks []health.Observation
		for _, d := range l.host.Devices {
			if v, ok := l.samples[d.ID]; ok {
				checks = append(checks, health.Observation{At: d.At, Kind: health.Checked, Sample: *v})
			}
		}
		l.state = l.state.Read(l.cfg, l.now, l.host, checks...)
	}
}

func (l *restartFixture) observe(obs ...health.Observation) {
	l.state = l.state.Observe(l.cfg, l.now, obs...)
}

// noDriver reads a snapshot of a driver that is not ready.
func (l *restartFixture) noDriver(state gpu.DriverState) {
	l.now = l.now.Add(checkInterval)
	l.state = l.state.Read(l.cfg, l.now, gpu.NoDriver(state, "not there"))
}

// restart ends the agent and starts another one, under the same boot ID or a new one.
func (l *restartFixture) restart(boot, next string) {
	l.Helper()
	text, err := json.Marshal(l.state.Checkpoint(boot))
	if err != nil {
		l.Fatal(err)
	}
	var record core.Checkpoint
	if err := json.Unmarshal(text, &record); err != nil {
		l.Fatal(err)
	}
	l.state = core.Restore(l.cfg, record, next)
	if n := l.state.Inventory.Len(); n != 0 {
		l.Errorf("%d units are offered before the driver was asked", n)
	}
}

// expect compares the offered devices: state and cause of each.
func (l *restartFixture) expect(when string, want map[gpu.DeviceID]string) {
	l.Helper()
	got := map[gpu.DeviceID]string{}
	for u := range l.state.Inventory.Units() {
		got[u.Device.ID] = u.Health.State.String() + " " + u.Health.Cause()
	}
	for id := range want {
		if got[id] != want[id] {
			l.Errorf("%s: %s is %q, want %q", when, id, got[id], want[id])
		}
	}
	if len(got) != len(want) {
		l.Errorf("%s: offered %v, want %v", when, got, want)
	}
}

// The first snapshot after a restart shows which devices still exist.
func TestDevicesAfterRestart(t *testing.T) {
	t.Run("one died", func(t *testing.T) {
		for _, next := range []string{"boot", "other boot"} {
			l := newRestartFixture(t, coretest.GPUs(2))
			l.restart("boot", next)
			l.host = without(l.host, coretest.GPU(1))
			l.read(1)
			l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"})
		}
	})
	t.Run("one was replaced", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		l.observe(xidEvent(gpuAt(1), 119))
		l.restart("boot", "boot")
		l.host = coretest.GPUs(2)
		l.host.Devices[1].ID, l.host.Devices[1].At = "GPU-new", gpu.WholeGPU("GPU-new")
		fresh := healthySample()
		l.samples["GPU-new"] = &fresh
		l.read(1)
		l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", "GPU-new": "healthy "})
		if _, ok := l.state.Ledger.History(coretest.GPU(1)); ok || len(l.state.Ledger.Conditions()) != 0 {
			t.Errorf("the old one is not forgotten: %v", l.state.Ledger.Conditions())
		}
	})
	t.Run("MIG instances changed", func(t *testing.T) {
		l := newRestartFixture(t, migMachine())
		l.restart("boot", "boot")
		l.host = without(l.host, "MIG-1")
		l.read(1)
		l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", "MIG-2": "healthy "})
	})
	t.Run("over restarts without a reading", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		for range 3 {
			l.restart("boot", "boot")
		}
		l.host = without(l.host, coretest.GPU(1))
		l.read(1)
		l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"})
	})
}

// A driver that is not ready gives no information on devices: they stay, unless the host was rebooted.
func TestDevicesWithoutADriver(t *testing.T) {
	unknown := map[gpu.DeviceID]string{coretest.GPU(0): "unknown NVML_UNAVAILABLE", coretest.GPU(1): "unknown NVML_UNAVAILABLE"}
	well := map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "healthy "}
	l := newRestartFixture(t, coretest.GPUs(2))
	l.restart("boot 1", "boot 1")
	l.noDriver(gpu.DriverFailed)
	l.expect("the same boot", unknown)
	l.read(1)
	l.expect("the driver is back", well)

	l.observe(xidEvent(gpuAt(0), 157))
	l.restart("boot 1", "boot 2")
	for range 2 { // a second restart before the driver was ready
		l.noDriver(gpu.DriverAbsent)
		l.expect("another boot", nil)
		l.restart("boot 2", "boot 2")
	}
	l.noDriver(gpu.DriverAbsent)
	l.expect("another boot", nil)
	l.host = without(l.host, coretest.GPU(1))
	l.read(1)
	l.expect("a driver at last", map[gpu.DeviceID]string{coretest.GPU(0): "degraded XID_157", coretest.GPU(1): "lost LOST"})
	l.restart("boot 2", "boot 2")
	l.noDriver(gpu.DriverFailed)
	l.expect("that boot again", map[gpu.DeviceID]string{coretest.GPU(0): "unknown NVML_UNAVAILABLE", coretest.GPU(1): "lost LOST"})
}

// A GPU that the driver has not listed for a day is dropped.
func TestForget(t *testing.T) {
	gone := func(l *restartFixture) { l.host = without(l.host, coretest.GPU(1)) }
	both := map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"}
	one := map[gpu.DeviceID]string{coretest.GPU(0): "healthy "}
	hours := func(l *restartFixture, n int) {
		l.now = l.now.Add(time.Duration(n)*time.Hour - checkInterval)
		l.read(1)
	}
	t.Run("after a day", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		gone(l)
		l.read(1)
		hours(l, 23)
		l.expect("within the day", both)
		hours(l, 1)
		l.now = l.now.Add(time.Minute)
		l.observe()
		l.expect("after it", one)
		if _, ok := l.state.Ledger.History(coretest.GPU(1)); ok || len(l.state.Ledger.Conditions()) != 0 {
			t.Errorf("something is left of it: %v", l.state.Ledger.Conditions())
		}
	})
	t.Run("with other conditions", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		l.observe(xidEvent(gpuAt(1), 79))
		gone(l)
		l.read(1)
		hours(l, 24)
		l.now = l.now.Add(time.Minute)
		l.observe()
		l.expect("after a day", one)
	})
	t.Run("over restarts", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		gone(l)
		l.read(1)
		for range 23 {
			l.restart("boot", "boot")
			hours(l, 1)
			l.expect("within the day", both)
		}
		l.restart("boot", "boot")
		hours(l, 1)
		l.expect("after it", one)
	})
	t.Run("but not while it is listed", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		slot := l.host.Devices[1].PCI
		gone(l)
		l.host.Excluded = []gpu.Exclusion{{Index: 1, PCI: slot, Failure: gpu.FailureLost, Reason: "GPU is lost"}}
		l.read(1)
		hours(l, 48)
		l.expect("after two days", both)
	})
	t.Run("nor while the driver is not ready", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		gone(l)
		l.read(1)
		l.now = l.now.Add(48 * time.Hour)
		l.noDriver(gpu.DriverFailed)
		l.expect("after two days", map[gpu.DeviceID]string{coretest.GPU(0): "unknown NVML_UNAVAILABLE", coretest.GPU(1): "lost LOST"})
	})
	t.Run("counted from the last loss", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		whole := l.host
		gone(l)
		l.read(1)
		hours(l, 23)
		l.host = whole
		l.read(1)
		gone(l)
		l.read(1)
		hours(l, 23)
		l.expect("it was there in between", both)
	})
}
