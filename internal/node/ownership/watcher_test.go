package ownership

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestTwoAgentsOnOneHost(t *testing.T) {
	for _, tc := range []struct {
		name          string
		nomad, kube   core.Config
		first, second []int // schedulable GPUs
		overlaps      []int // of each
	}{
		{"disjoint", on(inventory.OverlapRefuse, 0, 1, 2, 3), on(inventory.OverlapRefuse, 4, 5, 6, 7), []int{0, 1, 2, 3}, []int{4, 5, 6, 7}, []int{0, 0}},
		{"overlapping, both warn", on(inventory.OverlapWarn, 0, 1, 2), on(inventory.OverlapWarn, 2, 3), []int{0, 1, 2}, []int{2, 3}, []int{1, 1}},
		{"overlapping, both refuse", on(inventory.OverlapRefuse, 0, 1, 2), on(inventory.OverlapRefuse, 2, 3), []int{0, 1, 2}, []int{3}, []int{0, 1}},
		{"overlapping, the second refuses", on(inventory.OverlapWarn, 0, 1, 2), on(inventory.OverlapRefuse, 2, 3), []int{0, 1, 2}, []int{3}, []int{0, 1}},
		{"overlapping, the first refuses", on(inventory.OverlapRefuse, 0, 1, 2), on(inventory.OverlapWarn, 2, 3), []int{0, 1, 2}, []int{2, 3}, []int{1, 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				n := nomad(t, dir, tc.nomad)
				pass(time.Minute)
				k := kube(t, dir, tc.kube)
				pass(10 * time.Minute)
				for i, a := range []*agent{n, k} {
					a.expectSchedulable(t, fmt.Sprint("agent ", i), [][]int{tc.first, tc.second}[i]...)
					if n := len(a.Current().Overlaps()); n != tc.overlaps[i] {
						t.Errorf("agent %d: %d overlaps, want %d: %v", i, n, tc.overlaps[i], a.Current().Overlaps())
					}
					if n := a.logged("is also offered by another agent"); n != tc.overlaps[i] {
						t.Errorf("agent %d: %d warnings, want %d:\n%s", i, n, tc.overlaps[i], a.log)
					}
					a.expectWarnings(t, fmt.Sprint("agent ", i), 0)
				}
			})
		})
	}
}

// A rebind of one agent changes the numbers of the other one, even if it does not change its own offer.
func TestRebindReachesTheOtherAgent(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		n := nomad(t, dir, on(inventory.OverlapWarn, 0, 1))
		k := kube(t, dir, on(inventory.OverlapWarn, 2, 3))
		pass(5 * time.Second)
		if _, _, err := n.Rebind(t.Context()); err != nil {
			t.Fatal(err)
		}
		pass(5 * time.Second)
		if got := k.State().Binding.Numbering; got.Generation != 1 || len(got.Numbers) != 8 {
			t.Errorf("the other agent has %+v", got)
		}
	})
}

// Agents that start together offer each GPU once, after their first poll.
func TestTwoAgentsStartTogether(t *testing.T) {
	for range 10 {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			n := nomad(t, dir, on(inventory.OverlapRefuse, 0, 1, 2, 3))
			k := kube(t, dir, on(inventory.OverlapRefuse, 2, 3, 4, 5))
			for range 5 {
				pass(2 * time.Second)
				all := slices.Sorted(slices.Values(slices.Concat(n.schedulable(), k.schedulable())))
				if !slices.Equal(all, []int{0, 1, 2, 3, 4, 5}) {
					t.Errorf("%v and %v", n.schedulable(), k.schedulable())
				}
			}
		})
	}
}

// A GPU that one agent stops offering is the other's two seconds later; devices stay over a restart and a crash.
func TestDevicesMoveBetweenAgents(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		n := nomad(t, dir, on(inventory.OverlapRefuse, 0, 1))
		pass(time.Second)
		k := kube(t, dir, on(inventory.OverlapRefuse, 1, 2))
		pass(5 * time.Second)
		check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0)))
		pass(2 * time.Second)
		k.expectSchedulable(t, "not recorded by the other agent", 1, 2)
		check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0, 1)))
		pass(2 * time.Second)
		n.expectSchedulable(t, "it is the other's now", 0)

		k.end()
		pass(time.Minute)
		n.expectSchedulable(t, "the other's workloads may be running", 0)
		file := filepath.Join(dir, FolderName, "k8s-gpu.json")
		if notes := problem.Lines(n.watcher.Problems()); len(notes) != 1 || !strings.Contains(notes[0], file) || n.logged("agent not running, its devices stay recorded") != 1 {
			t.Errorf("%q\n%s", notes, n.log)
		}
		again := kube(t, dir, on(inventory.OverlapRefuse, 1, 2))
		pass(2 * time.Second)
		again.expectSchedulable(t, "it runs again", 1, 2)
		n.expectWarnings(t, "it runs again", 0)
		again.end()
		check.NoError(t, os.Remove(file))
		pass(2 * time.Second)
		n.expectSchedulable(t, "an operator has removed the file", 0, 1)
		n.expectWarnings(t, "an operator has removed the file", 0)
	})
}

