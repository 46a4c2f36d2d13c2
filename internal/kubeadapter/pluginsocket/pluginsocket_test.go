package pluginsocket_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/pluginsocket"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

func listen(t *testing.T, path string) *pluginsocket.Socket {
	t.Helper()
	s, err := pluginsocket.Listen(t.Context(), path)
	check.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// killed leaves a socket as a process that was killed does.
func killed(t *testing.T, path string) {
	t.Helper()
	s := listen(t, path)
	s.SetUnlinkOnClose(false)
	check.NoError(t, s.UnixListener.Close())
}

// A socket is present until it is closed, and then its file is gone. Closing it again changes nothing.
func TestSocketIsRemovedAtTheEnd(t *testing.T) {
	path := filepath.Join(coretest.ShortDir(t), "a.sock")
	s := listen(t, path)
	if !s.Present() || pluginsocket.Accepts(t.Context(), path) != nil {
		t.Error("it is not served")
	}
	check.NoError(t, s.Close())
	if s.Present() || exists(path) {
		t.Error("it is left")
	}
	other := listen(t, path)
	if check.NoError(t, s.Close()); !other.Present() || s.Present() {
		t.Error("the next socket of that name was touched")
	}
	var none *pluginsocket.Socket
	if check.NoError(t, none.Close()); none.Present() {
		t.Error("none is present")
	}
}

// A socket that was removed or replaced, also by one with the same inode number, is not present, and its end does not touch the other one.
func TestReplacedSocket(t *testing.T) {
	path := filepath.Join(coretest.ShortDir(t), "a.sock")
	for range 20 {
		s := listen(t, path)
		check.NoError(t, os.Remove(path))
		if s.Present() {
			t.Fatal("removed, and present")
		}
		other := listen(t, path)
		if s.Present() || !other.Present() {
			t.Fatalf("replaced: the first is present: %t, the other one: %t", s.Present(), other.Present())
		}
		check.NoError(t, s.Close())
		if !other.Present() || pluginsocket.Accepts(t.Context(), path) != nil {
			t.Fatal("the end of the first has touched the other one")
		}
		check.NoError(t, other.Close())
	}
}

// Only sockets that match and on which no process listens are removed.
func TestRemoveStale(t *testing.T) {
	d := coretest.ShortDir(t)
	var log logbuffer.Buffer
	listen(t, filepath.Join(d, "own-running.sock"))
	killed(t, filepath.Join(d, "own-killed.sock"))
	killed(t, filepath.Join(d, "own-killed2.sock"))
	killed(t, filepath.Join(d, "other.sock"))
	check.NoError(t, os.WriteFile(filepath.Join(d, "own-file.sock"), nil, 0o600))
	pluginsocket.RemoveStale(t.Context(), filepath.Join(d, "own-*.sock"), slog.New(slog.NewTextHandler(&log, nil)))
	left, err := filepath.Glob(filepath.Join(d, "*"))
	check.NoError(t, err)
	for i := range left {
		left[i] = filepath.Base(left[i])
	}
	if !slices.Equal(left, []string{"other.sock", "own-file.sock", "own-running.sock"}) {
		t.Errorf("left: %v", left)
	}
	if n := strings.Count(log.String(), "stale socket removed"); n != 2 {
		t.Errorf("%d lines: %s", n, &log)
	}
}

// A process that has made its socket and does not listen yet is not taken for one that has ended.
func TestStartingProcessKeepsItsSocket(t *testing.T) {
	path := filepath.Join(coretest.ShortDir(t), "own-starting.sock")
	synctest.Test(t, func(t *testing.T) {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		check.NoError(t, err)
		defer func() { _ = syscall.Close(fd) }()
		check.NoError(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}))
		if err := pluginsocket.Accepts(t.Context(), path); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal(err)
		}
		time.AfterFunc(time.Millisecond, func() { check.NoError(t, syscall.Listen(fd, 8)) })
		pluginsocket.RemoveStale(t.Context(), path, slog.New(slog.DiscardHandler))
		if !exists(path) {
			t.Error("removed")
		}
	})
}

// The error of a call over the own socket has its name and the reason. Without a socket, and when it was replaced meanwhile, there is none.
func TestCallOwn(t *testing.T) {
	path, calls := filepath.Join(coretest.ShortDir(t), "a.sock"), 0
	fail := func(context.Context, grpc.ClientConnInterface) error {
		calls++
		return status.Error(codes.Unavailable, "hangs")
	}
	for name, c := range map[string]struct {
		served []string
		want   string
		calls  int
	}{
		"none":     {[]string{""}, "", 0},
		"fails":    {[]string{path, path}, "socket a.sock: hangs", 1},
		"replaced": {[]string{path, ""}, "", 1},
	} {
		calls = 0
		err := pluginsocket.CallOwn(t.Context(), func() string { next := c.served[0]; c.served = c.served[1:]; return next }, fail)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != c.want || calls != c.calls {
			t.Errorf("%s: error %q, %d calls", name, text, calls)
		}
	}
}

func TestNonce(t *testing.T) {
	if a, b := pluginsocket.Nonce(), pluginsocket.Nonce(); a == b || len(a) != 8 {
		t.Errorf("%q, %q", a, b)
	}
}
