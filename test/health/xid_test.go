package health

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Application faults say nothing about the GPU, however many there are.
func TestCase03ApplicationXIDs(t *testing.T) {
	m := well(t, "h100x8")
	quiet := m.now
	for range 100 {
		for _, code := range []uint64{13, 31, 43, 45} {
			must(t, m.XID(3, code))
		}
		m.step(10 * time.Second)
		m.expect("application faults", nil)
	}
	for _, code := range []uint64{13, 31, 43, 45} {
		if n := m.count(3, code); n != 100 {
			t.Errorf("XID %d was counted %d times", code, n)
		}
	}
	if p := m.since(quiet); len(p) > 0 {
		t.Errorf("%d publications", len(p))
	}
}

// One workload that fails over and over says nothing about the GPU; three different ones within an hour do.
func TestCase04ThreeWorkloads(t *testing.T) {
	const id = 1
	work := func(m *rig) {
		m.observe(health.Observation{At: gpu.WholeGPU(m.id(id)), Kind: health.Reserved})
		m.xid(id, 31)
		m.xid(id, 31)
	}
	t.Run("within an hour", func(t *testing.T) {
		m := well(t, "h100x8")
		quiet := m.now
		for range 2 {
			m.step(10 * time.Minute)
			work(m)
			m.expect("one or two workloads", nil)
		}
		m.step(10 * time.Minute)
		work(m)
		m.expect("the third workload", sick(health.Degraded, id))
		if h := m.health(id); h.Reason != health.ReasonWorkloads || !h.Schedulable() {
			t.Error(h)
		}
		if p := m.since(quiet); len(p) != 1 {
			t.Errorf("%d publications", len(p))
		}
		m.step(time.Hour)
		m.expect("an hour later, still under the dwell", sick(health.Degraded, id))
		m.step(2 * time.Minute)
		m.expect("an hour without", nil)
	})
	t.Run("over two hours", func(t *testing.T) {
		m := well(t, "h100x8")
		for range 4 {
			work(m)
			m.step(40 * time.Minute)
			m.expect("never three in an hour", nil)
		}
	})
	t.Run("and the operator says that is unhealthy", func(t *testing.T) {
		m := well(t, "h100x8", func(c *core.Config) { c.Health.ApplicationFaults = xid.Withdraws })
		for range 3 {
			work(m)
		}
		m.expect("three workloads", sick(health.Unhealthy, id))
	})
}

// XID 95 with the driver asking for a reset: no silence heals it, only the reset does.
func TestCase05ResetHeals(t *testing.T) {
	m := well(t, "h100x8")
	m.set(2, "recovery_action = 1")
	m.xid(2, 95)
	m.expect("at once", sick(health.Unhealthy, 2))
	if h := m.health(2); h.Cause() != "XID_95" || h.RecoveryAction != health.RecoveryReset {
		t.Error(h)
	}
	m.step(time.Hour)
	m.expect("an hour of clean checks", sick(health.Unhealthy, 2))
	m.reset(2)
	m.step(50 * time.Second)
	m.expect("reset, but that has not stood long enough", sick(health.Unhealthy, 2))
	m.step(30 * time.Second)
	m.expect("reset, three checks and the dwell", nil)

	m.set(6, "recovery_action = 1")
	m.xid(6, 95)
	m.reset(6)
	must(t, m.Invalidate(6))
	m.step(2 * time.Minute)
	m.expect("a reset that no handle outlives", nil)
}

// XID 95 while the driver says all the time that nothing has to be done: from R565 on its word counts.
func TestCase06VerdictHeals(t *testing.T) {
	m := well(t, "h100x8")
	m.xid(2, 95)
	m.step(80 * time.Second)
	m.expect("settled, but the verdict has not held for the dwell", sick(health.Unhealthy, 2))
	m.step(20 * time.Second)
	m.expect("settle and dwell are over", nil)
}

