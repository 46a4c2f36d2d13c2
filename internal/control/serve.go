package control

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
)

const (
	requestAtMost = 5 * time.Second        // for one order, from its first byte
	stopAtMost    = 500 * time.Millisecond // for orders under way when the agent ends
	lockAtMost    = 5 * time.Second        // another agent holds the folder for the blink of an eye
)

// Serve answers at path until ctx ends, and then removes the socket. It makes the folder if it is missing and
// takes the place of a socket that a dead process left. It fails with *InUseError if a living one has it, with
// *core.ConfigError if the path is too long, or if the folder can't be used: the agent works without.
func Serve(ctx context.Context, path string, a Agent, o Options) error {
	listener, err := listen(ctx, path)
	if err != nil {
		return err
	}
	own, statErr := os.Stat(path)
	defer func() {
		if now, err := os.Stat(path); err == nil && statErr == nil && os.SameFile(own, now) {
			_ = os.Remove(path) // if it stays, the next agent replaces it
		}
	}()
	server := &http.Server{
		Handler:     routes(a, o),
		ReadTimeout: requestAtMost, WriteTimeout: 2 * requestAtMost, MaxHeaderBytes: 8 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: withPeer,
		ErrorLog:    slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return errors.Join(err, server.Close())
	case <-ctx.Done():
	}
	patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopAtMost)
	defer cancel()
	if server.Shutdown(patient) != nil {
		_ = server.Close() // who is still connected has said nothing
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// listen makes the socket, for the owner alone. The folder is locked meanwhile: of two agents that start at
// once, none takes the other's socket for a dead one.
func listen(ctx context.Context, path string) (net.Listener, error) {
	if err := checkPath(path); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	unlock, err := lock(ctx, filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	// The file gets the mode that the socket has when it is bound.
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
		unix.SetUnlinkOnClose(false) // it may not be this one any more
	}
	return listener, nil
}

// removeStale removes a socket behind which there is nobody.
func removeStale(ctx context.Context, path string) error {
	file, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case file.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is in the way: it is no socket", path)
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

// lock holds the folder until unlock is called, or the process ends.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	folder, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lockAtMost)
	defer cancel()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		err := syscall.Flock(int(folder.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = folder.Close() }, nil // which unlocks
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			_ = folder.Close()
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
	}
}

// peerKey is where the context of a request has who sent it.
type peerKey struct{}

// withPeer notes who is at the other end (unix(7): SO_PEERCRED).
func withPeer(ctx context.Context, c net.Conn) context.Context {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return ctx
	}
	var who *syscall.Ucred
	if raw.Control(func(fd uintptr) { who, _ = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED) }) != nil || who == nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, *who)
}

// peer is who sent a request, for the log.
func peer(ctx context.Context) slog.Attr {
	who, ok := ctx.Value(peerKey{}).(syscall.Ucred)
	if !ok {
		return slog.String("by", "unknown")
	}
	return slog.Group("by", "uid", who.Uid, "pid", who.Pid)
}
