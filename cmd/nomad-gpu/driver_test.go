package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func install(t testing.TB, machine string) *simdriver.Machine {
	t.Helper()
	m, err := simdriver.Install(t.Context(), t.TempDir(), machine)
	if err != nil {
		t.Skip("SKIPPED: no simulated driver: ", err)
	}
	return m
}

// keys is the config block for a simulated machine. What is kept is kept in dir.
func keys(m *simdriver.Machine, dir string) map[string]any {
	return map[string]any{
		"driver_root": m.Root,
		"sysfs_root":  filepath.Join(m.Root, "sys"),
		"procfs_root": filepath.Join(m.Root, "proc"),
		"state_dir":   dir,
		"kernel_log":  "off",
	}
}

// shortDir is a folder of the test's own; t.TempDir's path can be longer than a socket's may be.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ng")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func inspectArgs(m *simdriver.Machine, more ...string) []string {
	return append([]string{
		"inspect", "--state-dir=", "--driver-root", m.Root,
		"--sysfs-root", filepath.Join(m.Root, "sys"), "--procfs-root", filepath.Join(m.Root, "proc"),
	}, more...)
}
