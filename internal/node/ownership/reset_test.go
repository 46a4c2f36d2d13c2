package ownership

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/test/check"
)

// both starts both agents of a node, of which nomad-gpu has GPUs 0 and 1, and k8s-gpu has GPU 2.
func (h host) both(t *testing.T) (n, k *agent) {
	n = h.startNomad(t)
	pass(10 * time.Second)
	k = h.startKube(t, inventory.DevicePlugin)
	pass(10 * time.Second)
	return n, k
}

// expectReleased checks that no agent has the driver open or gives a GPU out, and that all are listed.
func expectReleased(t *testing.T, when string, all ...*agent) {
	t.Helper()
	for _, a := range all {
		if a.machine.Sessions() != 0 || len(a.schedulable()) > 0 || a.State().Snapshot.Driver.State != gpu.DriverReady {
			t.Errorf("%s: %s: %d sessions, %v take work, driver %v\n%s", when, a.watcher.store.agent, a.machine.Sessions(), a.schedulable(), a.State().Snapshot.Driver, a.log)
		}
		for u := range a.Current().Units() {
			if u.Health.Reason != health.ReasonResetting && u.Health.Reason != health.ReasonOverlap {
				t.Errorf("%s: %s: %s", when, u.ID, u.Health)
			}
		}
	}
}

func expectOpen(t *testing.T, when string, all ...*agent) {
	t.Helper()
	for _, a := range all {
		if a.machine.Sessions() != 1 {
			t.Errorf("%s: %s has the driver %d times open\n%s", when, a.watcher.store.agent, a.machine.Sessions(), a.log)
		}
	}
}

// within waits in the fake time.
func within(t *testing.T, d time.Duration, wait func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	return wait(ctx)
}

// Case 22 of the contract of rescue, with two agents on a node: for the reset of a GPU of one both close the driver. Their GPUs stay listed, take no work,
// and do again as soon as that is over.
func TestNeighboursOfBothAgentsDuringAReset(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		listed := [2][]gpu.DeviceID{n.Current().GPUs(), k.Current().GPUs()}
		taken := n.grantedFor(t, 1, inventory.Reset)
		if n.reason(1) != health.ReasonResetting || h.marks(t)[coretest.GPU(1)] != (Mark{Agent: "nomad-gpu", Purpose: inventory.Reset}) {
			t.Errorf("%s, marks %v", n.reason(1), h.marks(t))
		}
		pass(time.Minute)
		expectOpen(t, "taken", n, k)
		n.expectSchedulable(t, "taken", 0)
		k.expectSchedulable(t, "taken", 2)
		taken.ReleaseDriver()
		check.NoError(t, within(t, 4*time.Second, n.AwaitReleased))
		if !h.marks(t)[coretest.GPU(1)].DriverReleased {
			t.Error("released without the mark")
		}
		pass(3 * time.Second)
		expectReleased(t, "released", n, k)
		pass(40 * time.Second)
		expectReleased(t, "still released", n, k)
		if now := [2][]gpu.DeviceID{n.Current().GPUs(), k.Current().GPUs()}; !reflect.DeepEqual(now, listed) {
			t.Errorf("listed %v, before %v", now, listed)
		}
		if taken.wantedBack() {
			t.Errorf("wanted back because of its own release\n%s", n.log)
		}
		taken.OpenDriver()
		check.NoError(t, within(t, 1500*time.Millisecond, n.AwaitReading))
		pass(1500 * time.Millisecond)
		expectOpen(t, "opened", n, k)
		n.expectSchedulable(t, "opened", 0)
		k.expectSchedulable(t, "opened", 2)
		taken.Release()
		pass(2 * time.Second)
		n.expectSchedulable(t, "given back", 0, 1)
		if len(h.marks(t)) > 0 {
			t.Errorf("marks %v", h.marks(t))
		}
	})
}

