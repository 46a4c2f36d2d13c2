package ownership

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func (h host) force(t *testing.T, n int, to inventory.API) {
	t.Helper()
	check.NoError(t, Change(t.Context(), h.dir, func(f File) (File, error) {
		return f.WithTargets([]TargetChange{{GPU: coretest.GPU(n), Target: to, From: inventory.Nomad, Force: true}}, time.Now()), nil
	}))
}

func (h host) entry(t *testing.T, n int) Entry {
	t.Helper()
	f, err := Read(h.dir)
	check.NoError(t, err)
	return f.GPUs[coretest.GPU(n)]
}

// Force takes a GPU from an agent that does not run, not from one that is restarted, once: later work of that agent keeps its GPU.
func TestForce(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DevicePlugin)
		h.nomad.set(coretest.GPU(1), "job a (allocation 1)")
		h.move(t, 1, inventory.Nomad) // so that the GPU has an entry
		pass(10 * time.Second)

		h.force(t, 1, inventory.DevicePlugin)
		pass(10 * time.Second)
		n.end()
		pass(20 * time.Second)
		h.nomad.setUnknown(true)
		n = h.startNomad(t)
		pass(2 * time.Minute)
		k.expect(t, "forced, while the agent that knows of a job is restarted", through{2: inventory.DevicePlugin})
		if e := h.entry(t, 1); e.Force {
			t.Errorf("forced, and a job is known: %+v", e)
		}
		h.nomad.set(coretest.GPU(1), "")
		pass(2 * time.Minute)
		k.expect(t, "after the job, while the record is not known", through{2: inventory.DevicePlugin})

		n.end()
		pass(time.Minute)
		k.expect(t, "the agent has ended", through{2: inventory.DevicePlugin})
		h.force(t, 1, inventory.DevicePlugin)
		pass(DefaultSettle - 10*time.Second)
		k.expect(t, "forced, within the settle time", through{2: inventory.DevicePlugin})
		pass(20 * time.Second)
		k.expect(t, "forced", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
		n = h.startNomad(t)
		pass(DefaultSettle + 20*time.Second)
		n.expect(t, "the agent is back", through{0: ""})
		k.expect(t, "the agent is back", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
		if e := h.entry(t, 1); e.Force || e.Owner != inventory.DevicePlugin {
			t.Errorf("after the forced move: %+v", e)
		}
	})
}
