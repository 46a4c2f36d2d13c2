package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	retryMin  = 500 * time.Millisecond // short: after Nomad has started a new agent the previous one ends soon
	retryMax  = 5 * time.Second
	stableFor = time.Minute // after which the next failure is retried from retryMin
)

// errSocketGone ends serve: clients can no longer reach its socket.
var errSocketGone = errors.New("the control socket was removed or replaced")

// Socket is the control socket of an agent in its state directory. Beside it is a lock file that is locked as long as
// the agent runs. Only the agent's own user can open either:
//
//	<state_dir>/                     0755
//	            <agent>.sock         0600  created again if it is removed
//	            <agent>.sock.lock    0600
//	            <agent>.json         0600  see package checkpoint
//	            agents/              0700  see package ownership
type Socket struct {
	path     string
	problems problemset.Set // why the socket is not served
}

// NewSocket returns the socket at path, see Path. With an empty path Serve does nothing.
func NewSocket(path string) *Socket { return &Socket{path: path} }

// Serve serves the socket until ctx ends. A failure is logged and retried with exponential back-off: the agent works
// without its socket. Call it once.
func (s *Socket) Serve(ctx context.Context, a Agent, o Options) {
	if s.path == "" {
		return
	}
	s.problems.Log = o.Log
	if err := checkPath(s.path); err != nil {
		s.setProblem(err)
		return
	}
	h := newHandler(a, o)
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = retryMin, retryMax
	var lock *os.File
	defer func() { filelock.Release(lock, lockPath(s.path)) }()
	for {
		began := time.Now()
		var err error
		if lock, err = acquireLock(lock, s.path); err == nil {
			err = s.serve(ctx, h, o.Log)
		}
		if ctx.Err() != nil {
			return
		}
		s.setProblem(err)
		if time.Since(began) > stableFor { // it was served
			retry.Reset()
		}
		if !watch.Sleep(ctx, retry.NextBackOff()) {
			return
		}
	}
}

// Problems has the reason if the socket is not served.
func (s *Socket) Problems() []problem.Problem { return s.problems.List() }

// setProblem sets why the socket is not served. That another process serves it is normal for a moment: while one agent follows another.
func (s *Socket) setProblem(err error) {
	reason, level := strings.ReplaceAll(err.Error(), "\n", "; "), slog.LevelWarn
	if _, inUse := errors.AsType[*InUseError](err); inUse {
		level = slog.LevelInfo
	}
	s.problems.Put(problem.Problem{Code: problem.Socket, Object: s.path, Text: "control socket: " + reason}, level, "control socket unavailable", "error", reason)
}

func (s *Socket) setServed() {
	s.problems.End(problem.Socket, s.path, "control socket available", "socket", s.path)
}

func lockPath(socket string) string { return socket + ".lock" }

// acquireLock locks the lock file of a socket, unless held is that lock. It fails with *InUseError if another process has
// it.
func acquireLock(held *os.File, socket string) (*os.File, error) {
	path := lockPath(socket)
	if held != nil && filelock.IsAt(held, path) {
		return held, nil
	}
	filelock.Release(held, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := filelock.Take(path)
	if errors.Is(err, filelock.ErrHeld) {
		return nil, &InUseError{socket}
	}
	return f, err
}

// ErrNotRunning means that no process holds the lock of the socket.
var ErrNotRunning = errors.New("no agent is running")

// NotServedError means that the agent runs and does not serve its socket.
type NotServedError struct{ Path string }

// Error names the socket.
func (e *NotServedError) Error() string {
	return fmt.Sprintf("an agent is running and does not serve %s: see its log for the reason; it retries", e.Path)
}

// InUseError means that another process serves the socket.
type InUseError struct{ Path string }

// Error names the socket and the remedy.
func (e *InUseError) Error() string {
	return fmt.Sprintf("another process serves %s: give each agent its own state_dir", e.Path)
}

// maxPath is the maximal length of a socket's path, in bytes (unix(7): sun_path has 108 with the final NUL).
const maxPath = 107

// Path returns the path of an agent's socket; "" = none, without a state directory.
func Path(stateDir, agent string) string {
	if stateDir == "" {
		return ""
	}
	return filepath.Join(stateDir, agent+".sock")
}

func checkPath(path string) error {
	if len(path) > maxPath {
		return &setting.Error{Key: "state_dir", Value: filepath.Dir(path), Remedy: fmt.Sprintf(
			"the path of the socket in it has %d bytes, want at most %d", len(path), maxPath)}
	}
	return nil
}