// A reset takes longer than the verdicts last: it is not wanted back because of that, and all GPUs take work again after it.
func TestLongReset(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		taken := n.grantedFor(t, 1, inventory.Reset)
		with := n.grantedFor(t, 0, inventory.Reset) // of its P2P group
		taken.ReleaseDriver()
		pass(3 * time.Minute)
		if taken.wantedBack() || with.wantedBack() || k.Current().Driver().State != gpu.DriverReleased {
			t.Errorf("wanted back, or driver %v\n%s", k.Current().Driver(), n.log)
		}
		pass(releasedAtMost - 2*time.Minute)
		if expectOpen(t, "after releasedAtMost", k); n.machine.Sessions() != 0 {
			t.Error("the agent that resets the GPU has opened the driver")
		}
		taken.Release()
		with.Release()
		pass(3 * time.Second)
		expectOpen(t, "after it", n, k)
		n.expectSchedulable(t, "after it", 0, 1)
		k.expectSchedulable(t, "after it", 2)
	})
}

// The agent is killed in the middle: the others open the driver, and its next process does at once. Nothing of the release is remembered. The GPU is given
// back when nvidia-smi, which goes on without the agent, has ended in any case.
func TestKilledDuringAReset(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		n.grantedFor(t, 0, inventory.Reset).ReleaseDriver() // which k8s-gpu does not offer: it leaves the mark alone
		pass(4 * time.Second)
		expectReleased(t, "released", n, k)
		n.end() // without OpenDriver or Release
		if !h.marks(t)[coretest.GPU(0)].DriverReleased {
			t.Fatal("the mark is not as a kill leaves it")
		}
		pass(3 * time.Second)
		expectOpen(t, "killed", k)
		k.expectSchedulable(t, "killed", 2)
		n = h.startNomad(t)
		pass(1500 * time.Millisecond)
		expectOpen(t, "started", n, k)
		n.expectSchedulable(t, "started", 1)
		if h.marks(t)[coretest.GPU(0)].DriverReleased {
			t.Error("the release is still in the file")
		}
		pass(orphanTimeOfReset - 10*time.Second)
		n.expectSchedulable(t, "nvidia-smi may still run", 1)
		pass(12 * time.Second)
		n.expectSchedulable(t, "given back", 0, 1)
	})
}

// nvidia-smi goes on when its agent is killed in the middle. While it runs no agent opens the driver, not the next
// process of that agent either, and the GPU is not given back. When it has ended both happen at once; after some
// minutes in any case.
func TestNvidiaSMIThatOutlivesItsAgent(t *testing.T) {
	for name, ends := range map[string]bool{"ends": true, "hangs": false} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			var runs atomic.Bool
			h.resets = func() (bool, error) { return runs.Load(), nil }
			synctest.Test(t, func(t *testing.T) {
				n, k := h.both(t)
				n.grantedFor(t, 0, inventory.Reset).ReleaseDriver()
				pass(4 * time.Second)
				runs.Store(true)
				n.end()
				pass(10 * time.Second)
				expectReleased(t, "killed", k)
				n = h.startNomad(t)
				pass(20 * time.Second)
				if n.machine.Sessions() != 0 || k.machine.Sessions() != 0 || len(n.schedulable()) > 0 {
					t.Errorf("while nvidia-smi runs: %d and %d sessions, %v take work\n%s", n.machine.Sessions(), k.machine.Sessions(), n.schedulable(), n.log)
				}
				if ends {
					runs.Store(false)
					pass(4 * time.Second)
				} else {
					pass(releasedAtMost)
				}
				expectOpen(t, "afterwards", n, k)
				n.expectSchedulable(t, "afterwards", 0, 1)
				k.expectSchedulable(t, "afterwards", 2)
				if m := h.marks(t); len(m) > 0 {
					t.Errorf("marks %v", m)
				}
			})
		})
	}
}

