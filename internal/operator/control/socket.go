package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/httpserver"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

const (
	requestTimeout  = 5 * time.Second        // for one command, from its first byte
	shutdownTimeout = 500 * time.Millisecond // for commands in progress when the agent ends
)

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
	server := httpserver.Socket{
		Path: s.path, Handler: newHandler(a, o), ReadTimeout: requestTimeout, WriteTimeout: 2 * requestTimeout, StopWithin: shutdownTimeout,
		Served: s.setServed, Failed: s.setProblem, Log: o.Log,
	}
	server.Run(ctx)
}

// peer is the client of a request, for the log.
func peer(ctx context.Context) slog.Attr {
	creds, ok := httpserver.Peer(ctx)
	if !ok {
		return slog.String("peer", "unknown")
	}
	return slog.Group("peer", "uid", creds.Uid, "pid", creds.Pid)
}

// Problems has the reason if the socket is not served.
func (s *Socket) Problems() []problem.Problem { return s.problems.List() }

// setProblem sets why the socket is not served. That another process serves it is normal for a moment: while one agent follows another.
func (s *Socket) setProblem(err error) {
	reason, level := strings.ReplaceAll(err.Error(), "\n", "; "), slog.LevelWarn
	if _, inUse := errors.AsType[*httpserver.InUseError](err); inUse {
		reason, level = reason+": give each agent its own state_dir", slog.LevelInfo
	}
	s.problems.Put(problem.Problem{Code: problem.Socket, Object: s.path, Text: "control socket: " + reason}, level, "control socket unavailable", "error", reason)
}

func (s *Socket) setServed() {
	s.problems.End(problem.Socket, s.path, "control socket available", "socket", s.path)
}

// ErrNotRunning means that no process holds the lock of the socket.
var ErrNotRunning = errors.New("no agent is running")

// NotServedError means that the agent runs and does not serve its socket.
type NotServedError struct{ Path string }

// Error names the socket.
func (e *NotServedError) Error() string {
	return fmt.Sprintf("an agent is running and does not serve %s: see its log for the reason; it retries", e.Path)
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
