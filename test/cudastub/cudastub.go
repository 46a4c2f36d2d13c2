// Package cudastub has a CUDA driver for tests: a libcuda.so.1 whose devices compute on the node, with faults on request (library/libcuda.c).
package cudastub

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
)

//go:embed library/libcuda.c
var source string

// Variables that the driver reads.
const (
	Fault      = "STUB_CUDA_FAULT"
	Devices    = "STUB_CUDA_DEVICES"
	Capability = "STUB_CUDA_CAPABILITY"
	Mode       = "STUB_CUDA_MODE"
	Free       = "STUB_CUDA_FREE"
)

// Build compiles the driver into a folder, with more arguments of the compiler, and returns its path. It skips the test where there is no compiler.
func Build(t testing.TB, dir string, arguments ...string) string {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("SKIPPED: no C compiler: ", err)
	}
	text, library := filepath.Join(t.TempDir(), "libcuda.c"), filepath.Join(dir, "libcuda.so.1")
	check.NoError(t, os.WriteFile(text, []byte(source), 0o644))
	args := append([]string{"-O2", "-Wall", "-shared", "-fPIC", "-o", library, text}, arguments...)
	if out, err := exec.CommandContext(t.Context(), "cc", args...).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	return library
}
