package ownership

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// taker is a call of Take that runs.
type taker struct {
	result atomic.Pointer[result] // nil = it waits
	end    context.CancelFunc
}

type result struct {
	taken *Taken
	err   error
}

func (t *taker) done() bool { return t.result.Load() != nil }

// outcome is what Take has returned; the zero value while it waits.
func (t *taker) outcome() result {
	if r := t.result.Load(); r != nil {
		return *r
	}
	return result{}
}

// take begins to take a GPU for a proof.
func (a *agent) take(t *testing.T, n int) *taker { return a.takeFor(t, n, inventory.Proof) }

// takeFor begins to take a GPU.
func (a *agent) takeFor(t *testing.T, n int, p inventory.Purpose) *taker {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	one := &taker{end: cancel}
	go func() {
		taken, err := a.watcher.Take(ctx, coretest.GPU(n), p)
		one.result.Store(&result{taken, err})
	}()
	synctest.Wait()
	return one
}

// granted takes a GPU that is free for a proof.
func (a *agent) granted(t *testing.T, n int) *Taken {
	t.Helper()
	return a.grantedFor(t, n, inventory.Proof)
}

// grantedFor takes a GPU that is free.
func (a *agent) grantedFor(t *testing.T, n int, p inventory.Purpose) *Taken {
	t.Helper()
	one := a.takeFor(t, n, p)
	pass(DefaultSettle + confirmTime + 3*time.Second)
	if one.outcome().taken == nil {
		t.Fatalf("GPU %d is not taken: %v\n%s", n, one.outcome().err, a.log)
	}
	return one.outcome().taken
}

func (t *Taken) wantedBack() bool {
	select {
	case <-t.WantedBack():
		return true
	default:
		return false
	}
}

// reason is why a GPU takes no work.
func (a *agent) reason(n int) health.Reason {
	for u := range a.Current().Units() {
		if u.Device.Index == n {
			return u.Health.Reason
		}
	}
	return health.ReasonWithdrawn
}

func (h host) marks(t *testing.T) map[gpu.DeviceID]Mark {
	t.Helper()
	f, err := Read(h.dir)
	check.NoError(t, err)
	return f.Taken
}

// A node with one agent and one API, which has no file of the node. (Case 25: without a proof there is none.) While the GPU is taken it is refused for
// a reason that names this, and after that it is offered as before. (Case 5.)
func TestTakeOfAnAgentThatIsAlone(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(time.Minute)
		if _, err := os.Stat(filepath.Join(h.dir, FileName)); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("a file of the node without a proof: %v", err)
		}
		reads := h.nomad.reads.Load()
		pass(time.Hour)
		if again := h.nomad.reads.Load(); again != reads {
			t.Errorf("without a proof the record was read %d times", again-reads)
		}

		one := n.take(t, 1)
		pass(DefaultSettle - time.Second)
		n.expectSchedulable(t, "while the GPU is not known to be free for long enough", 0, 1)
		pass(3 * time.Second)
		n.expectSchedulable(t, "when the owner was written", 0)
		if m := h.marks(t); m[coretest.GPU(1)] != (Mark{Agent: "nomad-gpu", Purpose: inventory.Proof}) {
			t.Errorf("marks %v", m)
		}
		_, err := n.Current().Reserve(inventory.UnitID(coretest.GPU(1)))
		refused, typed := errors.AsType[*inventory.UnhealthyUnitsError](err)
		if !typed || refused.Units[0].Health.Reason != health.ReasonProving || !strings.Contains(err.Error(), "unknown: withheld for a proof for a short time; cleared by: the end of the proof") {
			t.Errorf("refused with %v", err)
		}
		pass(3 * time.Second)
		if one.outcome().taken == nil || one.outcome().taken.wantedBack() {
			t.Fatalf("not granted: %+v\n%s", one.outcome(), n.log)
		}
		if again := n.take(t, 1); !errors.Is(again.outcome().err, ErrTaken) {
			t.Errorf("taken twice: %v", again.outcome().err)
		}
		one.outcome().taken.Release()
		one.outcome().taken.Release()
		pass(time.Second)
		n.expectSchedulable(t, "after the proof", 0, 1)
		if m := h.marks(t); len(m) > 0 || n.logged("GPU taken from its API") != 1 || n.logged("GPU given back to its API") != 1 {
			t.Errorf("marks %v\n%s", m, n.log)
		}
		reads = h.nomad.reads.Load()
		pass(time.Hour)
		if again := h.nomad.reads.Load(); again != reads {
			t.Errorf("after the proof the record was read %d times", again-reads)
		}
	})
}

