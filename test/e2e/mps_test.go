//go:build e2e

package e2e

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// mpsRoot is where the MPS control daemons have their folders.
func mpsRoot() string { return filepath.Join(stateDir(), "mps") }

// mpsDaemon plays the MPS control daemon of a resource: it answers at the socket that NVIDIA's has.
type mpsDaemon struct{ listener net.Listener }

// startMPS starts a daemon where NVIDIA's k8s-device-plugin starts it.
func startMPS(t *testing.T, resource string) *mpsDaemon {
	t.Helper()
	pipe := filepath.Join(mpsRoot(), resource, "pipe")
	control := filepath.Join(pipe, "control")
	for _, dir := range []string{pipe, filepath.Join(mpsRoot(), "shm")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Remove(control) // of one that was killed
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", control)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	d := &mpsDaemon{l}
	t.Cleanup(d.kill)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // killed
			}
			_ = conn.Close()
		}
	}()
	return d
}

// kill leaves the socket behind, as a killed process does. It may be called again.
func (d *mpsDaemon) kill() { _ = d.listener.Close() }
