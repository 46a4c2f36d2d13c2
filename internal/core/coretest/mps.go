package coretest

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// ShortDir returns a folder whose path leaves room for the name of a socket (unix(7): 107 bytes).
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "short")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// MPSDaemon stands for an MPS control daemon with a pipe directory. Its socket is of the same type as the real one.
func MPSDaemon(t testing.TB, pipe string) *net.UnixListener {
	t.Helper()
	if err := os.MkdirAll(pipe, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(pipe, "control"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}
