package ownership

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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

// damages are files that can't be used.
var damages = map[string]func(path string) error{
	"not JSON": func(path string) error { return os.WriteFile(path, []byte("\x00\xff"), 0o600) },
	"empty":    func(path string) error { return os.WriteFile(path, nil, 0o600) },
	"a later version": func(path string) error {
		return os.WriteFile(path, []byte(`{"version": 3, "agent": "nomad-gpu"}`), 0o600)
	},
	"another agent's": func(path string) error {
		return os.WriteFile(path, []byte(`{"version": 2, "agent": "k8s-gpu"}`), 0o600)
	},
	"no regular file":  func(path string) error { return os.Mkdir(path, 0o700) },
	"can't be opened":  func(path string) error { return os.Symlink(path, path) },
	"larger than read": func(path string) error { return os.WriteFile(path, make([]byte, maxSize+1), 0o600) },
}

// With refuse a GPU never becomes an agent's because the file of the other agent, which is away, can't be used: what was read last counts, and
// for a process that has read nothing all is another agent's but what it has recorded itself. With warn both offer it, as always.
func TestDamagedFileOfAnAgentThatIsAway(t *testing.T) {
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, FolderName, "nomad-gpu.json")
			synctest.Test(t, func(t *testing.T) {
				n := nomad(t, dir, on(inventory.OverlapRefuse, 0, 1))
				pass(5 * time.Second)
				k := kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2))
				pass(5 * time.Second)
				k.expectSchedulable(t, "at first", 2)
				n.end()
				synctest.Wait() // nothing reads the file while it is replaced
				good, err := os.ReadFile(file)
				check.NoError(t, err)
				check.NoError(t, os.Remove(file))
				check.NoError(t, damage(file))
				pass(time.Minute)
				k.expectSchedulable(t, "damaged", 2)
				k.expectWarnings(t, "damaged", 2) // the agent does not run, and its file
				k.end()
				k = kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2, 3))
				pass(time.Minute)
				k.expectSchedulable(t, "damaged, after a restart", 2)
				if w := problem.Lines(k.watcher.Problems()); len(w) != 1 || !strings.Contains(w[0], file) || !strings.Contains(w[0], "delete") {
					t.Errorf("warnings: %q", w)
				}
				k.end()
				k = kube(t, dir, on(inventory.OverlapWarn, 0, 1, 2, 3))
				pass(time.Minute)
				k.expectSchedulable(t, "damaged, with warn", 0, 1, 2, 3)
				k.expectWarnings(t, "damaged, with warn", 1)
				k.end()

				check.NoError(t, os.Remove(file))
				check.NoError(t, os.WriteFile(file, good, 0o600))
				k = kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2))
				pass(5 * time.Second)
				k.expectSchedulable(t, "with the file", 2)
				check.NoError(t, os.Remove(file))
				pass(5 * time.Second)
				k.expectSchedulable(t, "an operator has removed the file", 0, 1, 2)
				k.expectWarnings(t, "an operator has removed the file", 0)
			})
		})
	}
}

// An agent that is back reads its own file again, or writes another one: no GPU has changed its owner meanwhile.
func TestAgentWithADamagedFileIsBack(t *testing.T) {
	for _, damage := range []string{"not JSON", "a later version"} {
		t.Run(damage, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, FolderName, "nomad-gpu.json")
			synctest.Test(t, func(t *testing.T) {
				n := nomad(t, dir, on(inventory.OverlapRefuse, 0, 1))
				pass(5 * time.Second)
				k := kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2))
				pass(5 * time.Second)
				n.end()
				check.NoError(t, damages[damage](file))
				pass(5 * time.Second)
				k.end()
				k = kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2))
				pass(5 * time.Second)
				n = nomad(t, dir, on(inventory.OverlapRefuse, 0, 1))
				pass(5 * time.Second)
				n.expectSchedulable(t, "back", 0, 1)
				k.expectSchedulable(t, "the other is back", 2)
				k.expectWarnings(t, "the other is back", 0)
			})
		})
	}
}

// neverBoth lets fake time pass, and fails if a GPU takes work through both agents in between.
func neverBoth(t *testing.T, a, b *agent, d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); {
		pass(50 * time.Millisecond)
		for _, n := range a.schedulable() {
			if slices.Contains(b.schedulable(), n) {
				t.Fatalf("GPU %d takes work through both agents\n%s", n, b.log)
			}
		}
	}
}

// While the folder is locked an agent that starts offers what it has recorded before, and nothing else, however long that takes.
func TestFolderLockedAtTheStart(t *testing.T) {
	for _, locked := range []time.Duration{500 * time.Millisecond, 3 * time.Second, time.Minute} {
		t.Run(locked.String(), func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				n := nomad(t, dir, on(inventory.OverlapRefuse, 0, 1, 2, 3, 4, 5))
				pass(5 * time.Second)
				unlock, err := lockFolder(t.Context(), filepath.Join(dir, FolderName))
				check.NoError(t, err)
				k := kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2, 3, 4, 5, 6))
				neverBoth(t, n, k, locked)
				k.expectSchedulable(t, "locked")
				unlock()
				neverBoth(t, n, k, 10*time.Second)
				k.expectSchedulable(t, "unlocked", 6)

				k.end()
				unlock, err = lockFolder(t.Context(), filepath.Join(dir, FolderName))
				check.NoError(t, err)
				k = kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2, 3, 4, 5, 6))
				neverBoth(t, n, k, max(locked, 2*time.Second))
				k.expectSchedulable(t, "locked, after a restart", 6)
				unlock()
			})
		})
	}
}