// A claim that is prepared in the settle time, and one that is under way when the owner is written: the proof waits for its end. (Case 6.)
func TestTakeWaitsForWork(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		k := h.startKube(t, inventory.DRA, inventory.DevicePlugin)
		pass(time.Minute)
		one := k.take(t, 1)
		pass(DefaultSettle / 2)
		h.dra.set(coretest.GPU(1), "claim default/a")
		k.watcher.Reserved([]gpu.Device{{At: gpu.WholeGPU(coretest.GPU(1))}})
		pass(5 * time.Minute)
		if one.done() || k.reason(1) != health.ReasonNone {
			t.Errorf("while a claim has the GPU: %+v, %s", one, k.reason(1))
		}
		h.dra.set(coretest.GPU(1), "")
		pass(DefaultSettle - 2*time.Second)
		k.expect(t, "within the settle time", through{1: inventory.DRA, 2: inventory.DRA})
		pass(3 * time.Second)
		k.expect(t, "when the owner was written", through{2: inventory.DRA})
		h.plugins.set(coretest.GPU(1), "pod default/b") // by an inventory of just before, perhaps of another process
		pass(2 * time.Second)
		k.expect(t, "given back", through{2: inventory.DRA})
		if one.done() || len(h.marks(t)) > 0 {
			t.Errorf("granted although a pod got it in between: %+v, marks %v", one, h.marks(t))
		}
		h.plugins.set(coretest.GPU(1), "")
		pass(DefaultSettle + time.Second)
		k.expect(t, "when the owner was written again", through{2: inventory.DRA})
		k.watcher.Reserved([]gpu.Device{{At: gpu.WholeGPU(coretest.GPU(1))}}) // and has ended by now
		pass(confirmTime + 2*time.Second)
		k.expect(t, "given back again", through{1: inventory.DRA, 2: inventory.DRA})
		pass(2*DefaultSettle + 10*time.Second)
		if one.outcome().taken == nil {
			t.Errorf("not granted after the work\n%s", k.log)
		}
		one.outcome().taken.Release()
	})
}

// A record that can't be read, or never is: no proof. (Case 7.)
func TestTakeNeedsEveryRecord(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		k := h.startKube(t, inventory.DevicePlugin, inventory.DRA)
		pass(time.Minute)
		for name, set := range map[string]func(*record){"unread": func(r *record) { r.setUnknown(true) }, "never read": (*record).setNever} {
			for _, r := range []*record{h.plugins, h.dra} {
				set(r)
				one := k.take(t, 1)
				pass(10 * time.Minute)
				k.expect(t, name, through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
				one.end()
				synctest.Wait()
				failed, typed := errors.AsType[*NotFreeError](one.outcome().err)
				if !typed || failed.Waits != "the record" || !errors.Is(one.outcome().err, context.Canceled) {
					t.Errorf("%s: %v", name, one.outcome().err)
				}
				r.mu.Lock()
				r.unknown, r.never = false, false
				r.mu.Unlock()
			}
		}
		if _, err := kube(t, t.TempDir(), on(inventory.OverlapRefuse, 1)).watcher.Take(t.Context(), coretest.GPU(1), inventory.Proof); !errors.Is(err, ErrCannotTake) {
			t.Errorf("without readers: %v", err)
		}
	})
}

