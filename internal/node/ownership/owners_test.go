package ownership

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// owners reads the files under the lock and fails if hardware has two owners.
func owners(t *testing.T, folder string) map[string][]gpu.Placement {
	unlock, err := lockFolder(t.Context(), folder)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer unlock()
	r, err := (&store{folder: folder, boot: "b00t", log: slog.New(slog.DiscardHandler)}).read(func(string) bool { return false })
	if err != nil {
		t.Error(err)
	}
	found := map[string][]gpu.Placement{}
	for i, a := range r.others {
		found[a.agent] = placements(a.devices)
		for _, b := range r.others[:i] {
			for _, c := range a.devices {
				for _, d := range b.devices {
					if c.at.Overlaps(d.at) {
						t.Errorf("two owners: %s has %v, %s has %v", a.agent, c.at, b.agent, d.at)
					}
				}
			}
		}
	}
	return found
}

// some are random GPUs and MIG instances of eight GPUs, of which two are sometimes partitioned.
func some(random *rand.Rand) (at []gpu.Placement) {
	for n := range 8 {
		switch {
		case random.IntN(2) == 0:
		case n >= 6 && random.IntN(2) == 0:
			at = append(at, instance(n, uint32(random.IntN(3))))
		default:
			at = append(at, whole(n))
		}
	}
	return at
}

// Two agents change their devices concurrently, 500 times each: with refuse no hardware ever has two owners, and each agent reads
// which devices it has.
func TestNeverTwoOwners(t *testing.T) {
	folder := t.TempDir()
	var agents sync.WaitGroup
	for seed, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		r, _ := newStore(t, folder, agent, true)
		agents.Go(func() {
			random := rand.New(rand.NewPCG(uint64(seed), 5))
			for range 500 {
				wanted := some(random)
				v, err := r.update(t.Context(), want(wanted...))
				if err != nil {
					t.Error(err)
					return
				}
				mine := owners(t, folder)[agent]
				for _, p := range wanted {
					lost := slices.ContainsFunc(v.overlaps, func(c inventory.PeerDevice) bool { return c.Earlier && c.At.Overlaps(p) })
					if has := slices.Contains(mine, p); has == lost {
						t.Errorf("%s and %v: recorded %v, another's %v", agent, p, has, lost)
					}
				}
			}
		})
	}
	agents.Wait()
}

// Agents that start at the same time agree on which was first.
func TestSimultaneousStart(t *testing.T) {
	for n := range 50 {
		folder := filepath.Join(t.TempDir(), FolderName) // which does not exist yet
		var agents sync.WaitGroup
		start := make(chan struct{})
		views := make([]view, 3)
		for i := range views {
			r, _ := newStore(t, folder, fmt.Sprintf("agent-%d", i), true)
			agents.Go(func() {
				<-start
				v, err := r.update(t.Context(), want(whole(n%8)))
				if err != nil {
					t.Error(err)
				}
				views[i] = v
			})
		}
		close(start)
		agents.Wait()
		found := owners(t, folder)
		for i, v := range views {
			owns := len(found[fmt.Sprintf("agent-%d", i)]) == 1
			if lost := slices.ContainsFunc(v.overlaps, func(c inventory.PeerDevice) bool { return c.Earlier }); owns == lost {
				t.Errorf("agent-%d: owner %v, though it sees %v", i, owns, v.overlaps)
			}
		}
		if len(slices.Concat(found["agent-0"], found["agent-1"], found["agent-2"])) != 1 {
			t.Errorf("owners: %v", found)
		}
	}
}

// childFolder makes this binary an agent that keeps changing its devices in that folder until it is killed.
const childFolder = "TANDEM_TEST_AGENTS"

func TestMain(m *testing.M) {
	folder := os.Getenv(childFolder)
	if folder == "" {
		os.Exit(m.Run())
	}
	r := &store{
		folder: folder, agent: "nomad-gpu", boot: "b00t", refuse: true,
		log: slog.New(slog.DiscardHandler),
	}
	random := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for {
		if _, err := r.update(context.Background(), want(some(random)...)); err != nil {
			slog.Error("child", "error", err)
			os.Exit(1)
		}
		<-time.After(time.Millisecond) // or no other process gets the lock
	}
}

// startChild returns when the child has written its file.
func startChild(t *testing.T, folder string) *exec.Cmd {
	t.Helper()
	path := filepath.Join(folder, "nomad-gpu.json")
	before, _ := os.Stat(path)
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childFolder+"="+folder)
	child.Stderr = os.Stderr
	check.NoError(t, child.Start())
	t.Cleanup(func() { _ = child.Process.Kill(); _ = child.Wait() })
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		if now, err := os.Stat(path); err == nil && (before == nil || !os.SameFile(before, now)) {
			return child
		}
		if time.Since(began) > time.Minute {
			t.Fatal("the child does not record anything")
		}
	}
}

// An agent that is killed at any moment leaves a complete file, no lock, and no temporary file that stays; its devices stay.
func TestKilledAtAnyMoment(t *testing.T) {
	folder := t.TempDir()
	ours, log := newStore(t, folder, "k8s-gpu", true)
	random := rand.New(rand.NewPCG(3, 3))
	for range 8 {
		child := startChild(t, folder)
		for range random.IntN(10) {
			update(t, ours, some(random)...)
		}
		<-time.After(time.Duration(random.IntN(5000)) * time.Microsecond)
		check.NoError(t, child.Process.Kill())
		_ = child.Wait() // it was killed

		theirs := inFile(t, folder, "nomad-gpu")
		owners(t, folder)
		v := update(t, ours, whole(0), whole(1), whole(2), whole(3), whole(4), whole(5), whole(6), whole(7))
		owners(t, folder)
		if len(inFile(t, folder, "nomad-gpu")) != len(theirs) {
			t.Error("a dead agent has changed its file")
		}
		if (len(theirs) > 0) != (len(v.stopped()) == 1) {
			t.Errorf("it is dead and has %d devices: %v", len(theirs), v.stopped())
		}
		update(t, ours) // removes the devices
	}
	if log.Len() > 0 {
		t.Errorf("a file could not be read:\n%s", log)
	}
	r, _ := newStore(t, folder, "nomad-gpu", true)
	update(t, r)
	if left, _ := filepath.Glob(filepath.Join(folder, ".nomad-gpu.json*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}
