package ownership

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func (r *record) setLate(late func(gpu.DeviceID) string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.late = late
}

// recordedSince is when an agent first recorded a GPU.
func (h host) recordedSince(t *testing.T, agent string, n int) time.Time {
	t.Helper()
	s := &store{folder: filepath.Join(h.dir, FolderName), agent: agent, boot: "b00t"}
	r, err := s.read(s.isRunning)
	check.NoError(t, err)
	c := r.mine.oldestOn(gpu.WholeGPU(coretest.GPU(n)))
	if c == nil {
		t.Fatalf("%s has not recorded GPU %d", agent, n)
	}
	return c.since
}

// A claim that is prepared between the last look at the record and the inventory without the GPU keeps the GPU in the file of this agent: the other one
// does not offer the GPU until it has ended.
func TestClaimPreparedWhileItsGPULeaves(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(10 * time.Second)
		h.move(t, 2, inventory.DevicePlugin) // so that the GPU has an entry
		pass(DefaultSettle + 20*time.Second)
		h.move(t, 2, inventory.DRA)
		pass(DefaultSettle + 20*time.Second)
		n.end()
		h.cfg["nomad-gpu"] = on(inventory.OverlapRefuse, 0, 1, 2)
		n = h.startNomad(t)
		pass(10 * time.Second)
		n.expect(t, "before", through{0: "", 1: ""})
		since := h.recordedSince(t, "k8s-gpu", 2)
		h.dra.setLate(func(id gpu.DeviceID) string {
			if f, err := Read(h.dir); err == nil && id == coretest.GPU(2) && f.GPUs[id].Owner == inventory.Nomad {
				return "claim default/late"
			}
			return ""
		})
		h.move(t, 2, inventory.Nomad)
		pass(DefaultSettle + time.Minute)
		n.expect(t, "with a claim that came late", through{0: "", 1: ""})
		if now := h.recordedSince(t, "k8s-gpu", 2); !now.Equal(since) {
			t.Errorf("the GPU is recorded since %v, not since %v: it was given up meanwhile", now, since)
		}
		h.dra.set(coretest.GPU(2), "")
		pass(DefaultSettle + 20*time.Second)
		n.expect(t, "after the claim", through{0: "", 1: "", 2: inventory.Nomad})
		k.expect(t, "after the claim", through{})
	})
}

// An agent that can't lock the folder when it starts gives nothing out on a node where GPUs have been moved.
func TestLockedFolderAtStart(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		n.end()
		unlock, err := lockFolder(t.Context(), filepath.Join(h.dir, FolderName))
		check.NoError(t, err)
		n = h.startNomad(t)
		pass(20 * time.Second)
		n.expect(t, "no GPU was moved", through{0: "", 1: ""})
		n.end()
		unlock()
		h.move(t, 1, inventory.DevicePlugin)
		unlock, err = lockFolder(t.Context(), filepath.Join(h.dir, FolderName))
		check.NoError(t, err)
		n = h.startNomad(t)
		pass(20 * time.Second)
		n.expect(t, "a GPU was moved", through{})
		unlock()
		pass(40 * time.Second)
		n.expect(t, "with the files", through{0: ""})
	})
}
