package supervisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/mpscontrol"
)

// While an agent has taken a GPU of a pool, the pool has no daemon, and its GPUs have their own compute mode. After
// that it has one again.
func TestTakenGPU(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("few", 50, 2), pool("gpu.mps", 50, 0, 1))
	h.pass(s)
	check.NoError(t, h.connect("gpu.mps").Close()) // it has a server from now on
	h.awaitIdle(s, "gpu.mps")
	for range 2 {
		h.use(nil, []gpu.DeviceID{coretest.GPU(1)})
		for range 3 {
			h.pass(s)
			h.want("while the GPU is taken", "few")
		}
		if want := string(coretest.GPU(0)) + "," + string(coretest.GPU(1)) + " DEFAULT"; h.mode() != want {
			t.Errorf("compute mode %q, want %q", h.mode(), want)
		}
		if _, recorded := s.records()["gpu.mps"]; recorded {
			t.Error("there is a record, so the agent waits")
		}
		h.use(nil, nil)
		h.pass(s)
		h.want("after that", "few", "gpu.mps")
		if h.mode() != string(coretest.GPU(0))+","+string(coretest.GPU(1))+" EXCLUSIVE_PROCESS" {
			t.Errorf("compute mode %q", h.mode())
		}
	}
}

// awaitIdle waits until the daemon of a pool has no client.
func (h *host) awaitIdle(s *Supervisor, pool string) {
	h.Helper()
	check.Until(h.T, "no client", func() bool {
		n, err := s.folders(pool).clients(h.Context())
		return err == nil && n == 0
	})
}

// The daemon of a pool on whose other GPUs there is work is not ended, and takes work: the one that has taken a GPU
// waits.
func TestTakenGPUBesideWork(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0, 1))
	h.pass(s)
	daemons := mps.Of(inventory.Policy{}, h.root, h.state())
	h.use([]gpu.DeviceID{coretest.GPU(0)}, []gpu.DeviceID{coretest.GPU(1)})
	for range 3 {
		h.pass(s)
		check.NoError(t, daemons.Check("gpu.mps"))
	}
	why := string(coretest.GPU(1)) + " is taken for a proof or a reset, and work may have " + string(coretest.GPU(0)) + " of the same pool"
	if n := strings.Count(h.log.String(), why); n != 1 {
		t.Errorf("the reason is logged %d times:\n%s", n, h.log)
	}
	h.use(nil, []gpu.DeviceID{coretest.GPU(1)})
	h.pass(s)
	h.want("when the work has ended")
}

// A client that no agent knows keeps the daemon, too, and the pool takes work again meanwhile.
func TestTakenGPUWithAnUnknownClient(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	client := h.connect("gpu.mps")
	h.use(nil, []gpu.DeviceID{coretest.GPU(0)})
	h.pass(s)
	h.want("with a client", "gpu.mps")
	check.NoError(t, mps.Of(inventory.Policy{}, h.root, h.state()).Check("gpu.mps"))
	if !strings.Contains(h.log.String(), "its clients have not ended: 1") {
		t.Errorf("no reason:\n%s", h.log)
	}
	check.NoError(t, client.Close())
	h.awaitIdle(s, "gpu.mps")
	h.pass(s)
	h.want("without a client")
}

// The daemon takes no clients for a while before it is ended: work that was given a share has not begun.
func TestTakenGPUWaitsForWorkThatBegins(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0, 1))
	h.pass(s)
	s.idleFor = time.Hour
	h.use(nil, []gpu.DeviceID{coretest.GPU(0)})
	daemons := mps.Of(inventory.Policy{}, h.root, h.state())
	for range 2 {
		h.pass(s)
		h.want("before it is ended", "gpu.mps")
		if daemons.Check("gpu.mps") == nil {
			t.Error("it takes clients")
		}
	}
	h.use([]gpu.DeviceID{coretest.GPU(1)}, []gpu.DeviceID{coretest.GPU(0)})
	h.pass(s)
	check.NoError(t, daemons.Check("gpu.mps"))
	h.use(nil, nil)
	h.pass(s)
	check.NoError(t, daemons.Check("gpu.mps"))
}

