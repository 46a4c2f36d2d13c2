package health

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/checkpoint"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/setting"
)

// store is what an agent writes down.
func (m *rig) store() *checkpoint.File {
	return checkpoint.Open(m.Root, "health", filepath.Join(m.Root, "proc"), slog.New(slog.DiscardHandler))
}

// restart ends the agent and begins another, which knows what the first has written down. Nobody has asked
// the machine anything then.
func (m *rig) restart() {
	m.t.Helper()
	m.end()
	m.restore()
}

// reboot is a restart of the machine.
func (m *rig) reboot() {
	m.t.Helper()
	m.end()
	must(m.t, m.Reboot())
	m.restore()
}

// end writes the state down and closes the driver.
func (m *rig) end() {
	m.t.Helper()
	store := m.store()
	_, boot := store.Load()
	must(m.t, store.Save(m.state.Checkpoint(boot)))
	m.close()
}

// restore takes up what another agent has written down.
func (m *rig) restore() {
	m.t.Helper()
	record, boot := m.store().Load()
	m.publish(core.Restore(m.cfg, record, boot))
}

// A row remap takes effect at the next reset; until then the GPU is usable.
func TestCase08RowRemap(t *testing.T) {
	t.Run("pending until the reset", func(t *testing.T) {
		m := well(t, "h100x8")
		m.set(6, "remapped_uncorrectable = 1", "remapped_pending = yes")
		m.xid(6, 63)
		m.expect("at once", sick(health.Degraded, 6))
		m.step(time.Hour)
		m.expect("pending", sick(health.Degraded, 6))
		if h := m.health(6); h.Cause() != "ROW_REMAP_PENDING" || !h.Schedulable() {
			t.Error(h)
		}
		m.reset(6)
		m.step(80 * time.Second)
		m.expect("reset", nil)
	})
	t.Run("without an event", func(t *testing.T) {
		m := well(t, "h100x8")
		m.set(6, "remapped_pending = yes")
		m.step(20 * time.Second)
		m.expect("two checks", sick(health.Degraded, 6))
	})
	t.Run("as an event of its own", func(t *testing.T) {
		m := well(t, "h100x8")
		m.event(6, 0x400) // nvmlEventTypeDramRetirementEvent
		m.expect("at once", sick(health.Degraded, 6))
	})
	t.Run("before Ampere", func(t *testing.T) {
		m := well(t, "t4")
		m.set(0, "retired_dbe = 1", "retired_pending = yes")
		m.xid(0, 63)
		m.step(time.Hour)
		m.expect("retirement pending", sick(health.Degraded, 0))
		m.reset(0)
		m.step(80 * time.Second)
		m.expect("reset", nil)
	})
	t.Run("not visible under MIG", func(t *testing.T) {
		m := newRig(t, "a100-mig")
		m.look()
		ids, err := m.Instances(cut)
		must(t, err)
		if text := m.unit(gpu.DeviceID(ids[0])).Health.String(); text != "healthy (health limited: row remapping not visible under MIG)" {
			t.Error(text)
		}
		if text := m.health(0).String(); text != "healthy" {
			t.Errorf("a GPU without MIG: %s", text)
		}
	})
}

// A row that could not be remapped is for an operator: a reset does not mend it.
func TestCase09RemapFailure(t *testing.T) {
	m := well(t, "h100x8")
	m.set(6, "remapped_failed = yes")
	m.xid(6, 64)
	m.expect("at once", sick(health.Unhealthy, 6))
	m.step(10 * time.Second)
	before := m.now
	m.step(10 * time.Minute)
	m.set(6, "energy = 0", "recovery_action = 1")
	m.step(time.Minute)
	m.reset(6)
	m.step(time.Hour)
	m.expect("a reset that leaves the failure", sick(health.Unhealthy, 6))
	if h := m.health(6); h.Cause() != "ROW_REMAP_FAILED" {
		t.Error(h)
	}
	var newer *health.NewerFaultError
	if err := m.clear(6, "", begin.Add(-time.Minute)); !errors.As(err, &newer) {
		t.Errorf("verified before it failed: %v", err)
	}
	var future *setting.Error
	if err := m.clear(6, "", m.now.Add(time.Hour)); !errors.As(err, &future) {
		t.Errorf("verified in the future: %v", err)
	}
	m.expect("refused", sick(health.Unhealthy, 6))
	m.xid(6, 64)
	if err := m.clear(6, "", before); !errors.As(err, &newer) {
		t.Errorf("verified before it failed again: %v", err)
	}
	must(t, m.clear(6, "", m.now))
	m.step(time.Hour)
	m.expect("cleared by an operator", nil)

	m.set(6, "remapped_failed = no")
	m.step(time.Minute)
	m.set(6, "remapped_failed = yes")
	m.step(time.Minute)
	m.expect("it fails anew, of which the operator knew nothing", sick(health.Unhealthy, 6))
	m.set(6, "remapped_failed = no")
	m.step(time.Hour)
	m.expect("the flag alone does not clear it", sick(health.Unhealthy, 6))
}

