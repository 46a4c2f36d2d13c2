package httpserver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	minSocketRetry = 500 * time.Millisecond // short: after an orchestrator has started a new process the previous one ends soon
	maxSocketRetry = 5 * time.Second
	stableFor      = time.Minute     // after which the next failure is retried from minSocketRetry
	checkInterval  = 5 * time.Second // between checks that the socket file still exists
)

// ErrSocketGone is that clients can no longer reach a socket. It is made again.
var ErrSocketGone = errors.New("the socket was removed or replaced")

// InUseError means that another process serves a socket.
type InUseError struct{ Path string }

// Error names the socket.
func (e *InUseError) Error() string { return "another process serves " + e.Path }

// Socket serves HTTP on a socket in the file system, which only the user of the process can open. Beside it is a lock file that is locked as long as the
// process runs.
type Socket struct {
	Path    string
	Handler http.Handler

	ReadTimeout, WriteTimeout time.Duration
	StopWithin                time.Duration // for requests in progress at the end

	Served func()      // called when the socket is served
	Failed func(error) // called when it is not, before it is tried again; *InUseError = another process has it
	Log    *slog.Logger
}

// Run serves the socket until ctx ends, and then removes it. A failure is retried with exponential back-off.
func (s *Socket) Run(ctx context.Context) {
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = minSocketRetry, maxSocketRetry
	var lock *os.File
	defer func() { filelock.Release(lock, LockPath(s.Path)) }()
	for {
		began := time.Now()
		var err error
		if lock, err = acquireLock(lock, s.Path); err == nil {
			err = s.serve(ctx)
		}
		if ctx.Err() != nil {
			return
		}
		s.Failed(err)
		if time.Since(began) > stableFor { // it was served
			retry.Reset()
		}
		if !watch.Sleep(ctx, retry.NextBackOff()) {
			return
		}
	}
}

// LockPath is the lock file of a socket.
func LockPath(socket string) string { return socket + ".lock" }

// acquireLock locks the lock file of a socket, unless held is that lock. It fails with *InUseError if another process has it.
func acquireLock(held *os.File, socket string) (*os.File, error) {
	path := LockPath(socket)
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

// serve serves the socket until ctx ends, and then removes it. It replaces a socket on which no process listens. It fails with ErrSocketGone if the file
// was removed or replaced. The process holds the lock.
func (s *Socket) serve(ctx context.Context) error {
	listener, err := listen(ctx, s.Path)
	if err != nil {
		return err
	}
	own, err := os.Lstat(s.Path)
	if err != nil {
		return errors.Join(ErrSocketGone, listener.Close())
	}
	defer func() {
		if sameFile(own, s.Path) {
			_ = os.Remove(s.Path) // if it stays, the next process replaces it
		}
	}()
	server := &http.Server{
		Handler:     s.Handler,
		ReadTimeout: s.ReadTimeout, WriteTimeout: s.WriteTimeout, MaxHeaderBytes: maxHeaderBytes,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: withPeer,
		ErrorLog:    slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	s.Served()
	check := time.NewTicker(checkInterval)
	defer check.Stop()
	for gone := false; !gone && ctx.Err() == nil; {
		select {
		case err := <-ended:
			return errors.Join(err, server.Close())
		case <-check.C:
			gone = !sameFile(own, s.Path)
		case <-ctx.Done():
		}
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.StopWithin)
	defer cancel()
	if server.Shutdown(stopping) != nil {
		_ = server.Close() // the remaining connections have sent no complete request
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	if ctx.Err() == nil {
		return ErrSocketGone
	}
	return nil
}

// sameFile reports whether the file at path is the given one. A new file may get the inode number of a removed one, so
// the modification times are compared too.
func sameFile(own fs.FileInfo, path string) bool {
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(own, now) && own.ModTime().Equal(now.ModTime())
}

// listen creates the socket with mode 0600.
func listen(ctx context.Context, path string) (net.Listener, error) {
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	// bind(2) creates the file with the mode of the socket.
	private := func(_, _ string, c syscall.RawConn) error {
		var chmodErr error
		err := c.Control(func(fd uintptr) { chmodErr = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmodErr)
	}
	listener, err := (&net.ListenConfig{Control: private}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if unix, ok := listener.(*net.UnixListener); ok {
		unix.SetUnlinkOnClose(false) // the file may be another one by then
	}
	return listener, nil
}

// removeStale removes a socket on which no process listens. It fails with *InUseError if one does.
func removeStale(ctx context.Context, path string) error {
	file, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case file.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s exists and is not a socket: remove it", path)
	}
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(&InUseError{path}, conn.Close())
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return os.Remove(path)
}

// peerKey is the context key of a client's credentials.
type peerKey struct{}

// withPeer adds the credentials of the client to the context of its connection (unix(7): SO_PEERCRED).
func withPeer(ctx context.Context, c net.Conn) context.Context {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return ctx
	}
	var creds *syscall.Ucred
	get := func(fd uintptr) { creds, _ = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED) }
	if raw.Control(get) != nil || creds == nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, *creds)
}

// Peer returns the credentials of the client of a request on a Socket.
func Peer(ctx context.Context) (syscall.Ucred, bool) {
	creds, ok := ctx.Value(peerKey{}).(syscall.Ucred)
	return creds, ok
}
