package control_test

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Any local user can open a directory of mode 0755 and lock it. The socket is created nevertheless.
func TestLockOnTheStateDirectoryDoesNotPreventTheSocket(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	stateDir, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stateDir.Close() }()
	if err := errors.Join(os.Chmod(dir, 0o755), syscall.Flock(int(stateDir.Fd()), syscall.LOCK_EX)); err != nil {
		t.Fatal(err)
	}
	path := serveAt(t, dir, newAgent())
	await(t, "a report", func() bool { return answers(t, path) })
	file, err := os.Stat(path + ".lock")
	if err != nil || file.Mode() != 0o600 {
		t.Errorf("the lock file, which only its owner may open, has mode %v, %v", file.Mode(), err)
	}
}

// serveAt serves a socket in a directory until the test ends.
func serveAt(t *testing.T, dir string, a control.Agent) (path string) {
	t.Helper()
	path = control.Path(dir, "k8s-gpu")
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait) // after the context of the test has ended
	serving.Go(func() { control.NewSocket(path).Serve(t.Context(), a, quiet()) })
	return path
}

func newAgent() control.Agent {
	return monitor.New(coretest.NewMachine(coretest.GPUs(1)).Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), nil)
}

func answers(t *testing.T, path string) bool {
	t.Helper()
	_, err := control.Dial(path).Report(t.Context())
	return err == nil
}

func TestRemovedSocketIsCreatedAgain(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	if err := os.Remove(r.path); err != nil {
		t.Fatal(err)
	}
	r.await("a report at a new socket", func() bool { return answers(t, r.path) })
	if err := os.RemoveAll(filepath.Dir(r.path)); err != nil { // with the lock file
		t.Fatal(err)
	}
	r.await("a report in a new directory", func() bool { return answers(t, r.path) })
	r.await("no warning", func() bool { return len(r.socket.Warnings()) == 0 })
}

// A socket at the agent's path on which no process listens is replaced.
func TestReplacedSocketIsCreatedAgain(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	other, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.path + ".new", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	other.SetUnlinkOnClose(false)
	if err := errors.Join(other.Close(), os.Rename(r.path+".new", r.path)); err != nil {
		t.Fatal(err)
	}
	r.await("a report", func() bool { return answers(t, r.path) })
}

// A client gets an error while the agent can not create its socket; the agent retries.
func TestSocketIsCreatedWhenItsPathIsFree(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	inTheWay := control.Path(dir, "k8s-gpu")
	if err := os.Mkdir(inTheWay, 0o755); err != nil {
		t.Fatal(err)
	}
	path := serveAt(t, dir, newAgent())
	await(t, "the lock of the running agent", func() bool {
		_, err := os.Stat(path + ".lock")
		return err == nil
	})
	var unserved *control.NotServedError
	if _, err := control.Dial(path).Report(t.Context()); !errors.As(err, &unserved) || !strings.Contains(err.Error(), "an agent is running") {
		t.Errorf("an agent without a socket: %v", err)
	}
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	await(t, "a report", func() bool { return answers(t, path) })
}
