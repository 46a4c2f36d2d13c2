// Package pluginsocket has the sockets on which the kubelet calls its plugins: a file in a folder of the kubelet, which a kubelet that starts
// removes, and which a plugin that is killed leaves there.
package pluginsocket

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// MaxPath is the size of sun_path without its final NUL (unix(7)).
const MaxPath = 107

// PathError means that a path is too long for a socket.
type PathError struct{ Path, Remedy string }

// Error has the path and the remedy.
func (e *PathError) Error() string {
	return fmt.Sprintf("socket path %s has %d bytes, and a socket can have %d: %s", e.Path, len(e.Path), MaxPath, e.Remedy)
}

// Nonce returns a part of a socket's name that no other process has.
func Nonce() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// Socket is a listening socket.
type Socket struct {
	*net.UnixListener
	path   string
	id     statefile.Identity
	closed atomic.Bool
}

// Listen makes a socket. A kubelet that starts may have removed it already: see Present.
func Listen(ctx context.Context, path string) (*Socket, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%T is no unix socket", l), l.Close())
	}
	return &Socket{UnixListener: u, path: path, id: statefile.IdentityOf(path)}, nil
}

// Present reports whether the socket is served, and is still the one at its path. A nil *Socket is not.
func (s *Socket) Present() bool { return s != nil && !s.closed.Load() && s.inPlace() }

func (s *Socket) inPlace() bool {
	return s.id != statefile.Identity{} && statefile.IdentityOf(s.path) == s.id
}

// Close closes the listener and removes the socket, unless another one is in its place. A nil *Socket is closed, as is one after the first
// call.
func (s *Socket) Close() error {
	if s == nil || s.closed.Swap(true) {
		return nil
	}
	s.SetUnlinkOnClose(s.inPlace())
	return s.UnixListener.Close()
}

// RemoveStale removes the sockets of processes that have ended. One that accepts connections belongs to a running process, as during a rolling
// update. Each is tried twice: a socket refuses connections between bind(2) and listen(2).
func RemoveStale(ctx context.Context, pattern string, log *slog.Logger) {
	accepts := func(path string) bool {
		info, err := os.Lstat(path)
		return err != nil || info.Mode().Type() != os.ModeSocket || !errors.Is(Accepts(ctx, path), syscall.ECONNREFUSED)
	}
	paths, _ := filepath.Glob(pattern) // fails on a bad pattern only
	if paths = slices.DeleteFunc(paths, accepts); len(paths) == 0 || !watch.Sleep(ctx, 20*time.Millisecond) {
		return
	}
	for _, path := range slices.DeleteFunc(paths, accepts) {
		if err := os.Remove(path); err != nil {
			log.Warn("stale socket not removed", "error", err)
			continue
		}
		log.Info("stale socket removed", "socket", path)
	}
}

// Accepts is nil if a socket accepts connections.
func Accepts(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// Dial returns a connection to a socket.
func Dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// CallOwn calls the plugin over its own socket, as the kubelet does. served returns the path of the socket; "" = none is served. CallOwn fails if a
// socket that is still served then does not answer.
func CallOwn(ctx context.Context, served func() string, call func(context.Context, grpc.ClientConnInterface) error) error {
	path := served()
	if path == "" {
		return nil
	}
	conn, err := Dial(path)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := call(ctx, conn); err != nil && served() == path {
		return fmt.Errorf("socket %s: %s", filepath.Base(path), status.Convert(err).Message())
	}
	return nil
}
