package ownership

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// Two agents that both offer eight GPUs move them to three APIs at once. Those that leave Nomad wait for its record, with the reason in
// the log of its agent, once; when there is one, all moves are done.
func TestEightGPUsMoveToThreeSidesAtOnce(t *testing.T) {
	owners := []inventory.API{inventory.DevicePlugin, inventory.DRA, inventory.Nomad}
	var all []int
	for i := range 8 {
		all = append(all, i)
	}
	h := newHost(t)
	h.cfg = map[string]core.Config{"nomad-gpu": on(inventory.OverlapWarn, all...), "k8s-gpu": on(inventory.OverlapWarn, all...)}
	h.nomad.setUnknown(true)
	synctest.Test(t, func(t *testing.T) {
		k := h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(10 * time.Second)
		n := h.startNomad(t)
		pass(10 * time.Second)
		kube, nomad := through{}, through{}
		check.NoError(t, Change(t.Context(), h.dir, func(f File) (File, error) {
			var changes []TargetChange
			for i := range all {
				to := owners[i%3]
				changes = append(changes, TargetChange{GPU: coretest.GPU(i), Target: to, From: inventory.DRA})
				if to == inventory.Nomad {
					nomad[i] = to
				} else {
					kube[i] = to
				}
			}
			return f.WithTargets(changes, time.Now()), nil
		}))
		pass(2 * time.Minute)
		k.expect(t, "without a record of Nomad", through{})
		n.expect(t, "without a record of Nomad", nomad)
		for i := range kube {
			id := coretest.GPU(i)
			if c := n.lines(`msg="GPU moves"`, "id="+string(id), `waits_for="the record"`); c != 1 {
				t.Errorf("GPU %d: %d lines of what nomad-gpu waits for:\n%s", i, c, n.log)
			}
			if c := k.lines(`msg="GPU has moved and is not given out yet"`, "id="+string(id), "nomad-gpu, which offers it, to give it up"); c != 1 {
				t.Errorf("GPU %d: %d lines of what k8s-gpu waits for:\n%s", i, c, k.log)
			}
		}
		for i := range nomad {
			if c := k.lines(`msg="GPU changed its API"`, "id="+string(coretest.GPU(i)), "from=dra", "to=nomad"); c != 1 {
				t.Errorf("GPU %d: %d lines of the change of its API:\n%s", i, c, k.log)
			}
		}
		quiet := n.logged("msg=\"GPU ") + k.logged("msg=\"GPU ")
		pass(2 * time.Minute)
		if again := n.logged("msg=\"GPU ") + k.logged("msg=\"GPU "); again != quiet {
			t.Errorf("%d lines about moves while nothing changed:\n%s\n%s", again-quiet, n.log, k.log)
		}
		h.nomad.setUnknown(false)
		pass(DefaultSettle + 20*time.Second)
		k.expect(t, "with a record of Nomad", kube)
		n.expect(t, "with a record of Nomad", nomad)
	})
}

// lines counts the lines of the log that have all texts.
func (a *agent) lines(texts ...string) (count int) {
next:
	for line := range strings.Lines(a.log.String()) {
		for _, text := range texts {
			if !strings.Contains(line, text) {
				continue next
			}
		}
		count++
	}
	return count
}