// A GPU that an agent has taken which does not run any more counts for a while only: no pool is without a daemon for
// ever.
func TestTakenByAnAgentThatIsGone(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.taken = map[gpu.DeviceID]string{coretest.GPU(0): "nomad-gpu"}
	h.pass(s)
	h.want("of an agent that never ran", "gpu.mps")
	s.ran["nomad-gpu"] = time.Now().Add(-takenAtMost / 2)
	h.pass(s)
	h.want("of one that ran just now")
	s.ran["nomad-gpu"] = time.Now().Add(-2 * takenAtMost)
	h.pass(s)
	h.want("of one that has not run for long", "gpu.mps")
	if left, _ := filepath.Glob(filepath.Join(h.root, inventory.ResourceDomain, "*", "*.json")); len(left) > 0 {
		t.Errorf("records where containers can write: %q", left)
	}
}

// No nvidia-smi is called while another one may reset a GPU of the node: that of an agent that was killed, too. The
// compute mode is set after that.
func TestNothingTouchesAGPUDuringAReset(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	busy := errors.New("a GPU is reset")
	s.opts.Hold = func(context.Context) (func(), error) { return func() {}, busy }
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	h.want("during a reset")
	if _, err := os.Stat(filepath.Join(h.programs, mpscontrol.ModesFile)); err == nil {
		t.Error("nvidia-smi was called")
	}
	busy = nil
	h.pass(s)
	h.want("after it", "gpu.mps")
	busy = errors.New("another GPU is reset")
	h.offer(nil)
	h.pass(s)
	h.want("without the pool")
	if _, recorded := s.records()["gpu.mps"]; !recorded || !strings.HasSuffix(h.mode(), "EXCLUSIVE_PROCESS") {
		t.Errorf("recorded = %v, compute mode %q", recorded, h.mode())
	}
	busy = nil
	h.pass(s)
	if _, recorded := s.records()["gpu.mps"]; recorded || !strings.HasSuffix(h.mode(), "DEFAULT") {
		t.Errorf("after all: recorded = %v, compute mode %q", recorded, h.mode())
	}
}

// An agent that does not answer may have given out a GPU since its latest answer: its daemons stay for a while.
func TestTakenGPUWhileAnAgentDoesNotAnswer(t *testing.T) {
	for name, failure := range map[string]error{"it is late": errors.New("no answer"), "it was killed": ErrNoAgent} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			s := h.supervisor()
			h.other = []Pool{}
			h.offer(nil, pool("gpu.mps", 50, 0, 1))
			h.pass(s)
			h.offer(failure, pool("gpu.mps", 50, 0, 1))
			h.use(nil, []gpu.DeviceID{coretest.GPU(0)})
			h.pass(s)
			h.want("at first", "gpu.mps")
			s.ran["k8s-gpu"] = time.Now().Add(-2 * takenAtMost)
			h.taken = map[gpu.DeviceID]string{coretest.GPU(0): "nomad-gpu"}
			h.pass(s)
			if !errors.Is(failure, ErrNoAgent) {
				h.want("later", "gpu.mps")
			} else {
				h.want("when the agent is gone")
			}
		})
	}
}

// Before it is known which GPUs are taken, no daemon is started: one of them may be in its reset.
func TestUnknownTakenGPUs(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	taken, failure := s.opts.Taken, errors.New("damaged")
	s.opts.Taken = func() (map[gpu.DeviceID]string, error) { return nil, failure }
	h.pass(s)
	h.want("with a damaged file")
	s.opts.Taken = taken
	h.pass(s)
	h.want("with a file", "gpu.mps")
	s.opts.Taken = func() (map[gpu.DeviceID]string, error) { return nil, failure }
	h.offer(nil)
	h.pass(s)
	h.want("with a damaged file again")
}
