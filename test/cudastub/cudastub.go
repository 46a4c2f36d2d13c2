// Package cudastub has a CUDA driver for tests: a libcuda.so.1 whose devices compute on the node, with faults on request (library/libcuda.c).
package cudastub

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

//go:embed library/libcuda.c
var source string

//go:embed library/leak.c
var leak string

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
	work, library := t.TempDir(), filepath.Join(dir, "libcuda.so.1")
	text, symbols := filepath.Join(work, "libcuda.c"), filepath.Join(work, "symbols.map")
	check.NoError(t, os.WriteFile(text, []byte(source), 0o644))
	check.NoError(t, os.WriteFile(symbols, []byte("{ global: cu*; local: *; };\n"), 0o644))
	limits, err := simdriver.LimitSources(t.Context(), work)
	check.NoError(t, err)
	args := append([]string{"-O2", "-Wall", "-Wno-deprecated-declarations", "-shared", "-fPIC", "-Wl,--version-script=" + symbols, "-o", library, text}, append(limits, arguments...)...)
	if out, err := exec.CommandContext(t.Context(), "cc", args...).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	return library
}

// BuildLeak compiles a program that leaks memory of a device (library/leak.c) and returns its path. It skips the test where there is no compiler.
func BuildLeak(t testing.TB, dir string) string {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("SKIPPED: no C compiler: ", err)
	}
	text, program := filepath.Join(t.TempDir(), "leak.c"), filepath.Join(dir, "leak")
	check.NoError(t, os.WriteFile(text, []byte(leak), 0o644))
	if out, err := exec.CommandContext(t.Context(), "cc", "-O2", "-Wall", "-o", program, text, "-ldl").CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	return program
}
