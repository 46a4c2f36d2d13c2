package process

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/test/check"
)

// noPidfd fails as the kernel does before Linux 5.3.
func noPidfd(int) (*os.File, error) { return nil, os.NewSyscallError("pidfd_open", unix.ENOSYS) }

// failingWait opens a file on which each wait fails, as where the runtime's poller does not take it.
func failingWait(pid int) (*os.File, error) {
	f, err := openPidfd(pid)
	if err != nil {
		return nil, err
	}
	return f, f.SetDeadline(time.Now())
}

var openers = map[string]func(int) (*os.File, error){"pidfd": openPidfd, "no pidfd": noPidfd, "failing wait": failingWait}

// role makes this binary, in TestOrphan, the parent of a process that watches its parent, or that process.
const role = "TANDEM_TEST_ROLE"

func TestOrphan(t *testing.T) {
	switch os.Getenv(role) {
	case "parent":
		child := again(t, "child")
		child.Stdout = os.Stdout
		check.NoError(t, child.Run()) // this process is killed meanwhile
	case "child":
		ctx, end := context.WithCancelCause(t.Context())
		parent := os.Getppid()
		fmt.Println("watching")
		watchParent(ctx, parent, openers[os.Getenv("OPENER")], end)
		fmt.Println(context.Cause(ctx))
		os.Exit(0)
	default:
		for name := range openers {
			t.Run(name, func(t *testing.T) { testOrphan(t, name) })
		}
	}
}

// again is this test in a process with another role.
func again(t *testing.T, as string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestOrphan$")
	cmd.Env = append(os.Environ(), role+"="+as)
	cmd.Stderr = os.Stderr
	return cmd
}

func testOrphan(t *testing.T, opener string) {
	t.Setenv("OPENER", opener)
	parent := again(t, "parent")
	out, err := parent.StdoutPipe()
	check.NoError(t, err)
	check.NoError(t, parent.Start())
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "watching" {
		t.Fatalf("%q, %v", lines.Text(), lines.Err())
	}
	time.Sleep(100 * time.Millisecond) // in most runs it waits by then
	check.NoError(t, parent.Process.Kill())
	began := time.Now()
	if !lines.Scan() || lines.Text() != ErrOrphaned.Error() {
		t.Errorf("%q, %v", lines.Text(), lines.Err())
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("noticed after %v", took)
	}
	_ = parent.Wait() // killed
}

// While the parent runs nothing happens, until the context ends.
func TestWatchParentEndsWithItsContext(t *testing.T) {
	for name, open := range openers {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			watchParent(ctx, os.Getppid(), open, func(cause error) { t.Error(cause) })
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				t.Error("it ended before its context")
			}
		})
	}
}

// The parent may have ended, and its number may be that of another process, before it is watched.
func TestParentHasEndedBefore(t *testing.T) {
	other := exec.CommandContext(t.Context(), "sleep", "60")
	check.NoError(t, other.Start())
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
	for name, parent := range map[string]int{"another process": other.Process.Pid, "no process": 1 << 30} {
		t.Run(name, func(t *testing.T) {
			var cause error
			WatchParent(t.Context(), parent, func(err error) { cause = err })
			if !errors.Is(cause, ErrOrphaned) {
				t.Errorf("%v", cause)
			}
		})
	}
}

// The runtime's poller reports the end of a process, so that nothing is checked each second.
func TestEndOfAProcessIsAwaited(t *testing.T) {
	child := exec.CommandContext(t.Context(), "sleep", "60")
	check.NoError(t, child.Start())
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	f, err := openPidfd(child.Process.Pid)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Skip("no pidfd_open here: ", err)
	}
	check.NoError(t, err)
	defer func() { _ = f.Close() }()
	ended := make(chan error, 1)
	go func() { ended <- awaitReadable(t.Context(), f) }()
	select {
	case err := <-ended:
		t.Fatalf("it runs, but: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	check.NoError(t, child.Process.Kill())
	select {
	case err := <-ended:
		check.NoError(t, err)
	case <-time.After(10 * time.Second):
		t.Fatal("its end is not reported")
	}
}

// Two processes differ, and one process is the same each time.
func TestIncarnation(t *testing.T) {
	other := exec.CommandContext(t.Context(), "sleep", "60")
	check.NoError(t, other.Start())
	mine, others := Incarnation(os.Getpid()), Incarnation(other.Process.Pid)
	if mine == "" || others == "" || mine == others || mine != Incarnation(os.Getpid()) {
		t.Errorf("%q, %q", mine, others)
	}
	_ = other.Process.Kill()
	_ = other.Wait() // killed
	if ended := Incarnation(other.Process.Pid); ended != "" {
		t.Errorf("a process that ended has the incarnation %q", ended)
	}
}