// What stood before the agent was restarted still stands; a reboot clears what a reboot clears.
func TestCase21Restart(t *testing.T) {
	faulty := func(t *testing.T) *rig {
		m := well(t, "h100x8")
		m.set(1, "remapped_failed = yes")
		m.xid(2, 46)
		m.xid(3, 157)
		must(t, m.Lose(4))
		m.step(time.Minute)
		m.expect("faults", map[int]health.State{1: health.Unhealthy, 2: health.Unhealthy, 3: health.Degraded, 4: health.GPULost})
		return m
	}
	t.Run("the same boot", func(t *testing.T) {
		m := faulty(t)
		m.restart()
		if n := m.state.Inventory.Len(); n > 0 {
			t.Errorf("%d devices before anybody has asked", n)
		}
		m.look()
		m.expect("first look", map[int]health.State{1: health.Unhealthy, 2: health.Unhealthy, 3: health.Degraded, 4: health.GPULost})
		m.step(2 * time.Hour)
		m.expect("later", map[int]health.State{1: health.Unhealthy, 2: health.Unhealthy, 3: health.Degraded, 4: health.GPULost})
	})
	t.Run("another boot", func(t *testing.T) {
		m := faulty(t)
		m.reboot()
		m.look()
		m.step(2 * time.Minute)
		m.expect("what a reboot does not mend", map[int]health.State{1: health.Unhealthy, 3: health.Degraded})
	})
	t.Run("reset while the agent was away", func(t *testing.T) {
		m := faulty(t)
		m.set(2, "recovery_action = 1", "pcie_replays = 3")
		m.step(time.Minute)
		m.reset(2)
		m.restart()
		m.look()
		m.step(3 * time.Minute)
		m.expect("the verdict of before is gone", map[int]health.State{1: health.Unhealthy, 3: health.Degraded, 4: health.GPULost})
	})
	t.Run("corrupt file", func(t *testing.T) {
		m := faulty(t)
		must(t, m.Restore(4))
		m.end()
		file := filepath.Join(m.Root, "health.json")
		must(t, os.WriteFile(file, []byte(`{"Version": 1, "Agent": "health", "Record": {"Cond`), 0o644))
		m.restore()
		m.look()
		m.step(time.Minute)
		m.expect("what can still be seen", map[int]health.State{1: health.Unhealthy})
		if _, err := os.Stat(file + ".broken"); err != nil {
			t.Error(err)
		}
	})
	t.Run("no place to write", func(t *testing.T) {
		m := faulty(t)
		file := filepath.Join(t.TempDir(), "file")
		must(t, os.WriteFile(file, nil, 0o644))
		s := checkpoint.Open(file, "health", "", slog.New(slog.DiscardHandler))
		if err := s.Save(m.state.Checkpoint("a boot")); err == nil || s.Problem() == "" {
			t.Error("nothing is said")
		}
		m.step(time.Minute)
		m.expect("works on", map[int]health.State{1: health.Unhealthy, 2: health.Unhealthy, 3: health.Degraded, 4: health.GPULost})
	})
}

// One counter can fall for other reasons; two at once are a reset.
func TestCase22WeakSigns(t *testing.T) {
	m := well(t, "h200")
	m.set(0, "pcie_replays = 5")
	m.xid(0, 46)
	m.step(10 * time.Minute)
	m.set(0, "energy = 1000")
	m.step(time.Hour)
	m.expect("the energy counter fell", sick(health.Unhealthy, 0))
	m.set(0, "energy = 500", "pcie_replays = 0")
	m.step(10 * time.Minute)
	m.expect("so did the replays", nil)
}

// A GPU that keeps failing is an operator's, however often a reset mends it.
func TestCase24NeedsService(t *testing.T) {
	cycle := func(m *rig, code uint64) {
		m.set(0, "recovery_action = 1")
		m.xid(0, code)
		m.expect("failed", sick(health.Unhealthy, 0))
		m.step(time.Minute)
		m.reset(0)
		m.step(20 * time.Minute)
	}
	t.Run("three recoveries within a day", func(t *testing.T) {
		m := well(t, "h200")
		cycle(m, 48)
		m.expect("first reset", nil)
		m.step(4 * time.Hour)
		cycle(m, 48)
		m.expect("second reset", nil)
		m.step(4 * time.Hour)
		cycle(m, 48)
		m.expect("third reset", sick(health.Unhealthy, 0))
		if h := m.health(0); h.Reason != health.ReasonNeedsService {
			t.Error(h)
		}
		cycle(m, 48)
		m.step(24 * time.Hour)
		m.expect("fourth reset and a day", sick(health.Unhealthy, 0))
		must(t, m.clear(0, "", m.now))
		m.step(time.Minute)
		m.expect("an operator has looked", nil)
	})
	t.Run("the same XID within an hour of a reset", func(t *testing.T) {
		m := well(t, "h200")
		cycle(m, 48)
		m.expect("first reset", nil)
		cycle(m, 48)
		m.expect("second", sick(health.Unhealthy, 0))
		if !strings.Contains(m.health(0).String(), "needs service") {
			t.Error(m.health(0))
		}
	})
	t.Run("the dwell doubles", func(t *testing.T) {
		m := well(t, "h200")
		cycle(m, 48)
		m.set(0, "recovery_action = 1")
		m.xid(0, 62)
		m.reset(0)
		m.step(110 * time.Second)
		m.expect("one minute is not enough any more", sick(health.Unhealthy, 0))
		m.step(30 * time.Second)
		m.expect("two minutes", nil)
	})
}