// XID 94 hits one context only, unless the driver says otherwise.
func TestCase07ContainedError(t *testing.T) {
	t.Run("verdict none", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(5, 94)
		m.expect("at once", sick(health.Degraded, 5))
		m.step(80 * time.Second)
		m.expect("not yet", sick(health.Degraded, 5))
		m.step(20 * time.Second)
		m.expect("verdict none for the dwell", nil)
	})
	t.Run("verdict drain and reset", func(t *testing.T) {
		m := well(t, "h100x8")
		m.set(5, "recovery_action = 4")
		m.xid(5, 94)
		m.expect("at once", sick(health.Unhealthy, 5))
		m.step(time.Hour)
		m.expect("an hour later", sick(health.Unhealthy, 5))
		m.reset(5)
		m.step(80 * time.Second)
		m.expect("reset", nil)
	})
	t.Run("the verdict comes late", func(t *testing.T) {
		m := well(t, "h100x8")
		m.xid(5, 94)
		m.step(20 * time.Second)
		m.expect("recovery action not reported yet", sick(health.Degraded, 5))
		m.set(5, "recovery_action = 4")
		m.step(10 * time.Second)
		m.expect("drain and reset", sick(health.Unhealthy, 5))
	})
}

// Whoever waits for a verdict does not wait for the next round of checks.
func TestCase07VerdictIsAskedForInTime(t *testing.T) {
	patient := func(c *core.Config) { c.Probe, c.Rescan = time.Hour, time.Hour }
	verdict := func(f *live) error { return f.Set(5, "recovery_action", "4") }
	for name, script := range map[string]func(*live){
		"after an XID": func(f *live) {
			must(t, f.XID(5, 94))
			f.until("degraded", f.only(5, health.Degraded, "XID_94"))
			must(t, verdict(f))
		},
		"an event tells of it":     func(f *live) { must(t, verdict(f), f.Event(5, simdriver.EventRecoveryAction, 0)) },
		"after a double-bit error": func(f *live) { must(t, verdict(f), f.Event(5, simdriver.EventDoubleBitECC, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := follow(t, simdriver.Start(t, "h100x8"), patient)
			f.until("eight healthy GPUs", f.all(health.Healthy, 8))
			script(f)
			f.until("unhealthy", f.only(5, health.Unhealthy, "RECOVERY_ACTION_DRAIN_AND_RESET"))
		})
	}
}

// Every verdict but none takes the GPU out, also one that this version of NVML has no name for.
func TestCase15Verdicts(t *testing.T) {
	for value, want := range map[string]string{
		"1": "GPU reset", "2": "node reboot", "3": "drain P2P", "4": "drain and reset", "5": "recover IMEX domain",
		"6": "unknown action", "7": "unknown action", "99": "unknown action",
	} {
		t.Run(value, func(t *testing.T) {
			m := well(t, "h100x8")
			m.set(4, "recovery_action = "+value)
			m.step(10 * time.Second)
			if planned := value == "3" || value == "5"; planned {
				m.expect("one check may meet a planned change", nil)
				m.step(10 * time.Second)
			}
			m.expect("verdict "+value, sick(health.Unhealthy, 4))
			if text := m.health(4).String(); !strings.Contains(text, want) {
				t.Errorf("%q does not say %q", text, want)
			}
			m.set(4, "recovery_action = 0")
			m.step(80 * time.Second)
			m.expect("verdict none", nil)
		})
	}
}

// In a vGPU guest the driver says that nothing has to be done whatever the GPU needs: that heals nothing.
func TestCase16Guest(t *testing.T) {
	guest := func(t *testing.T) *rig {
		m := newRig(t, "h200")
		m.set(0, "virtualization = vgpu", "pcie_replays = 7")
		m.look()
		m.expect("at the start", nil)
		m.xid(0, 95)
		m.step(2 * time.Hour)
		m.expect("two hours of verdict none", sick(health.Unhealthy, 0))
		if text := m.health(0).String(); !strings.Contains(text, "recovery action not reported") {
			t.Errorf("%q lacks: recovery action not reported", text)
		}
		return m
	}
	t.Run("two weak signs of a reset", func(t *testing.T) {
		m := guest(t)
		m.reset(0)
		m.step(3 * time.Minute)
		m.expect("energy and replays fell", nil)
	})
	t.Run("reboot", func(t *testing.T) {
		m := guest(t)
		m.reboot()
		m.look()
		m.expect("after a reboot", nil)
	})
	t.Run("restart of the agent only", func(t *testing.T) {
		m := guest(t)
		m.restart()
		m.step(time.Hour)
		m.expect("after a restart", sick(health.Unhealthy, 0))
	})
	t.Run("operator", func(t *testing.T) {
		m := guest(t)
		must(t, m.clear(0, "XID_95", m.now))
		m.step(10 * time.Second)
		m.expect("cleared", nil)
		var none *health.NoConditionError
		if err := m.clear(0, "XID_95", m.now); !errors.As(err, &none) {
			t.Errorf("cleared twice: %v", err)
		}
	})
}
