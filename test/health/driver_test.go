package health

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A GPU is not published as healthy before a check of it is complete.
func TestStart(t *testing.T) {
	t.Run("the check of a GPU hangs", func(t *testing.T) {
		m := newAgent(t, "h100x8")
		m.deadline = 50 * time.Millisecond
		must(t, m.Hang(simdriver.GPU(2), "nvmlDeviceGetFieldValues"))
		m.update()
		m.expect("hanging", states{2: health.Unknown})
		m.step(30 * time.Second)
		m.expect("hanging", states{2: health.Unknown})
		m.expectNeverHealthy(2)
		m.endHangs()
		m.step(20 * time.Second)
		m.expect("after it", nil)
	})
	t.Run("every call about a GPU hangs", func(t *testing.T) {
		m := newAgent(t, "h100x8")
		m.deadline = 50 * time.Millisecond
		must(t, m.Hang(simdriver.GPU(2), "*"))
		m.update()
		m.step(30 * time.Second)
		if n := m.state.Allocatable.Len(); n != 7 {
			t.Errorf("%d GPUs are offered", n)
		}
		m.expectNeverHealthy(2)
		m.endHangs()
		m.step(2 * time.Minute)
		m.expect("after it", nil)
	})
	t.Run("a recovery action", func(t *testing.T) { // determined when the driver was loaded, without an event
		m := newAgent(t, "h100x8")
		m.set(2, "recovery_action = 1")
		m.update()
		m.expect("first check", states{2: health.Unhealthy})
		m.expectNeverHealthy(2)
	})
}

// The end of a hang does not clear other conditions.
func TestHangEnds(t *testing.T) {
	m := newAgent(t, "h100x8")
	m.deadline = 50 * time.Millisecond
	m.update()
	m.expect("at the start", nil)
	m.xid(0, 119)
	must(t, m.Hang(simdriver.GPU(0), "*"))
	m.step(2 * time.Minute)
	m.expect("hanging", states{0: health.Unhealthy})
	m.endHangs()
	m.set(0, "recovery_action = 1")
	m.step(10 * time.Second)
	if h := m.health(0); h.Cause() != "XID_119" || h.RecoveryAction != health.RecoveryReset {
		t.Errorf("after the next check: %s", h)
	}
	m.step(time.Hour)
	m.expect("not reset", states{0: health.Unhealthy})
	must(t, m.Reset(0))
	m.step(3 * time.Minute)
	m.expect("reset", nil)
}

// waitsFail returns the file of an eight-GPU machine whose event waits all return GPU_IS_LOST, which does not name the GPU, while a
// registered GPU is lost.
func waitsFail(t *testing.T) string {
	t.Helper()
	text, err := simdriver.Text("h100x8")
	must(t, err)
	file := filepath.Join(t.TempDir(), "machine.conf")
	must(t, os.WriteFile(file, []byte(strings.Replace(text, "[machine]\n", "[machine]\nwait_lost_once = no\n", 1)), 0o644))
	return file
}

func TestLost(t *testing.T) {
	t.Run("only one GPU", func(t *testing.T) {
		m := newHealthyAgent(t, waitsFail(t))
		must(t, m.Lose(2))
		m.xid(2, 79)
		m.expect("immediately", states{2: health.GPULost})
		m.step(time.Minute)
		before := m.calls("nvmlEventSetCreate")
		m.step(time.Hour)
		m.expect("an hour later", states{2: health.GPULost})
		if n := m.calls("nvmlEventSetCreate") - before; n > 0 {
			t.Errorf("%d more event sets in an hour", n)
		}
		m.xid(3, 48)
		m.expect("events of the others", states{2: health.GPULost, 3: health.Unhealthy})
	})
	t.Run("a lookup of another GPU fails", func(t *testing.T) { // nvmlDeviceGetHandleByUUID initialises GPUs until it has found one
		m := newHealthyAgent(t, "h100x8")
		must(t, m.Lose(2), m.Fail(simdriver.GPU(4), "nvmlDeviceGetHandleByUUID", "GPU_IS_LOST", simdriver.Always))
		m.step(5 * time.Minute)
		m.expect("lost", states{2: health.GPULost})
		m.close()
		m.update()
		m.expect("the next session", states{2: health.GPULost})
	})
	t.Run("replaced", func(t *testing.T) {
		m := newHealthyAgent(t, "h100x8")
		old := gpu.DeviceID(m.UUID(2))
		must(t, m.Lose(2))
		m.xid(2, 79)
		m.step(10 * time.Minute)
		m.set(2, "uuid = GPU-b8c4a1de-2f0c-4b43-9a52-6f3f0f0cafe2", "lost = no")
		m.step(2 * time.Minute)
		m.expect("the new GPU", nil)
		if _, ok := m.state.Ledger.History(old); ok || m.state.Allocatable.Len() != 8 {
			t.Errorf("%d GPUs are listed, history of the old one: %t", m.state.Allocatable.Len(), ok)
		}
	})
}