func TestFolderThatCannotBeUsed(t *testing.T) {
	blocked := filepath.Join(t.TempDir(), "file")
	check.NoError(t, os.WriteFile(blocked, nil, 0o600))
	for dir, tc := range map[string]struct {
		overlap inventory.OverlapMode
		logged  int // the effect of the fault ends when no other agent may be there
	}{
		"":                   {inventory.OverlapRefuse, 1},
		blocked:              {inventory.OverlapWarn, 1},
		blocked + "/nothing": {inventory.OverlapRefuse, 2},
	} {
		t.Run(fmt.Sprintf("%q", strings.TrimPrefix(dir, blocked)), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := kube(t, dir, on(tc.overlap, 0, 1))
				pass(time.Minute)
				a.expectSchedulable(t, "without files", 0, 1)
				const text = "level=WARN msg=\"devices of the agents not read, overlaps with other agents are unknown"
				if notes := problem.Lines(a.watcher.Problems()); len(notes) != 1 || a.logged(text) != tc.logged {
					t.Errorf("%q\n%s", notes, a.log)
				}
			})
		})
	}
}

// Two processes of an agent are no problem while one replaces the other, but a warning if both keep running.
func TestDuplicateAgentsAreReported(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		cfg := on(inventory.OverlapWarn, 0, 1)
		first := nomad(t, dir, cfg)
		pass(time.Second)
		second := nomad(t, dir, cfg)
		pass(2 * time.Second)
		second.expectWarnings(t, "too early", 0)
		pass(time.Minute)
		second.expectWarnings(t, "both run", 1)
		first.expectWarnings(t, "both run", 0)
		if n := second.logged("level=ERROR"); n != 1 {
			t.Errorf("%d errors:\n%s", n, second.log)
		}
		first.end()
		pass(2 * time.Second)
		second.expectWarnings(t, "the first has ended", 0)
		second.expectSchedulable(t, "the first has ended", 0, 1)
	})
}

// A folder that stays locked delays the start of an agent for a moment, and its end not at all. With refuse nothing is offered meanwhile.
func TestFolderThatStaysLocked(t *testing.T) {
	for overlap, locked := range map[inventory.OverlapMode][]int{inventory.OverlapWarn: {0, 1}, inventory.OverlapRefuse: nil} {
		t.Run(string(overlap), func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				check.NoError(t, os.Mkdir(filepath.Join(dir, FolderName), 0o700))
				unlock, err := lockFolder(t.Context(), filepath.Join(dir, FolderName))
				check.NoError(t, err)
				a := nomad(t, dir, on(overlap, 0, 1))
				pass(firstAtMost)
				a.expectSchedulable(t, "after a second", locked...)
				pass(time.Minute)
				a.expectSchedulable(t, "after a minute", locked...)
				a.expectWarnings(t, "after a minute", 1)
				if a.Current().Provisional() {
					t.Error("after a minute the inventory is provisional: adapters wait for another one")
				}
				if late := a.Watchdog().Late(time.Now()); len(late) != 0 {
					t.Errorf("late: %v", late)
				}
				unlock()
				pass(2 * time.Second)
				a.expectSchedulable(t, "unlocked", 0, 1)
				a.expectWarnings(t, "unlocked", 0)
				if a.logged("overlaps with other agents known again") != 1 {
					t.Errorf("log: %s", a.log)
				}
			})
		})
	}
}

// byIndex offers the first two GPUs, also while the files are not read.
func byIndex() core.Config {
	cfg := core.DefaultConfig()
	cfg.Overlap = inventory.OverlapWarn
	cfg.Policy.Include = []inventory.Selector{{Indices: []gpu.DeviceIndex{{GPU: 0, Instance: -1}, {GPU: 1, Instance: -1}}}}
	return cfg
}

// While another agent may be numbering GPUs no GPU is offered by its index; but only for a while, and not where numbers can't be
// shared at all.
func TestNewGPUsWaitForTheFiles(t *testing.T) {
	for name, tc := range map[string]struct {
		folder func(t *testing.T, dir string)
		early  int // GPUs that are offered after two seconds
	}{
		"free": {func(*testing.T, string) {}, 2},
		"held": {func(t *testing.T, dir string) {
			folder := filepath.Join(dir, FolderName)
			check.NoError(t, os.Mkdir(folder, 0o700))
			unlock, err := lockFolder(t.Context(), folder)
			check.NoError(t, err)
			t.Cleanup(unlock)
		}, 0},
		"another agent's file can't be read": {func(t *testing.T, dir string) {
			check.NoError(t, os.Mkdir(filepath.Join(dir, FolderName), 0o700),
				os.WriteFile(filepath.Join(dir, FolderName, "k8s-gpu.json"), []byte(`{"version": 1000}`), 0o600))
		}, 0},
		"no folder": {func(t *testing.T, dir string) {
			check.NoError(t, os.WriteFile(filepath.Join(dir, FolderName), nil, 0o600))
		}, 2},
		"read only": {func(t *testing.T, dir string) {
			check.NoError(t, os.MkdirAll(filepath.Join(dir, FolderName, "nomad-gpu.json"), 0o700)) // can't be replaced by a file
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				tc.folder(t, dir)
				a := nomad(t, dir, byIndex())
				pass(2 * time.Second)
				if got := a.schedulable(); len(got) != tc.early {
					t.Errorf("after two seconds it has %v schedulable", got)
				}
				pass(time.Minute)
				a.expectSchedulable(t, "after a minute", 0, 1)
			})
		})
	}
}
