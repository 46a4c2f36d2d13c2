package hostwatch

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
	"github.com/tandem-gpu/tandem/internal/core/inventory"
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
				nomad := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: tc.nomad})
				pass(time.Minute)
				kube := start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: tc.kube})
				pass(10 * time.Minute)
				for i, a := range []*agent{nomad, kube} {
					if got, want := a.schedulable(), [][]int{tc.first, tc.second}[i]; !slices.Equal(got, want) {
						t.Errorf("agent %d has %v schedulable, want %v", i, got, want)
					}
					if n := len(a.Current().Overlaps()); n != tc.overlaps[i] {
						t.Errorf("agent %d: %d overlaps, want %d: %v", i, n, tc.overlaps[i], a.Current().Overlaps())
					}
					if n := a.logged("is also offered by another agent"); n != tc.overlaps[i] {
						t.Errorf("agent %d: %d warnings, want %d:\n%s", i, n, tc.overlaps[i], a.log)
					}
					if notes := a.watcher.Warnings(); len(notes) != 0 {
						t.Errorf("agent %d: %q", i, notes)
					}
				}
			})
		})
	}
}

// A rebind of one agent changes the numbers of the other one, even if it does not change its own offer.
func TestRebindReachesTheOtherAgent(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		nomad := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: on(inventory.OverlapWarn, 0, 1)})
		kube := start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: on(inventory.OverlapWarn, 2, 3)})
		pass(5 * time.Second)
		if _, _, err := nomad.Rebind(t.Context()); err != nil {
			t.Fatal(err)
		}
		pass(5 * time.Second)
		if n := kube.State().Binding.Numbering; n.Generation != 1 || len(n.Numbers) != 8 {
			t.Errorf("the other agent has %+v", n)
		}
	})
}

// Agents that start together offer each GPU once, after their first poll.
func TestTwoAgentsStartTogether(t *testing.T) {
	for range 10 {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			nomad := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: on(inventory.OverlapRefuse, 0, 1, 2, 3)})
			kube := start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: on(inventory.OverlapRefuse, 2, 3, 4, 5)})
			for range 5 {
				pass(2 * time.Second)
				all := slices.Sorted(slices.Values(slices.Concat(nomad.schedulable(), kube.schedulable())))
				if !slices.Equal(all, []int{0, 1, 2, 3, 4, 5}) {
					t.Errorf("%v and %v", nomad.schedulable(), kube.schedulable())
				}
			}
		})
	}
}

// A GPU that one agent stops offering is the other's two seconds later; claims stay over a restart and a crash.
func TestClaimsMoveBetweenAgents(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		nomad := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: on(inventory.OverlapRefuse, 0, 1)})
		pass(time.Second)
		kube := start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: on(inventory.OverlapRefuse, 1, 2)})
		pass(5 * time.Second)
		must(t, nomad.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0)))
		pass(2 * time.Second)
		if got := kube.schedulable(); !slices.Equal(got, []int{1, 2}) {
			t.Errorf("not claimed by the other agent: %v", got)
		}
		must(t, nomad.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0, 1)))
		pass(2 * time.Second)
		if got := nomad.schedulable(); !slices.Equal(got, []int{0}) {
			t.Errorf("it is the other's now: %v", got)
		}

		kube.end()
		pass(time.Minute)
		if got := nomad.schedulable(); !slices.Equal(got, []int{0}) {
			t.Errorf("the other's workloads may be running: %v", got)
		}
		file := filepath.Join(dir, "claims", "k8s-gpu.json")
		if notes := nomad.watcher.Warnings(); len(notes) != 1 || !strings.Contains(notes[0], file) || nomad.logged("agent not running, its claims stay") != 1 {
			t.Errorf("%q\n%s", notes, nomad.log)
		}
		again := start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: on(inventory.OverlapRefuse, 1, 2)})
		pass(2 * time.Second)
		if got := again.schedulable(); !slices.Equal(got, []int{1, 2}) || len(nomad.watcher.Warnings()) != 0 {
			t.Errorf("it runs again: %v; %q", got, nomad.watcher.Warnings())
		}
		again.end()
		must(t, os.Remove(file))
		pass(2 * time.Second)
		if got := nomad.schedulable(); !slices.Equal(got, []int{0, 1}) || len(nomad.watcher.Warnings()) != 0 {
			t.Errorf("an operator has removed the file: %v; %q", got, nomad.watcher.Warnings())
		}
	})
}

