package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/filelock"
)

const (
	retryFirst = 500 * time.Millisecond // where Nomad has just started an agent, the one before is about to end
	retryMax   = 5 * time.Second
	stableFor  = time.Minute // for which a socket was served, until trouble counts as new
)

// errSocketGone ends the serving of a socket that no client can reach any more.
var errSocketGone = errors.New("the control socket was removed or replaced")

// Socket is the control socket of an agent in its state directory. Beside it is a lock file, locked as long as the
// agent runs. Both are open to the agent's own user only:
//
//	<state_dir>/                     0755
//	            <agent>.sock         0600  made again if it is removed
//	            <agent>.sock.lock    0600
//	            <agent>.json         0600  see package statefile
//	            claims/              0700  see package host
type Socket struct {
	path string

	mu      sync.Mutex
	problem string // why the socket is not served; "" = it is, or not yet tried
}

// NewSocket names a socket: see Path. Without a path there is none.
func NewSocket(path string) *Socket { return &Socket{path: path} }

// Serve answers at the socket until ctx ends. While that can't be done it is tried again, less and less often: the
// agent works without. Call it once.
func (s *Socket) Serve(ctx context.Context, a Agent, o Options) {
	if s.path == "" {
		return
	}
	if err := checkPath(s.path); err != nil {
		s.failed(err, o.Log)
		return
	}
	handler := routes(a, o)
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = retryFirst, retryMax
	var lock *os.File
	defer func() { filelock.Release(lock, lockPath(s.path)) }()
	for {
		var served time.Time
		var err error
		if lock, err = hold(lock, s.path); err == nil {
			err = serve(ctx, s.path, handler, o, func() {
				served = time.Now()
				s.working(o.Log)
			})
		}
		if ctx.Err() != nil {
			return
		}
		s.failed(err, o.Log)
		if !served.IsZero() && time.Since(served) > stableFor {
			retry.Reset()
		}
		select {
		case <-time.After(retry.NextBackOff()):
		case <-ctx.Done():
			return
		}
	}
}

// Warnings say in a line why an operator can't reach the agent.
func (s *Socket) Warnings() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problem == "" {
		return nil
	}
	return []string{"control socket: " + s.problem}
}

// failed notes why the socket is not served. It is logged once, until it changes.
func (s *Socket) failed(err error, log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	if text == s.problem {
		return
	}
	s.problem = text
	if _, taken := errors.AsType[*InUseError](err); taken {
		log.Info("no operator can give orders yet", "error", text)
		return
	}
	log.Warn("no operator can give orders", "error", text)
}

func (s *Socket) working(log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problem != "" {
		log.Info("operators can give orders", "socket", s.path)
	}
	s.problem = ""
}

func lockPath(socket string) string { return socket + ".lock" }

// hold takes the lock of a socket, unless it is the one given. It fails with *InUseError if a living process has it.
func hold(have *os.File, socket string) (*os.File, error) {
	path := lockPath(socket)
	if have != nil && filelock.IsAt(have, path) {
		return have, nil
	}
	filelock.Release(have, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := filelock.Take(path)
	if errors.Is(err, filelock.ErrHeld) {
		return nil, &InUseError{socket}
	}
	return f, err
}

// ErrNotRunning says that nobody serves the socket.
var ErrNotRunning = errors.New("no agent is running")

// NotServedError says that an agent is running, and can't be reached.
type NotServedError struct{ Path string }

func (e *NotServedError) Error() string {
	return fmt.Sprintf("an agent is running and does not serve %s: its log says why; it tries again", e.Path)
}

// InUseError says that somebody else serves the socket.
type InUseError struct{ Path string }

func (e *InUseError) Error() string {
	return fmt.Sprintf("another process serves %s: give each agent a state_dir of its own", e.Path)
}

// maxPath is the longest path of a socket, in bytes (unix(7): sun_path, with its NUL).
const maxPath = 107

// Path is where an agent's socket is; "" without a state directory, which means that there is none.
func Path(stateDir, agent string) string {
	if stateDir == "" {
		return ""
	}
	return filepath.Join(stateDir, agent+".sock")
}

func checkPath(path string) error {
	if len(path) > maxPath {
		return &core.ConfigError{Key: "state_dir", Value: filepath.Dir(path), Remedy: fmt.Sprintf(
			"the socket in it would have a path of %d bytes, want at most %d", len(path), maxPath)}
	}
	return nil
}
