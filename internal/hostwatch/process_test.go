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

// childFolder makes this binary an agent that changes its mind all the time, in that folder, until it is killed.
const childFolder = "TANDEM_TEST_CLAIMS"

func TestMain(m *testing.M) {
	folder := os.Getenv(childFolder)
	if folder == "" {
		os.Exit(m.Run())
	}
	r := &register{
		folder: folder, agent: "nomad-gpu", boot: "b00t", refuse: true,
		log: slog.New(slog.DiscardHandler), said: map[string]string{},
	}
	random := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for {
		if _, err := r.round(context.Background(), want(some(random)...)); err != nil {
			slog.Error("child", "error", err)
			os.Exit(1)
		}
		<-time.After(time.Millisecond) // or nobody else gets the lock
	}
}

// startChild returns when the child has claimed something.
func startChild(t *testing.T, folder string) *exec.Cmd {
	t.Helper()
	path := filepath.Join(folder, "nomad-gpu.json")
	before, _ := os.Stat(path)
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childFolder+"="+folder)
	child.Stderr = os.Stderr
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
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

// Killed at any moment, an agent leaves a whole file, no lock, and nothing that stays for ever; what it claimed is
// still its own.
func TestKilledAtAnyMoment(t *testing.T) {
	folder := t.TempDir()
	ours, log := newRegister(t, folder, "k8s-gpu", true)
	random := rand.New(rand.NewPCG(3, 3))
	for range 8 {
		child := startChild(t, folder)
		for range random.IntN(10) {
			see(t, ours, some(random)...) // and meets ours
		}
		<-time.After(time.Duration(random.IntN(5000)) * time.Microsecond)
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = child.Wait() // it was killed

		theirs := inFile(t, folder, "nomad-gpu")
		owners(t, folder)
		v := see(t, ours, gpu(0), gpu(1), gpu(2), gpu(3), gpu(4), gpu(5), gpu(6), gpu(7))
		owners(t, folder)
		if len(inFile(t, folder, "nomad-gpu")) != len(theirs) {
			t.Error("a dead agent has changed its mind")
		}
		if (len(theirs) > 0) != (len(v.gone()) == 1) {
			t.Errorf("it is dead and claims %d devices: %v", len(theirs), v.gone())
		}
		see(t, ours) // makes room for the next
	}
	if log.Len() > 0 {
		t.Errorf("a file could not be read:\n%s", log)
	}
	r, _ := newRegister(t, folder, "nomad-gpu", true)
	see(t, r)
	if left, _ := filepath.Glob(filepath.Join(folder, ".nomad-gpu.json*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}