func TestMPSDaemonsComeAndGo(t *testing.T) {
	for name, pool := range map[string]string{"named by the policy": "few", "named by default": ""} {
		t.Run(name, func(t *testing.T) {
			cfg := core.DefaultConfig()
			cfg.Policy.Rules = []inventory.Rule{{Pool: pool, Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true}}}
			folder := pool
			if folder == "" {
				folder = "gpu.mps"
			}
			root := shortDir(t)
			synctest.Test(t, func(t *testing.T) {
				daemon := startDaemon(t, root, folder)
				a := start(t, setup{name: "k8s-gpu", stateDir: "", mpsRoot: root, cfg: cfg})
				pass(time.Second)
				if n := len(a.schedulable()); n != 16 || a.logged("MPS_DAEMON_DOWN") != 0 {
					t.Errorf("%d units, want 16 from the start:\n%s", n, a.log)
				}
				for range 3 {
					daemon.SetUnlinkOnClose(false) // as if killed
					_ = daemon.Close()
					pass(2 * time.Second)
					if n := len(a.schedulable()); n != 0 {
						t.Errorf("%d units without a daemon", n)
					}
					_ = os.Remove(filepath.Join(root, domain, folder, "pipe", "control"))
					pass(2 * time.Second)
					daemon = startDaemon(t, root, folder)
					pass(2 * time.Second)
					if n := len(a.schedulable()); n != 16 {
						t.Errorf("%d units with a daemon", n)
					}
				}
				if n := a.logged(`msg="MPS control daemon answers"`); n != 4 {
					t.Errorf("%d times", n)
				}
			})
		})
	}
}

// Without MPS no daemon is checked, and the loop sleeps.
func TestNoDaemonToCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, setup{name: "k8s-gpu", mpsRoot: "/nowhere", cfg: core.DefaultConfig()})
		pass(time.Hour)
		for _, l := range a.Watchdog().Tasks() {
			if l.Name == "MPS daemons" && l.Beats > 10 {
				t.Errorf("%d turns", l.Beats)
			}
		}
	})
}

func TestFolderThatCannotBeUsed(t *testing.T) {
	blocked := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(blocked, nil, 0o600))
	for dir, overlap := range map[string]inventory.OverlapMode{"": inventory.OverlapRefuse, blocked: inventory.OverlapWarn, "/proc/nothing": inventory.OverlapRefuse} {
		t.Run(fmt.Sprintf("%q", dir), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := start(t, setup{name: "k8s-gpu", stateDir: dir, cfg: on(overlap, 0, 1)})
				pass(time.Minute)
				if got := a.schedulable(); !slices.Equal(got, []int{0, 1}) {
					t.Errorf("it has %v schedulable", got)
				}
				if notes := a.watcher.Warnings(); len(notes) != 1 || a.logged("level=WARN msg=\"claims not read, overlaps with other agents are unknown") != 1 {
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
		first := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: cfg})
		pass(time.Second)
		second := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: cfg})
		pass(2 * time.Second)
		if notes := second.watcher.Warnings(); len(notes) != 0 {
			t.Errorf("too early: %q", notes)
		}
		pass(time.Minute)
		if notes := second.watcher.Warnings(); len(notes) != 1 || second.logged("level=ERROR") != 1 || len(first.watcher.Warnings()) != 0 {
			t.Errorf("%q\n%s", notes, second.log)
		}
		first.end()
		pass(2 * time.Second)
		if notes := second.watcher.Warnings(); len(notes) != 0 || len(second.schedulable()) != 2 {
			t.Errorf("%q", notes)
		}
	})
}

// A folder that stays locked delays the start of an agent for a moment, and its end not at all.
func TestFolderThatStaysLocked(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		must(t, os.Mkdir(filepath.Join(dir, "claims"), 0o700))
		unlock, err := lockFolder(t.Context(), filepath.Join(dir, "claims"))
		if err != nil {
			t.Fatal(err)
		}
		a := start(t, setup{name: "nomad-gpu", stateDir: dir, cfg: on(inventory.OverlapRefuse, 0, 1)})
		pass(firstAtMost)
		if got := a.schedulable(); len(got) != 2 {
			t.Errorf("it has %v schedulable", got)
		}
		pass(time.Minute)
		if len(a.watcher.Warnings()) != 1 || len(a.Watchdog().Late(time.Now())) != 0 {
			t.Errorf("%q, %v", a.watcher.Warnings(), a.Watchdog().Late(time.Now()))
		}
		unlock()
		pass(2 * time.Second)
		if len(a.watcher.Warnings()) != 0 || a.logged("overlaps with other agents known again") != 1 {
			t.Errorf("%q\n%s", a.watcher.Warnings(), a.log)
		}
	})
}
