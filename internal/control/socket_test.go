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

// Any local user can open a folder of mode 0755, and lock it for ever. The socket is made all the same.
func TestLockOnTheStateFolderKeepsNoSocketAway(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	folder, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = folder.Close() }()
	if err := errors.Join(os.Chmod(dir, 0o755), syscall.Flock(int(folder.Fd()), syscall.LOCK_EX)); err != nil {
		t.Fatal(err)
	}
	path := serveAt(t, dir, newAgent())
	await(t, "an answer", func() bool { return answers(t, path) })
	file, err := os.Stat(path + ".lock")
	if err != nil || file.Mode() != 0o600 {
		t.Errorf("the lock file, which nobody else may open, has mode %v, %v", file.Mode(), err)
	}
}

// serveAt serves a socket in a folder for as long as the test lasts.
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

func TestRemovedSocketIsMadeAgain(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	if err := os.Remove(r.path); err != nil {
		t.Fatal(err)
	}
	r.await("an answer at a new socket", func() bool { return answers(t, r.path) })
	if err := os.RemoveAll(filepath.Dir(r.path)); err != nil { // with the lock file
		t.Fatal(err)
	}
	r.await("an answer in a new folder", func() bool { return answers(t, r.path) })
	r.await("no note any more", func() bool { return len(r.socket.Warnings()) == 0 })
}

// A socket in the place of the agent's, behind which nothing listens, is replaced.
func TestReplacedSocketIsMadeAgain(t *testing.T) {
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
	r.await("an answer", func() bool { return answers(t, r.path) })
}

// What keeps an agent from its socket is told to the one who asks it, and tried again.
func TestSocketComesWhenNothingIsInItsWay(t *testing.T) {
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
		t.Errorf("asking an agent that has no socket: %v", err)
	}
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	await(t, "an answer", func() bool { return answers(t, path) })
}