// calls counts the calls of all versions of a function.
func (m *agent) calls(name string) (n uint64) {
	m.t.Helper()
	counts, err := m.Calls()
	must(m.t, err)
	for call, times := range counts {
		if call == name || strings.HasPrefix(call, name+"_v") {
			n += times
		}
	}
	return n
}

// unknown is the state of the GPUs of the eight-GPU machine without a driver, except those that are unhealthy.
func unknown(unhealthy ...int) states {
	want := states{}
	for slot := range 8 {
		want[slot] = health.Unknown
	}
	for _, slot := range unhealthy {
		want[slot] = health.Unhealthy
	}
	return want
}

// A driver that was unloaded and loaded, or unbound from a GPU and bound again, has reset GPUs. A driver that only could not be
// called has not.
func TestReload(t *testing.T) {
	t.Run("unloaded", func(t *testing.T) {
		m := newHealthyAgent(t, "h100x8")
		m.xid(2, 46)
		m.set(3, "recovery_action = 1")
		m.xid(3, 46)
		m.step(time.Hour)
		m.expect("before", states{2: health.Unhealthy, 3: health.Unhealthy})
		must(t, m.Unload())
		m.step(20 * time.Second) // the first call that fails may be about one GPU
		before := m.now
		m.step(10 * time.Minute)
		m.expect("without a driver", unknown(2, 3))
		if n := len(since(m.published, before)); n > 0 {
			t.Errorf("%d publications without a driver", n)
		}
		if closed := m.calls("nvmlShutdown"); closed != 1 || m.session != nil {
			t.Errorf("%d sessions closed", closed)
		}
		must(t, m.Load())
		m.step(10 * time.Minute)
		m.expect("GPU 3 still has a recovery action", states{3: health.Unhealthy})
	})
	t.Run("not callable", func(t *testing.T) {
		m := newHealthyAgent(t, "h100x8")
		m.xid(2, 46)
		m.step(time.Minute)
		must(t, m.Fail(simdriver.All, "nvmlInit", "UNKNOWN", 3))
		m.close()
		m.step(time.Hour)
		m.expect("later", states{2: health.Unhealthy})
	})
	t.Run("only the library was missing", func(t *testing.T) { // a driver root that is mounted again
		m := newHealthyAgent(t, "h100x8")
		m.xid(2, 119)
		m.step(time.Minute)
		must(t, m.Hide())
		m.close()
		m.step(time.Minute)
		m.expect("no library", unknown(2))
		if d := m.state.Allocatable.Driver(); d.State != gpu.DriverAbsent {
			t.Errorf("the driver is %s", d.State)
		}
		must(t, m.Unhide())
		m.step(time.Hour)
		m.expect("later", states{2: health.Unhealthy})
	})
	t.Run("unloaded while the library was missing", func(t *testing.T) {
		m := newHealthyAgent(t, "h100x8")
		m.xid(2, 119)
		must(t, m.Hide(), m.Unload())
		m.step(time.Minute)
		m.expect("no library and no module", unknown(2))
		must(t, m.Load())
		m.step(time.Minute)
		must(t, m.Unhide())
		m.step(10 * time.Minute)
		m.expect("later", nil)
	})
	t.Run("one GPU rebound", func(t *testing.T) {
		m := newHealthyAgent(t, "h100x8")
		m.xid(2, 46)
		m.xid(3, 46)
		m.step(time.Hour)
		must(t, m.Unbind(2), m.Bind(2))
		m.step(3 * time.Minute)
		m.expect("rebound", states{3: health.Unhealthy})
		must(t, m.Bind(3))
		m.step(3 * time.Minute)
		m.expect("bound without an unbind before", states{3: health.Unhealthy})
	})
	t.Run("one GPU unbound for an hour", func(t *testing.T) {
		m := newHealthyAgent(t, "h100x8")
		m.xid(2, 46)
		must(t, m.Unbind(2))
		m.step(time.Hour)
		m.expect("unbound", states{2: health.GPULost})
		must(t, m.Bind(2))
		m.step(3 * time.Minute)
		m.expect("bound", nil)
	})
}

// A fault that a check finds in one call after another is published once.
func TestFaultInDifferentCalls(t *testing.T) {
	m := newHealthyAgent(t, "h100x8")
	before := m.now
	must(t, m.Fail(simdriver.GPU(4), "*", "UNKNOWN", simdriver.Always))
	m.step(time.Hour)
	m.expect("every call fails", states{4: health.Unhealthy})
	if n := len(since(m.published, before)); n != 1 {
		t.Errorf("%d publications", n)
	}
	must(t, m.Heal(), m.Lose(3))
	m.step(5 * time.Minute)
	before = m.now
	for i := range 60 {
		must(t, m.Heal())
		call := []string{"nvmlDeviceGetUUID", "nvmlDeviceGetFieldValues", "nvmlDeviceGetHandleByIndex"}[i%3]
		must(t, m.Fail(simdriver.GPU(3), call, "GPU_IS_LOST", simdriver.Always))
		m.step(time.Minute)
	}
	m.expect("lost", states{3: health.GPULost})
	if n := len(since(m.published, before)); n > 0 {
		t.Errorf("%d publications", n)
	}
}
