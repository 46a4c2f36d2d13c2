package health

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Nothing is offered as well of which nobody has asked.
func TestCase01FirstProbeBlocked(t *testing.T) {
	t.Run("the check of one GPU hangs", func(t *testing.T) {
		m := newRig(t, "h100x8")
		m.patience = 50 * time.Millisecond
		must(t, m.Hang(simdriver.GPU(2), "nvmlDeviceGetFieldValues"))
		m.look()
		m.expect("blocked", sick(health.Unknown, 2))
		m.step(30 * time.Second)
		m.expect("still blocked", sick(health.Unknown, 2))
		m.neverHealthy(2)
		m.heal()
		m.step(20 * time.Second)
		m.expect("released", nil)
	})
	t.Run("every call about one GPU hangs", func(t *testing.T) {
		m := newRig(t, "h100x8")
		m.patience = 50 * time.Millisecond
		must(t, m.Hang(simdriver.GPU(2), "*"))
		m.look()
		m.step(30 * time.Second)
		if n := m.state.Inventory.Len(); n != 7 {
			t.Errorf("%d GPUs are offered", n)
		}
		m.neverHealthy(2)
		m.heal()
		m.step(2 * time.Minute)
		m.expect("released", nil)
	})
	t.Run("the driver as a whole hangs", func(t *testing.T) {
		m := simdriver.Start(t, "h100x8")
		must(t, m.Hang(simdriver.All, "nvmlInit"))
		f := follow(t, m, hasty)
		f.until("the driver does not answer", func(inv *inventory.Inventory) bool {
			return inv.Driver().State == gpu.DriverFailed && inv.Len() == 0
		})
		must(t, m.Heal())
		f.until("eight healthy GPUs", f.all(health.Healthy, 8))
	})
}

// The driver computes its verdict silently when it is loaded: no event tells of it, only asking does.
func TestCase02VerdictBeforeTheStart(t *testing.T) {
	m := newRig(t, "h100x8")
	m.set(2, "recovery_action = 1")
	m.look()
	m.expect("first check", sick(health.Unhealthy, 2))
	m.neverHealthy(2)
	if h := m.health(2); h.Cause() != "RECOVERY_ACTION_GPU_RESET" {
		t.Error(h)
	}
	m.reset(2)
	m.step(80 * time.Second)
	m.expect("reset", nil)
}