// An agent was killed while it had a GPU: its next process gives it back, not at once, as what it ran ends a moment later; in the same boot and after
// another one. (Cases 9 and 10.)
func TestTakenGPUComesBackAfterAKill(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(time.Minute)
		n.end()
		killed := File{Taken: map[gpu.DeviceID]Mark{coretest.GPU(1): {Agent: "nomad-gpu", Purpose: inventory.Proof}}}
		check.NoError(t, Write(h.dir, killed))
		n = h.startNomad(t)
		pass(time.Second)
		n.expectSchedulable(t, "right after the start", 0)
		k := h.startKube(t, inventory.DevicePlugin)
		pass(orphanTime + time.Second)
		n.expectSchedulable(t, "after the start", 0, 1)
		k.expect(t, "after the start", through{2: inventory.DevicePlugin})
		if m := h.marks(t); len(m) > 0 {
			t.Errorf("marks %v", m)
		}
	})
}

// The agent ends in a proof: it wants the GPU back at once, and gives it back if that is released in time; else its next process does.
func TestTakenGPUComesBackAtTheEndOfTheAgent(t *testing.T) {
	for _, released := range []bool{true, false} {
		h := newHost(t)
		synctest.Test(t, func(t *testing.T) {
			n := h.startNomad(t)
			pass(10 * time.Second)
			taken := n.granted(t, 1)
			began := time.Now()
			go func() {
				<-taken.WantedBack()
				if released {
					time.Sleep(time.Second)
					taken.Release()
				}
			}()
			n.end()
			if took := time.Since(began); took > releaseAtMost+stopAtMost || released && took > 1100*time.Millisecond {
				t.Errorf("the end took %v", took)
			}
			if m := h.marks(t); (len(m) == 0) != released {
				t.Errorf("released %t: marks %v", released, m)
			}
			if _, err := n.watcher.Take(t.Context(), coretest.GPU(0), inventory.Proof); !errors.Is(err, ErrEnding) {
				t.Errorf("after the end: %v", err)
			}
			taken.Release()
			n = h.startNomad(t)
			pass(orphanTime + 2*time.Second)
			n.expectSchedulable(t, "after a start", 0, 1)
		})
	}
}

// What wants a GPU back: a move of it, a policy that leaves it out, maintenance, work that has it. The signal comes within a second or two, and
// until the GPU is released no API gives it out. (Case 13.)
func TestTakenGPUIsWantedBack(t *testing.T) {
	for name, tc := range map[string]struct {
		cause func(t *testing.T, h host, n *agent)
		after []int // schedulable after the release and the settle time of a move
	}{
		"migrate": {func(t *testing.T, h host, _ *agent) { h.move(t, 1, inventory.DevicePlugin) }, []int{0}},
		"reload": {func(t *testing.T, _ host, n *agent) {
			check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0)))
		}, []int{0}},
		"maintenance": {func(t *testing.T, _ host, n *agent) { check.NoError(t, n.Quiesce(t.Context(), time.Time{})) }, nil},
		"work":        {func(_ *testing.T, h host, _ *agent) { h.nomad.set(coretest.GPU(1), "job a") }, []int{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			synctest.Test(t, func(t *testing.T) {
				n := h.startNomad(t)
				pass(10 * time.Second)
				k := h.startKube(t, inventory.DevicePlugin)
				pass(10 * time.Second)
				taken := n.granted(t, 1)
				pass(10 * time.Minute)
				if taken.wantedBack() {
					t.Fatal("wanted back without a cause")
				}
				tc.cause(t, h, n)
				pass(1500 * time.Millisecond)
				if !taken.wantedBack() {
					t.Errorf("not wanted back after 1.5 s\n%s", n.log)
				}
				pass(2 * time.Minute) // a child that can't be ended
				for _, a := range []*agent{n, k} {
					for u := range a.Current().Units() {
						if u.Device.Index == 1 && u.Health.Schedulable() {
							t.Errorf("offered through %s before it was released", u.API)
						}
					}
				}
				if f, err := Read(h.dir); err != nil || f.GPUs[coretest.GPU(1)].Owner == inventory.DevicePlugin {
					t.Errorf("the owner has changed before the release: %+v, %v", f.GPUs, err)
				}
				taken.Release()
				pass(DefaultSettle + 15*time.Second)
				n.expectSchedulable(t, "after the release", tc.after...)
				if name == "migrate" || name == "reload" {
					k.expect(t, "after the release", through{1: inventory.DevicePlugin, 2: inventory.DevicePlugin})
				}
			})
		})
	}
}

