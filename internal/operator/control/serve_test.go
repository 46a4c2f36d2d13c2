package control_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

func TestSocketIsPrivateAndRemoved(t *testing.T) {
	before := runtime.NumGoroutine()
	r := start(t, coretest.GPUs(1))
	file, err := os.Stat(r.path)
	if err != nil || file.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("mode %v, %v", file.Mode(), err)
	}
	silent, err := net.Dial("unix", r.path) // a silent client does not delay the shutdown
	check.NoError(t, err)
	began := time.Now()
	r.stop()
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("the shutdown took %v", took)
	}
	check.NoError(t, silent.Close())
	if _, err := os.Stat(r.path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket still exists: %v", err)
	}
	check.Until(t, "the end of all goroutines", func() bool { return runtime.NumGoroutine() <= before })
}

// The socket of a killed process is replaced, that of a running one is not.
func TestStaleSocketIsReplaced(t *testing.T) {
	t.Parallel()
	path := control.Path(coretest.ShortDir(t), "nomad-gpu")
	deadSocket(t, path)
	m := monitor.New(coretest.NewMachine(coretest.GPUs(1)).Open, core.DefaultConfig(), slog.New(slog.DiscardHandler), nil)
	// Of several agents that start together one serves the socket and the others retry.
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	sockets := make([]*control.Socket, 8)
	for i := range sockets {
		sockets[i] = control.NewSocket(path)
		all.Go(func() { sockets[i].Serve(ctx, agentOf{m}, quiet()) })
	}
	check.Until(t, "one server and seven warnings", func() bool {
		waiting := 0
		for _, s := range sockets {
			if strings.Contains(strings.Join(problem.Lines(s.Problems()), " "), "another process serves "+path) {
				waiting++
			}
		}
		_, err := control.Report(t.Context(), path)
		return waiting == len(sockets)-1 && err == nil
	})
	cancel()
	all.Wait()
}

// An agent that ends does not remove a socket that another process has created at its path.
func TestSocketOfAnotherProcessIsNotRemoved(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	check.NoError(t, os.Remove(r.path))
	other, err := net.Listen("unix", r.path)
	check.NoError(t, err)
	r.stop()
	_, err = os.Stat(r.path)
	check.NoError(t, err)
	check.NoError(t, other.Close())
}

func TestSocketThatCannotBeServed(t *testing.T) {
	t.Parallel()
	dir := coretest.ShortDir(t)
	inTheWay := filepath.Join(dir, "file")
	check.NoError(t, os.WriteFile(inTheWay, []byte("mine"), 0o600))
	for name, c := range map[string]struct{ path, want string }{
		"too long":    {control.Path(filepath.Join(dir, strings.Repeat("x", 100)), "k8s-gpu"), "want at most 107"},
		"no socket":   {inTheWay, "is not a socket"},
		"no folder":   {control.Path(inTheWay, "k8s-gpu"), "not a directory"},
		"no such one": {"/proc/none/k8s-gpu.sock", "/proc/none"},
	} {
		t.Run(name, func(t *testing.T) {
			log := &logbuffer.Buffer{}
			o := quiet()
			o.Log = slog.New(slog.NewTextHandler(log, nil))
			socket := control.NewSocket(c.path)
			ctx, cancel := context.WithCancel(t.Context())
			var serving sync.WaitGroup
			serving.Go(func() { socket.Serve(ctx, nil, o) })
			check.Until(t, "the reason", func() bool { return len(problem.Lines(socket.Problems())) > 0 })
			time.Sleep(1500 * time.Millisecond) // for some retries, which log nothing
			cancel()
			serving.Wait()
			if warnings := problem.Lines(socket.Problems()); len(warnings) != 1 || !strings.Contains(warnings[0], c.want) {
				t.Errorf("warnings %q, want %q", warnings, c.want)
			}
			if n := strings.Count(log.String(), "control socket unavailable"); n != 1 {
				t.Errorf("logged %d times:\n%s", n, log)
			}
		})
	}
	if text, err := os.ReadFile(inTheWay); err != nil || string(text) != "mine" {
		t.Errorf("the file is now %q, %v", text, err)
	}
	var wrong *setting.Error
	if _, err := control.Report(t.Context(), control.Path(strings.Repeat("x", 100), "k8s-gpu")); !errors.As(err, &wrong) || wrong.Key != "state_dir" {
		t.Errorf("a path that is too long: %v", err)
	}
}

// Any local user can open a directory of mode 0755 and lock it. The socket is created nevertheless.
func TestLockOnTheStateDirectoryDoesNotPreventTheSocket(t *testing.T) {
	t.Parallel()
	dir := coretest.ShortDir(t)
	stateDir, err := os.Open(dir)
	check.NoError(t, err)
	defer func() { _ = stateDir.Close() }()
	check.NoError(t, os.Chmod(dir, 0o755), syscall.Flock(int(stateDir.Fd()), syscall.LOCK_EX))
	path := serveAt(t, dir, newAgent())
	awaitReport(t, path)
	file, err := os.Stat(path + ".lock")
	if err != nil || file.Mode() != 0o600 {
		t.Errorf("the lock file, which only its owner may open, has mode %v, %v", file.Mode(), err)
	}
}

func TestRemovedSocketIsCreatedAgain(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	check.NoError(t, os.Remove(r.path))
	awaitReport(t, r.path)
	check.NoError(t, os.RemoveAll(filepath.Dir(r.path))) // with the lock file
	awaitReport(t, r.path)
	check.Until(r, "no warning", func() bool { return len(problem.Lines(r.socket.Problems())) == 0 })
}

// A socket at the agent's path on which no process listens is replaced.
func TestReplacedSocketIsCreatedAgain(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(1))
	deadSocket(t, r.path+".new")
	check.NoError(t, os.Rename(r.path+".new", r.path))
	awaitReport(t, r.path)
}

// A client gets an error while the agent can not create its socket; the agent retries.
func TestSocketIsCreatedWhenItsPathIsFree(t *testing.T) {
	t.Parallel()
	dir := coretest.ShortDir(t)
	inTheWay := control.Path(dir, "k8s-gpu")
	check.NoError(t, os.Mkdir(inTheWay, 0o755))
	path := serveAt(t, dir, newAgent())
	check.Until(t, "the error of a client", func() bool {
		_, err := control.Report(t.Context(), path)
		_, unserved := errors.AsType[*control.NotServedError](err)
		return unserved && strings.Contains(err.Error(), "an agent is running")
	})
	check.NoError(t, os.Remove(inTheWay))
	awaitReport(t, path)
}
