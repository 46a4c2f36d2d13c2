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
	"syscall"
	"time"
)

const (
	requestAtMost = 5 * time.Second        // for one order, from its first byte
	stopAtMost    = 500 * time.Millisecond // for orders under way when the agent ends
	lookEvery     = 2 * time.Second        // between looks whether the socket is still there
)

// serve answers at the socket until ctx ends, and then removes it. It makes the folder if it is missing and takes the
// place of a socket that a dead process left. It fails with errSocketGone if the socket was removed or replaced; the
// agent's lock must be held.
func serve(ctx context.Context, path string, handler http.Handler, o Options, ready func()) error {
	listener, err := listen(ctx, path)
	if err != nil {
		return err
	}
	own, err := os.Lstat(path)
	if err != nil {
		return errors.Join(errSocketGone, listener.Close())
	}
	defer func() {
		if isStill(own, path) {
			_ = os.Remove(path) // if it stays, the next agent replaces it
		}
	}()
	server := &http.Server{
		Handler:     handler,
		ReadTimeout: requestAtMost, WriteTimeout: 2 * requestAtMost, MaxHeaderBytes: 8 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: withPeer,
		ErrorLog:    slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	ready()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for gone := false; !gone && ctx.Err() == nil; {
		select {
		case err := <-ended:
			return errors.Join(err, server.Close())
		case <-look.C:
			gone = !isStill(own, path)
		case <-ctx.Done():
		}
	}
	patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopAtMost)
	defer cancel()
	if server.Shutdown(patient) != nil {
		_ = server.Close() // who is still connected has said nothing
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	if ctx.Err() == nil {
		return errSocketGone
	}
	return nil
}

// isStill reports whether the file at path is the given one. Inode numbers are used again at once, so the time of
// making belongs to it.
func isStill(own fs.FileInfo, path string) bool {
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(own, now) && own.ModTime().Equal(now.ModTime())
}

// listen makes the socket, for the owner alone.
func listen(ctx context.Context, path string) (net.Listener, error) {
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