// Two agents of a node want one GPU: the one that offers it gets it. Where both offer it, with overlap = warn, none does. (Case 22.)
func TestOneTakerOfAGPU(t *testing.T) {
	for _, overlap := range []inventory.OverlapMode{inventory.OverlapRefuse, inventory.OverlapWarn} {
		h := newHost(t)
		h.cfg["nomad-gpu"], h.cfg["k8s-gpu"] = on(overlap, 0, 1), on(overlap, 1, 2)
		synctest.Test(t, func(t *testing.T) {
			n := h.startNomad(t)
			pass(10 * time.Second)
			k := h.startKube(t, inventory.DevicePlugin)
			pass(10 * time.Second)
			first, second := n.take(t, 1), k.take(t, 1)
			pass(2 * time.Minute)
			if got := first.outcome().taken != nil; second.done() || got != (overlap == inventory.OverlapRefuse) {
				t.Errorf("%s: taken %t, %+v", overlap, got, second)
			}
			if overlap == inventory.OverlapRefuse {
				k.expect(t, "while the other agent has taken it", through{2: inventory.DevicePlugin})
				first.outcome().taken.Release()
				pass(2 * time.Minute)
				if second.done() {
					t.Errorf("the other agent, which does not offer it, has taken it")
				}
			}
		})
	}
}

// Another process of the agent runs, as in an update: it follows the file, takes nothing, and gives a taken GPU out neither.
func TestSecondProcessOfTheTaker(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		first := h.startNomad(t)
		pass(10 * time.Second)
		second := h.startNomad(t)
		pass(10 * time.Second)
		taken := first.granted(t, 1)
		for _, a := range []*agent{first, second} {
			a.expectSchedulable(t, "taken", 0)
		}
		one := second.take(t, 1)
		pass(time.Minute)
		taken.Release()
		pass(2 * time.Second)
		for _, a := range []*agent{first, second} {
			a.expectSchedulable(t, "given back", 0, 1)
		}
		pass(2 * time.Minute)
		if one.done() {
			t.Errorf("the process that follows has taken the GPU: %+v", one.outcome())
		}
		first.end()
		pass(2 * time.Minute)
		if one.outcome().taken == nil {
			t.Errorf("the process that goes on has not: %+v\n%s", one.outcome(), second.log)
		}
	})
}

// The file of the node is lost while a GPU is taken, and an older one with marks is put back: the taker has it, and no one else stays taken.
func TestTakenGPUAndALostFile(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		taken := n.granted(t, 1)
		check.NoError(t, os.Remove(filepath.Join(h.dir, FileName)))
		pass(2 * time.Second)
		n.expectSchedulable(t, "lost", 0)
		if len(h.marks(t)) != 1 {
			t.Errorf("marks %v", h.marks(t))
		}
		check.NoError(t, Write(h.dir, File{Taken: map[gpu.DeviceID]Mark{coretest.GPU(0): {Agent: "nomad-gpu", Purpose: inventory.Proof}}}))
		pass(orphanTime + 3*time.Second)
		n.expectSchedulable(t, "older", 0)
		if m := h.marks(t); len(m) != 1 || m[coretest.GPU(1)].Agent != "nomad-gpu" || taken.wantedBack() {
			t.Errorf("marks %v", m)
		}
		taken.Release()
		pass(2 * time.Second)
		n.expectSchedulable(t, "released", 0, 1)
	})
}

// The file can't be written: no GPU is taken, and one that is released is offered again.
func TestTakeWithAFileThatCannotBeWritten(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		taken := n.granted(t, 1)
		path := filepath.Join(h.dir, FileName)
		check.NoError(t, os.Rename(path, path+".away"), os.MkdirAll(filepath.Join(path, "x"), 0o700)) // neither read nor replaced
		taken.Release()
		pass(5 * time.Second)
		n.expectSchedulable(t, "released", 0, 1)
		one := n.take(t, 0)
		pass(2 * time.Minute)
		n.expectSchedulable(t, "without a file", 0, 1)
		if one.done() {
			t.Errorf("taken without a file: %+v", one.outcome())
		}
	})
}
