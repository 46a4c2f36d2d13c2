package ownership

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// onEvents starts an agent, not in a synctest bubble, that reads the files because of events only, if it can read and write them.
func onEvents(t *testing.T, name, dir string, cfg core.Config) *agent {
	t.Helper()
	return start(t, setup{
		name: name, stateDir: dir, cfg: cfg, newWatcher: fsnotify.NewWatcher,
		timings: timings{poll: 20 * time.Millisecond, others: time.Hour, alone: time.Hour},
	})
}

// awaitSchedulable waits until those GPUs take new work.
func (a *agent) awaitSchedulable(t *testing.T, when string, want ...int) {
	t.Helper()
	check.Until(t, when, func() bool { return slices.Equal(a.schedulable(), want) })
}

// checkBeats are the heartbeats of the loop that reads and writes the files: two a check.
func (a *agent) checkBeats(t *testing.T) uint64 {
	t.Helper()
	for _, task := range a.Watchdog().Tasks() {
		if task.Name == "devices of agents" {
			return task.Beats
		}
	}
	t.Fatal("no such task")
	return 0
}

func TestFilesAreReadOnEvents(t *testing.T) {
	dir := t.TempDir()
	n := onEvents(t, "nomad-gpu", dir, on(inventory.OverlapRefuse, 0, 1))
	check.Until(t, "it has recorded its GPUs", func() bool {
		text, _ := os.ReadFile(filepath.Join(dir, FolderName, "nomad-gpu.json"))
		return bytes.Contains(text, []byte(coretest.GPU(1)))
	})
	k := onEvents(t, "k8s-gpu", dir, on(inventory.OverlapRefuse, 1, 2))
	k.awaitSchedulable(t, "recorded by the other agent", 2)
	check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0)))
	k.awaitSchedulable(t, "no longer recorded by the other agent", 1, 2)
	check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0, 1, 3)))
	n.awaitSchedulable(t, "the other agent's by now", 0, 3)
	k.end()
	check.NoError(t, os.Remove(filepath.Join(dir, FolderName, "k8s-gpu.json")))
	n.awaitSchedulable(t, "an operator has removed the other agent's file", 0, 1, 3)

	own := filepath.Join(dir, FolderName, "nomad-gpu.json")
	for _, remove := range []string{own, filepath.Dir(own)} {
		check.NoError(t, os.RemoveAll(remove))
		check.Until(t, "the files are written again after the removal of "+remove, func() bool { _, err := os.Stat(own); return err == nil })
	}
}

// An agent whose devices do not change checks nothing, whatever it and others write to the folder.
func TestOwnFileDoesNotWakeTheAgent(t *testing.T) {
	dir := t.TempDir()
	n := onEvents(t, "nomad-gpu", dir, on(inventory.OverlapWarn, 0, 1))
	k := onEvents(t, "k8s-gpu", dir, on(inventory.OverlapWarn, 1, 2))
	check.Until(t, "both see the overlap", func() bool { return len(n.Current().Overlaps()) == 1 && len(k.Current().Overlaps()) == 1 })
	for _, a := range []*agent{n, k} {
		before := a.checkBeats(t)
		check.Until(t, "no more checks", func() bool {
			pass := before
			time.Sleep(3 * eventPause)
			before = a.checkBeats(t)
			return before == pass
		})
	}
	checks := uint64(1)
	for try := 0; try < 3 && checks != 0; try++ { // the first ones may be because of what was written before
		before := n.checkBeats(t)
		check.NoError(t, os.WriteFile(filepath.Join(dir, FolderName, ".k8s-gpu.json123"), []byte("{"), 0o600)) // as during statefile.Write
		time.Sleep(3 * eventPause)
		checks = (n.checkBeats(t) - before) / 2
	}
	if checks != 0 {
		t.Errorf("%d checks because of a temporary file", checks)
	}
	check.NoError(t, k.ApplyPolicy(t.Context(), on(inventory.OverlapWarn, 2)))
	check.Until(t, "the overlap has ended", func() bool { return len(n.Current().Overlaps()) == 0 })
}

// silent returns a watcher of inotify without events, which does not stop the fake time of a synctest bubble. Call it before.
func silent(t *testing.T) func() (*fsnotify.Watcher, error) {
	t.Helper()
	w, err := fsnotify.NewWatcher()
	check.NoError(t, err)
	w.Events, w.Errors = nil, nil
	t.Cleanup(func() { _ = w.Close() })
	return func() (*fsnotify.Watcher, error) { return w, nil }
}

// There is no event when an agent ends without a change of its file. The warning comes after 5 to 10 s.
func TestEndOfAnotherAgent(t *testing.T) {
	for _, offset := range []time.Duration{0, time.Second, 2500 * time.Millisecond, 4 * time.Second} {
		dir, first, second, third := t.TempDir(), silent(t), silent(t), silent(t)
		synctest.Test(t, func(t *testing.T) {
			n := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: on(inventory.OverlapWarn, 0, 1), newWatcher: first})
			pass(time.Minute)
			k := start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: on(inventory.OverlapWarn, 1, 2), newWatcher: second})
			pass(time.Minute + offset)
			before := time.Now()
			k.end() // takes fake time while both agents wait for the lock of the folder
			after := time.Now()
			pass(time.Until(before.Add(4999 * time.Millisecond)))
			n.expectWarnings(t, "before 5 s are over", 0)
			pass(time.Until(after.Add(10002 * time.Millisecond)))
			n.expectWarnings(t, "after 10 s", 1)
			start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: on(inventory.OverlapWarn, 1, 2), newWatcher: third})
			pass(5*time.Second + 2*time.Millisecond)
			n.expectWarnings(t, "it runs again", 0)
		})
	}
}

// An agent that is alone on its host checks the files twice a minute.
func TestAloneItRarelyChecks(t *testing.T) {
	dir, events := t.TempDir(), silent(t)
	synctest.Test(t, func(t *testing.T) {
		n := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: on(inventory.OverlapWarn, 0, 1), newWatcher: events})
		pass(time.Minute)
		before := n.checkBeats(t)
		pass(time.Hour)
		if checks := (n.checkBeats(t) - before) / 2; checks < 119 || checks > 121 {
			t.Errorf("%d checks in an hour, want 120", checks)
		}
		if late := n.Watchdog().Late(time.Now()); len(late) != 0 {
			t.Errorf("late: %v", late)
		}
	})
}