// Whether nvidia-smi runs is not known: no agent opens the driver for as long as it may.
func TestDriverBesideNvidiaSMIThatIsNotKnown(t *testing.T) {
	h := newHost(t)
	h.resets = func() (bool, error) { return false, errors.New("input/output error") }
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		n.grantedFor(t, 0, inventory.Reset).ReleaseDriver()
		pass(4 * time.Second)
		n.end()
		pass(10 * time.Second)
		expectReleased(t, "killed", k)
		n = h.startNomad(t)
		pass(20 * time.Second)
		if n.machine.Sessions() != 0 || k.machine.Sessions() != 0 {
			t.Errorf("it may still run: %d and %d sessions\n%s", n.machine.Sessions(), k.machine.Sessions(), n.log)
		}
		pass(releasedAtMost)
		expectOpen(t, "in time", n, k)
	})
}

// The GPU stays taken for as long, too.
func TestNvidiaSMIThatIsNotKnown(t *testing.T) {
	h := newHost(t)
	h.resets = func() (bool, error) { return false, errors.New("input/output error") }
	synctest.Test(t, func(t *testing.T) {
		n, _ := h.both(t)
		n.grantedFor(t, 0, inventory.Reset)
		n.end()
		n = h.startNomad(t)
		pass(orphanTimeOfReset - 5*time.Second)
		n.expectSchedulable(t, "it may still run", 1)
		pass(10 * time.Second)
		n.expectSchedulable(t, "given back", 0, 1)
	})
}

// One agent of a node resets GPUs at a time. It may take several.
func TestOneAgentResets(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		taken, with := n.grantedFor(t, 1, inventory.Reset), n.grantedFor(t, 0, inventory.Reset)
		one := k.takeFor(t, 2, inventory.Reset)
		pass(5 * time.Minute)
		one.end()
		synctest.Wait()
		const waits = "nomad-gpu, which resets GPU-"
		if failed, typed := errors.AsType[*NotFreeError](one.outcome().err); !typed || !strings.HasPrefix(failed.Waits, waits) {
			t.Errorf("the other agent: %+v", one.outcome())
		}
		k.granted(t, 2).Release() // a proof does not wait
		one = k.takeFor(t, 2, inventory.Reset)
		pass(time.Minute)
		taken.Release()
		pass(time.Minute)
		if one.done() {
			t.Errorf("granted while another GPU of the P2P group is taken: %+v, marks %v", one.outcome(), h.marks(t))
		}
		with.Release()
		pass(DefaultSettle + confirmTime + 5*time.Second)
		if one.outcome().taken == nil {
			t.Fatalf("not granted: %+v", one.outcome())
		}
		two := n.takeFor(t, 0, inventory.Reset)
		pass(5 * time.Minute)
		if two.done() {
			t.Errorf("the first one again: %+v", two.outcome())
		}
		check.NoError(t, Change(t.Context(), h.dir, func(f File) (File, error) { // an older file is put back
			f.Taken = map[gpu.DeviceID]Mark{coretest.GPU(0): {Agent: "nomad-gpu", Purpose: inventory.Reset, DriverReleased: true}}
			return f, nil
		}))
		pass(10 * time.Second)
		if m := h.marks(t); len(m) != 1 || m[coretest.GPU(2)].Agent != "k8s-gpu" || one.outcome().taken.wantedBack() {
			t.Errorf("marks %v", m)
		}
		expectOpen(t, "an older file", n, k)
	})
}

