package gpureset

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
)

// locked is a Local that notes its calls of nvidia-smi, all of which succeed.
func locked(stateDir string) (r Local, calls *[]string) {
	calls = new([]string)
	return Local{Lock: NewLock(stateDir), Call: func(_ context.Context, args ...string) (string, int, error) {
		*calls = append(*calls, strings.Join(args, " "))
		return "Disabled\nGPU 00000000:1A:00.0 was successfully reset.\nAll done.\n", 0, nil
	}}, calls
}

// soon ends after the lock was tried some times.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*lockEvery)
	t.Cleanup(cancel)
	return ctx
}

func isBusy(err error) bool { _, ok := errors.AsType[*BusyError](err); return ok }

// An agent is killed while its nvidia-smi resets a GPU: the next process touches no GPU until that has ended.
func TestNothingTouchesAGPUWhileNvidiaSMIOfAKilledAgentRuns(t *testing.T) {
	if dir := os.Getenv("GPURESET_LOCKED"); dir != "" {
		_, _, _ = shell.call(t.Context(), NewLock(dir), "-c", `echo >"$1/begun"; while [ ! -e "$1/end" ]; do sleep 0.01; done`, "sh", dir)
		return
	}
	dir := t.TempDir()
	agent := exec.Command("/proc/self/exe", "-test.run=^TestNothingTouchesAGPUWhileNvidiaSMIOfAKilledAgentRuns$")
	agent.Env, agent.SysProcAttr = append(os.Environ(), "GPURESET_LOCKED="+dir), &syscall.SysProcAttr{Setpgid: true}
	check.NoError(t, agent.Start())
	end := func() error { return os.WriteFile(filepath.Join(dir, "end"), nil, 0o600) }
	t.Cleanup(func() { _ = end() })
	check.Until(t, "nvidia-smi runs", func() bool { _, err := os.Stat(filepath.Join(dir, "begun")); return err == nil })
	check.NoError(t, syscall.Kill(-agent.Process.Pid, syscall.SIGKILL))
	_ = agent.Wait()

	r, calls := locked(dir)
	target := Target{GPU: "GPU-1", Minor: 3}
	_, look := r.Look(soon(t), target)
	if restore, reset := r.Restore(soon(t), target.GPU), r.Reset(soon(t), target); !isBusy(restore) || !isBusy(look) || !isBusy(reset) || len(*calls) > 0 {
		t.Errorf("restore: %v; look: %v; reset: %v; calls %q", restore, look, reset, *calls)
	}
	other, calls := locked(dir)
	if err := other.Restore(soon(t), target.GPU); !isBusy(err) {
		t.Errorf("at first: %v", err)
	}
	other.Lock.foreign = time.Now().Add(-orphanAtMost)
	if err := other.Restore(t.Context(), target.GPU); err != nil || len(*calls) != 1 {
		t.Errorf("after five minutes: %v, calls %q", err, *calls)
	}
	check.NoError(t, end())
	check.Until(t, "nvidia-smi has ended", func() bool { return r.Restore(soon(t), target.GPU) == nil })
	if r.Lock.file != nil || !r.Lock.foreign.IsZero() {
		t.Errorf("the lock is kept: %+v", r.Lock)
	}
}

// Two processes that had the lock one after the other are not one that hangs: the five minutes count anew for each.
func TestLockOfAnotherProcessLater(t *testing.T) {
	dir := t.TempDir()
	other, own := NewLock(dir), NewLock(dir)
	for range 2 {
		release, err := other.Hold(t.Context())
		check.NoError(t, err)
		if _, err := own.Hold(soon(t)); !isBusy(err) {
			t.Errorf("%v", err)
		}
		own.foreign = own.foreign.Add(-orphanAtMost) // nothing asks for the lock meanwhile
		release()
	}
}

// One process holds the lock several times. A process that could not be killed keeps it.
func TestLockOfAProcessThatCannotBeKilled(t *testing.T) {
	l := NewLock(t.TempDir())
	outer, err := l.Hold(t.Context())
	check.NoError(t, err)
	file, inner, err := l.hold(t.Context())
	check.NoError(t, err)
	if _, err := NewLock(filepath.Dir(l.path)).Hold(soon(t)); !isBusy(err) {
		t.Errorf("another process: %v", err)
	}
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{file}
	check.NoError(t, cmd.Start())
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	l.leave()
	inner()
	if _, err := l.Hold(soon(t)); !isBusy(err) {
		t.Errorf("it was left: %v", err)
	}
	outer()
	check.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	release, err := l.Hold(t.Context())
	check.NoError(t, err)
	release()
	release()
	if l.holds != 0 || l.file != nil {
		t.Errorf("%+v", l)
	}
}

// Without a state directory there is no lock. One that can't be made keeps every GPU as it is.
func TestLockThatCannotBeMade(t *testing.T) {
	if release, err := NewLock("").Hold(t.Context()); err != nil {
		t.Error(err)
	} else {
		release()
	}
	r, calls := locked(filepath.Join(t.TempDir(), "none"))
	_, unavailable := errors.AsType[*UnavailableError](r.Restore(t.Context(), "GPU-1"))
	if !unavailable || len(*calls) > 0 {
		t.Errorf("calls %q", *calls)
	}
}