// A device that can't be recorded is not offered where another agent has files: it would not know of it. Work that runs goes on.
func TestDevicesThatAreNotOnDisk(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, FolderName, "k8s-gpu.json")
	synctest.Test(t, func(t *testing.T) {
		n := nomad(t, dir, on(inventory.OverlapRefuse, 0))
		pass(5 * time.Second)
		n.end()
		check.NoError(t, os.Mkdir(file, 0o700)) // can't be replaced by a file
		k := kube(t, dir, on(inventory.OverlapRefuse, 0, 1, 2))
		pass(time.Minute)
		k.expectSchedulable(t, "not written")
		if w := strings.Join(problem.Lines(k.watcher.Problems()), "\n"); !strings.Contains(w, "devices of this agent not recorded") {
			t.Errorf("warnings: %s", w)
		}
		n = nomad(t, dir, on(inventory.OverlapRefuse, 0, 1, 2, 3))
		neverBoth(t, n, k, time.Minute)
		n.expectSchedulable(t, "beside an agent that runs and has no file on disk", 0)
		check.NoError(t, os.Remove(file))
		neverBoth(t, n, k, 10*time.Second)
		if all := slices.Sorted(slices.Values(slices.Concat(n.schedulable(), k.schedulable()))); !slices.Equal(all, []int{0, 1, 2, 3}) {
			t.Errorf("written: %v and %v", n.schedulable(), k.schedulable())
		}
		k.expectWarnings(t, "written", 0)
	})
}

// recorder is a monitor that keeps the latest host.
type recorder struct {
	Monitor
	host inventory.Host
}

func (r *recorder) UpdateHost(change func(*inventory.Host)) { change(&r.host) }

// While the disk hangs adapters wait for a moment only; what was read before stays in force, and an agent that is alone is not held up.
func TestDiskThatHangs(t *testing.T) {
	at := []gpu.Placement{whole(1)}
	own := inventory.Recorded{Reason: elseUnrecorded, Pending: true, At: at}
	for name, tc := range map[string]struct {
		latest *view
		want   inventory.Recorded
	}{
		"nothing was read":              {nil, inventory.Recorded{Reason: elseUnrecorded, At: at}},
		"another agent has files":       {&view{own: own}, inventory.Recorded{Reason: elseUnrecorded, At: at}},
		"alone, with a file":            {&view{alone: true, own: own}, inventory.Recorded{Reason: elseUnrecorded, At: at}},
		"no other agent has any so far": {&view{alone: true}, inventory.Recorded{}},
	} {
		w := New(Options{Agent: "k8s-gpu", StateDir: t.TempDir(), Config: core.DefaultConfig(), Log: slog.New(slog.DiscardHandler)})
		var m recorder
		w.update(&m, func(h *inventory.Host) {
			h.Recorded = inventory.Recorded{Reason: elseUnrecorded, Pending: true, At: at}
		})
		w.latest.Store(tc.latest)
		w.setSlow(&m)
		if !m.host.Recorded.Equal(tc.want) {
			t.Errorf("%s: %+v, want %+v", name, m.host.Recorded, tc.want)
		}
		if got := problem.Lines(w.Problems()); len(got) != 1 || !strings.Contains(got[0], errSlow.Error()) {
			t.Errorf("%s: warnings %q", name, got)
		}
	}
}

// Where locks do not work at all no other agent can offer anything, unless it has a file.
func TestFolderWithoutLocks(t *testing.T) {
	folder := t.TempDir()
	s, _ := newStore(t, folder, "k8s-gpu", true)
	if own, _ := s.ownUnread(syscall.ENOLCK); own.Reason != "" {
		t.Errorf("alone: %+v", own)
	}
	if own, _ := s.ownUnread(nil); own.Reason == "" {
		t.Error("before the first attempt nothing is known")
	}
	check.NoError(t, os.WriteFile(filepath.Join(folder, "nomad-gpu.lock"), nil, 0o600))
	if own, _ := s.ownUnread(syscall.ENOLCK); own.Reason == "" {
		t.Error("with a file of another agent")
	}
}

// What was recorded in an earlier boot is no reason against the file of another agent that can't be read.
func TestFilesThatCannotBeReadAndMoves(t *testing.T) {
	id := coretest.GPU(1)
	for name, tc := range map[string]struct {
		mine, now agentFile
		refuse    bool
		overlaps  int
	}{
		"not recorded":                     {agentFile{}, agentFile{}, true, 1},
		"recorded in this boot":            {recorded("k8s-gpu", 1, whole(1)), recorded("k8s-gpu", 1, whole(1)), true, 0},
		"recorded in this boot, with warn": {recorded("k8s-gpu", 1, whole(1)), recorded("k8s-gpu", 1, whole(1)), false, 1},
		"recorded in an earlier boot":      {recorded("k8s-gpu", 1, whole(1)), agentFile{}, true, 1},
	} {
		c := hostRecords{mine: tc.mine, now: tc.now, others: []agentFile{unreadFile("nomad-gpu")}, refuse: tc.refuse, running: func(string) bool { return false }}
		if all := c.of(id); len(all) != tc.overlaps || tc.overlaps > 0 && !all[0].Unread {
			t.Errorf("%s: %+v", name, all)
		}
	}
}