// Maintenance keeps a GPU from being taken for a reset, and wants it back before the driver is released. A proof ends when another agent has it released, and
// none begins.
func TestTakesAndTheDriver(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		check.NoError(t, n.Quiesce(t.Context(), time.Time{}))
		one := n.takeFor(t, 1, inventory.Reset)
		pass(2 * time.Minute)
		if one.done() || len(h.marks(t)) > 0 {
			t.Errorf("taken in maintenance: %+v", one.outcome())
		}
		check.NoError(t, n.Resume(t.Context()))
		pass(DefaultSettle + confirmTime + 5*time.Second)
		check.NoError(t, n.Quiesce(t.Context(), time.Time{}))
		pass(2 * time.Second)
		if !one.outcome().taken.wantedBack() {
			t.Error("not wanted back for maintenance")
		}
		one.outcome().taken.Release()
		check.NoError(t, n.Resume(t.Context()))
		pass(10 * time.Second)

		proof, taken := k.granted(t, 2), n.grantedFor(t, 1, inventory.Reset)
		if proof.wantedBack() {
			t.Error("a proof is wanted back although the driver is open")
		}
		taken.ReleaseDriver()
		pass(3 * time.Second)
		if !proof.wantedBack() {
			t.Errorf("a proof goes on\n%s", k.log)
		}
		proof.Release()
		again := k.take(t, 2)
		pass(DefaultSettle + 10*time.Second)
		if again.done() || len(h.marks(t)) != 1 {
			t.Errorf("a proof begins: %+v, marks %v", again.outcome(), h.marks(t))
		}
		taken.Release()
		pass(DefaultSettle + confirmTime + 5*time.Second)
		if again.outcome().taken == nil {
			t.Errorf("no proof after the reset: %+v", again.outcome())
		}
	})
}

// Another process of the agent runs, as in an update: it closes the driver, too. When it is the only one it opens it.
func TestSecondProcessDuringAReset(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		first := h.startNomad(t)
		pass(10 * time.Second)
		second := h.startNomad(t)
		pass(10 * time.Second)
		taken := first.grantedFor(t, 1, inventory.Reset)
		taken.ReleaseDriver()
		pass(4 * time.Second)
		expectReleased(t, "released", first, second)
		taken.OpenDriver()
		pass(4 * time.Second)
		expectOpen(t, "opened", first, second)
		taken.ReleaseDriver()
		pass(4 * time.Second)
		expectReleased(t, "released again", first, second)
		first.end()
		pass(3 * time.Second)
		expectOpen(t, "the first one has ended", second)
	})
}

// The file of the node can't be read or written: the last good one counts, a release that is not on disk is none, and one is ended without it.
func TestReleaseWithAFileThatCannotBeWritten(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		taken := n.grantedFor(t, 1, inventory.Reset)
		path := filepath.Join(h.dir, FileName)
		away := func() { check.NoError(t, os.Rename(path, path+".away"), os.MkdirAll(filepath.Join(path, "x"), 0o700)) }
		back := func() { check.NoError(t, os.RemoveAll(path), os.Rename(path+".away", path)) }
		away()
		taken.ReleaseDriver()
		pass(10 * time.Second)
		expectOpen(t, "without a file", n, k)
		back()
		pass(4 * time.Second)
		expectReleased(t, "with it", n, k)
		away()
		pass(10 * time.Second)
		expectReleased(t, "the last good one", n, k)
		taken.OpenDriver()
		pass(3 * time.Second)
		expectOpen(t, "opened", n)
		pass(releasedAtMost + time.Minute)
		expectOpen(t, "in time", k)
	})
}

// The disk hangs, or another process keeps the lock, while the driver is released: it is opened in time.
func TestReleaseAndADiskThatHangs(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		n.grantedFor(t, 1, inventory.Reset).ReleaseDriver()
		pass(4 * time.Second)
		folder, err := filelock.Wait(t.Context(), filepath.Join(h.dir, FolderName))
		check.NoError(t, err)
		defer func() { _ = folder.Close() }()
		pass(30 * time.Second)
		expectReleased(t, "locked", n, k)
		pass(releasedAtMost)
		expectOpen(t, "in time", n, k)
	})
}

// An agent that ends while another one resets a GPU leaves nothing that opens the driver later.
func TestEndWhileTheDriverIsReleased(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		n, k := h.both(t)
		n.grantedFor(t, 1, inventory.Reset).ReleaseDriver()
		pass(4 * time.Second)
		expectReleased(t, "released", n, k)
		k.end()
		pass(releasedAtMost + time.Minute)
		if strings.Contains(k.log.String(), "driver opened although") {
			t.Error(k.log)
		}
	})
}
