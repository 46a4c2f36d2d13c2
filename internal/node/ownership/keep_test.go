package ownership

import (
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// The policy takes a GPU from an agent while work has it: the other agent gets it when the work has ended, and not before that is known.
func TestDeviceStaysWhileWorkHasIt(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DevicePlugin)
		h.nomad.set(coretest.GPU(1), "job a (allocation 1)")
		pass(10 * time.Second)
		check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0)))
		pass(5 * time.Minute)
		n.expectSchedulable(t, "left by the policy", 0)
		k.expectSchedulable(t, "while a job has the GPU", 2)
		n.end()
		pass(time.Minute)
		h.cfg["nomad-gpu"] = on(inventory.OverlapRefuse, 0)
		h.nomad.setUnknown(true)
		n = h.startNomad(t)
		pass(5 * time.Minute)
		k.expectSchedulable(t, "after a restart, while the record is not known", 2)
		h.nomad.set(coretest.GPU(1), "")
		pass(5 * time.Minute)
		k.expectSchedulable(t, "the job has ended, which is not known", 2)
		if w := strings.Join(problem.Lines(n.watcher.Problems()), "\n"); !strings.Contains(w, string(coretest.GPU(1))) || !strings.Contains(w, "the record") {
			t.Errorf("warnings: %s", w)
		}
		h.nomad.setUnknown(false)
		pass(10 * time.Second)
		k.expectSchedulable(t, "that is known", 1, 2)
		n.expectWarnings(t, "that is known", 0)

		h.plugins.set(coretest.GPU(2), "pod default/a")
		check.NoError(t, k.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 1)))
		check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0, 2)))
		pass(5 * time.Minute)
		n.expectSchedulable(t, "while a pod has the GPU", 0)
		check.NoError(t, k.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 1, 2)))
		pass(10 * time.Second)
		k.expectSchedulable(t, "given back by the policy", 1, 2)
	})
}

// A GPU without work stays recorded for the seconds in which it may still be given out.
func TestFreeGPUStaysForAMoment(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0)))
		pass(givenAtMost - time.Second)
		k.expectSchedulable(t, "just left", 2)
		pass(time.Second + 3*defaultTimings.poll) // each agent looks within one pause, and one waits for the lock
		k.expectSchedulable(t, "left", 1, 2)
	})
}

// The instances of a GPU stay recorded like a GPU; one that does not exist any more is in no record, unless work has it.
func TestInstancesStay(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		mixed := func(ids ...int) core.Config {
			cfg := on(inventory.OverlapRefuse, ids...)
			cfg.MIG = inventory.MIGMixed
			return cfg
		}
		h.cfg["nomad-gpu"] = mixed(7)
		n := h.startNomad(t)
		n.machine.Set(coretest.WithMIG(coretest.GPUs(8), 7, "3g.40gb", "3g.40gb"))
		pass(2 * time.Minute)
		if got := inFile(t, n.watcher.store.folder, "nomad-gpu"); len(got) != 2 {
			t.Fatalf("recorded %v", got)
		}
		h.nomad.setAt(gpu.Placement{GPU: coretest.GPU(7), GI: 1}, "job a (allocation 1)")
		check.NoError(t, n.ApplyPolicy(t.Context(), mixed(0)))
		pass(time.Minute)
		if got := inFile(t, n.watcher.store.folder, "nomad-gpu"); len(got) != 3 {
			t.Errorf("while a job has an instance: recorded %v", got)
		}
		n.machine.Set(coretest.WithMIG(coretest.GPUs(8), 7, "3g.40gb"))
		pass(10 * time.Minute)
		if got := inFile(t, n.watcher.store.folder, "nomad-gpu"); len(got) != 2 {
			t.Errorf("one instance is gone: recorded %v", got)
		}
		n.machine.Set(coretest.GPUs(8))
		pass(10 * time.Minute)
		if got := inFile(t, n.watcher.store.folder, "nomad-gpu"); len(got) != 2 {
			t.Errorf("the instance of the job is gone: recorded %v", got)
		}
		h.nomad.set(coretest.GPU(7), "")
		pass(time.Minute)
		if got := inFile(t, n.watcher.store.folder, "nomad-gpu"); len(got) != 1 || got[0] != whole(0) {
			t.Errorf("after the job: recorded %v", got)
		}
	})
}

// Where no record is read a device is given up only if this process knows that it gave the GPU to none; else with the file, or a reboot.
func TestDeviceWithoutARecordOfHolders(t *testing.T) {
	h := newHost(t)
	h.nomad.setNever()
	synctest.Test(t, func(t *testing.T) {
		h.cfg["nomad-gpu"], h.cfg["k8s-gpu"] = on(inventory.OverlapRefuse, 0, 1, 2), on(inventory.OverlapRefuse, 1, 2, 3)
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DevicePlugin)
		pass(10 * time.Second)
		n.watcher.Reserved([]gpu.Device{{ID: coretest.GPU(2), At: whole(2)}})
		check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0)))
		pass(4 * time.Second)
		k.expectSchedulable(t, "a GPU could be given out just now", 3)
		pass(10 * time.Second)
		k.expectSchedulable(t, "GPU 1 was given to none", 1, 3)
		n.end()
		h.cfg["nomad-gpu"] = on(inventory.OverlapRefuse, 0)
		n = h.startNomad(t)
		pass(5 * time.Minute)
		k.expectSchedulable(t, "GPU 2 was given out", 1, 3)
		file := n.watcher.store.path("nomad-gpu", ".json")
		if w := strings.Join(problem.Lines(n.watcher.Problems()), "\n"); !strings.Contains(w, "delete "+file) {
			t.Errorf("warnings: %s", w)
		}
		check.NoError(t, os.Remove(file))
		pass(10 * time.Second)
		k.expectSchedulable(t, "an operator has removed the file", 1, 2, 3)
		n.expectSchedulable(t, "an operator has removed the file", 0)
		n.expectWarnings(t, "an operator has removed the file", 0)
	})
}

// A GPU whose instance a pod has is offered whole to no other agent, also when the instance is gone.
func TestGPUOfAHeldInstanceStays(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		mixed := func(ids ...int) core.Config {
			cfg := on(inventory.OverlapRefuse, ids...)
			cfg.MIG = inventory.MIGMixed
			return cfg
		}
		h.cfg["nomad-gpu"], h.cfg["k8s-gpu"] = mixed(0, 7), mixed(7)
		k := h.startKube(t, inventory.DevicePlugin)
		k.machine.Set(coretest.WithMIG(coretest.GPUs(8), 7, "3g.40gb", "3g.40gb"))
		pass(2 * time.Minute)
		h.plugins.setAt(gpu.Placement{GPU: coretest.GPU(7), GI: 1}, "pod default/a")
		n := h.startNomad(t)
		pass(10 * time.Second)
		check.NoError(t, k.ApplyPolicy(t.Context(), mixed(1)))
		k.machine.Set(coretest.GPUs(8))
		pass(10 * time.Minute)
		n.expectSchedulable(t, "while the pod runs", 0)
		h.plugins.set(coretest.GPU(7), "")
		pass(time.Minute)
		n.expectSchedulable(t, "after the pod", 0, 7)
	})
}
