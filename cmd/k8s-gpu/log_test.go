package main

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A log that nobody reads keeps nobody: no GPU that is lost, no answer and no end. Nor does the end of who read it.
func TestNobodyReadsTheLog(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(*testing.T, *os.File, *os.File){
		"full": func(t *testing.T, _, in *os.File) {
			raw, err := in.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var full error
			err = raw.Write(func(fd uintptr) bool {
				for full == nil {
					_, full = syscall.Write(int(fd), make([]byte, 4096))
				}
				return true
			})
			if err != nil || !errors.Is(full, syscall.EAGAIN) {
				t.Fatal(err, full)
			}
		},
		"closed": func(_ *testing.T, out, _ *os.File) { _ = out.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			m, k, dir := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t)
			out, in, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _, _ = in.Close(), out.Close() })
			leave(t, out, in)
			a := startOn(t, in, append(on(m.Root, k), "--http-address=", "--state-dir="+dir, "--health-period=200ms", "--log-level=debug")...)
			a.awaitHealthy(k, 8)
			if err := m.Lose(5); err != nil {
				t.Fatal(err)
			}
			a.awaitHealthy(k, 7)
			if _, err := k.Allocate(a.ctx, gpuResource, m.UUID(0)); err != nil {
				t.Error(err)
			}
			a.signal(syscall.SIGHUP)
			a.endsWith(syscall.SIGTERM, k, dir, false)
		})
	}
}

// A line that nobody waits for is written all the same: a verb's last words are its error.
func TestLastWordsAreWritten(t *testing.T) {
	for range 20 {
		out, err := exec.CommandContext(t.Context(), binary(t), "--rescan=soon").CombinedOutput()
		if want := "k8s-gpu: --rescan = \"soon\": want a positive duration such as 30s or 1m\n"; err == nil || string(out) != want {
			t.Fatalf("%v: %q, want %q", err, out, want)
		}
	}
}
