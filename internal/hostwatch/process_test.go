package hostwatch

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// childFolder makes this binary an agent that keeps changing its claims in that folder until it is killed.
const childFolder = "TANDEM_TEST_CLAIMS"

func TestMain(m *testing.M) {
	folder := os.Getenv(childFolder)
	if folder == "" {
		os.Exit(m.Run())
	}
	r := &claimStore{
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

// startChild returns when the child has written claims.
func startChild(t *testing.T, folder string) *exec.Cmd {
	t.Helper()
	path := filepath.Join(folder, "nomad-gpu.json")
	before, _ := os.Stat(path)
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childFolder+"="+folder)
	child.Stderr = os.Stderr
	must(t, child.Start())
	t.Cleanup(func() { _ = child.Process.Kill(); _ = child.Wait() })
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		if now, err := os.Stat(path); err == nil && (before == nil || !os.SameFile(before, now)) {
			return child
		}
		if time.Since(began) > time.Minute {
			t.Fatal("the child does not claim anything")
		}
	}
}

// An agent that is killed at any moment leaves a complete file, no lock, and no temporary file that stays; its claims stay.
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
		must(t, child.Process.Kill())
		_ = child.Wait() // it was killed

		theirs := inFile(t, folder, "nomad-gpu")
		owners(t, folder)
		v := update(t, ours, whole(0), whole(1), whole(2), whole(3), whole(4), whole(5), whole(6), whole(7))
		owners(t, folder)
		if len(inFile(t, folder, "nomad-gpu")) != len(theirs) {
			t.Error("a dead agent has changed its claims")
		}
		if (len(theirs) > 0) != (len(v.stopped()) == 1) {
			t.Errorf("it is dead and claims %d devices: %v", len(theirs), v.stopped())
		}
		update(t, ours) // removes the claims
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
