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
	requestTimeout  = 5 * time.Second        // for one command, from its first byte
	shutdownTimeout = 500 * time.Millisecond // for commands in progress when the agent ends
	checkInterval   = 5 * time.Second        // between checks that the socket file still exists
)

// serve serves the socket until ctx ends, and then removes it. It replaces a socket on which no process listens. It fails
// with errSocketGone if the file was removed or replaced. The caller holds the agent's lock.
func (s *Socket) serve(ctx context.Context, handler http.Handler, log *slog.Logger) error {
	listener, err := listen(ctx, s.path)
	if err != nil {
		return err
	}
	own, err := os.Lstat(s.path)
	if err != nil {
		return errors.Join(errSocketGone, listener.Close())
	}
	defer func() {
		if sameFile(own, s.path) {
			_ = os.Remove(s.path) // if it stays, the next agent replaces it
		}
	}()
	server := &http.Server{
		Handler:     handler,
		ReadTimeout: requestTimeout, WriteTimeout: 2 * requestTimeout, MaxHeaderBytes: 8 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: withPeer,
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	s.setServed()
	check := time.NewTicker(checkInterval)
	defer check.Stop()
	for gone := false; !gone && ctx.Err() == nil; {
		select {
		case err := <-ended:
			return errors.Join(err, server.Close())
		case <-check.C:
			gone = !sameFile(own, s.path)
		case <-ctx.Done():
		}
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if server.Shutdown(stopping) != nil {
		_ = server.Close() // the remaining connections have sent no complete request
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	if ctx.Err() == nil {
		return errSocketGone
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
