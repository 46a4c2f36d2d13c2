package health

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// rude is a file of the eight-GPU machine whose every event wait says GPU_IS_LOST while a registered GPU is
// lost, and never which.
func rude(t *testing.T) string {
	t.Helper()
	text, err := simdriver.Text("h100x8")
	must(t, err)
	file := filepath.Join(t.TempDir(), "machine.conf")
	must(t, os.WriteFile(file, []byte(strings.Replace(text, "[machine]\n", "[machine]\nwait_lost_once = no\n", 1)), 0o644))
	return file
}

// A GPU that fell off the bus is lost, and nobody else: the event wait, which fails for all of them and does
// not say whose loss it is, is made anew without it.
func TestCase10FallenOffTheBus(t *testing.T) {
	t.Run("only GPU 2", func(t *testing.T) {
		m := well(t, rude(t))
		must(t, m.Lose(2))
		m.xid(2, 79)
		m.expect("at once", sick(health.GPULost, 2))
		m.step(time.Minute)
		made := m.calls("nvmlEventSetCreate")
		m.step(time.Hour)
		m.expect("an hour later", sick(health.GPULost, 2))
		if n := m.calls("nvmlEventSetCreate") - made; n > 0 {
			t.Errorf("%d more event sets in an hour", n)
		}
		m.xid(3, 48)
		m.expect("the others are heard", map[int]health.State{2: health.GPULost, 3: health.Unhealthy})
	})
	t.Run("no busy loop", func(t *testing.T) {
		f := follow(t, simdriver.Start(t, rude(t)))
		f.until("eight healthy GPUs", f.all(health.Healthy, 8))
		must(t, f.XID(2, 79), f.Lose(2))
		f.until("GPU 2 lost", f.only(2, health.GPULost, "XID_79"))
		before, began := f.work(), time.Now()
		<-time.After(2 * time.Second) // this is about what happens while nothing does
		if n, limit := f.work()-before, 500*time.Since(began).Seconds(); float64(n) > limit {
			t.Errorf("%d driver calls in %v", n, time.Since(began))
		}
	})
}

// work counts the driver calls so far.
func (f *live) work() (n uint64) {
	calls, err := f.Calls()
	must(f.t, err)
	for _, times := range calls {
		n += times
	}
	return n
}

// calls counts the calls of a function, all its versions together.
func (m *rig) calls(name string) (n uint64) {
	m.t.Helper()
	calls, err := m.Calls()
	must(m.t, err)
	for call, times := range calls {
		if call == name || strings.HasPrefix(call, name+"_v") {
			n += times
		}
	}
	return n
}

// NVML looks a UUID up by initialising GPUs until it has found it, so the answer may be about a neighbour.
func TestCase11LookupBlamesTheWrongGPU(t *testing.T) {
	m := well(t, "h100x8")
	must(t, m.Lose(2), m.Fail(simdriver.GPU(4), "nvmlDeviceGetHandleByUUID", "GPU_IS_LOST", simdriver.Always))
	m.step(5 * time.Minute)
	m.expect("a neighbour is lost", sick(health.GPULost, 2))
	m.restart()
	m.look()
	m.expect("a session begins", sick(health.GPULost, 2))
}

// A GPU that comes back is unhealthy first and gets well by evidence; another GPU in its place is another.
func TestCase12LostAndBack(t *testing.T) {
	t.Run("the same GPU", func(t *testing.T) {
		m := well(t, "h100x8")
		must(t, m.Lose(2))
		m.xid(2, 79)
		m.step(10 * time.Minute)
		m.expect("lost", sick(health.GPULost, 2))
		must(t, m.Restore(2))
		m.step(10 * time.Second)
		m.expect("it answered once", sick(health.GPULost, 2))
		m.step(20 * time.Second)
		m.expect("it answers again", sick(health.Unhealthy, 2))
		m.step(30 * time.Second)
		m.expect("not yet for the dwell", sick(health.Unhealthy, 2))
		m.step(30 * time.Second)
		m.expect("it was initialised anew", nil)
	})
	t.Run("another GPU", func(t *testing.T) {
		m := well(t, "h100x8")
		old := m.id(2)
		must(t, m.Lose(2))
		m.xid(2, 79)
		m.step(10 * time.Minute)
		m.set(2, "uuid = GPU-b8c4a1de-2f0c-4b43-9a52-6f3f0f0cafe2", "lost = no")
		m.step(2 * time.Minute)
		m.expect("the new one has no history", nil)
		if m.state.Inventory.Len() != 8 {
			t.Errorf("%d GPUs are listed", m.state.Inventory.Len())
		}
		if c, ok := m.state.Ledger.History(old); ok {
			t.Errorf("the old one is remembered: %+v", c)
		}
	})
	t.Run("no longer listed", func(t *testing.T) {
		m := well(t, "h100x8", func(c *core.Config) { c.Health.RemoveLostAfter = time.Hour })
		gone := m.id(7)
		must(t, m.Remove(7))
		m.step(2 * time.Minute)
		if h := m.unit(gone).Health; h.State != health.GPULost {
			t.Error(h)
		}
		m.step(time.Hour)
		if _, ok := m.state.Inventory.Unit(inventory.UnitID(gone)); ok || m.state.Inventory.Len() != 7 {
			t.Errorf("%d GPUs are listed", m.state.Inventory.Len())
		}
		m.expect("forgotten", nil)
	})
}
