package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/report"
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

func flags(m *simdriver.Machine, more ...string) []string {
	return append([]string{
		"inspect", "--state-dir=", "--driver-root", m.Root,
		"--sysfs-root", filepath.Join(m.Root, "sys"), "--procfs-root", filepath.Join(m.Root, "proc"),
	}, more...)
}

func TestInspect(t *testing.T) {
	t.Parallel()
	m := install(t, "h100x8")
	if err := m.Fail(simdriver.GPU(3), "*", "UNKNOWN", 0); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(binary, flags(m, "--json")...).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got report.Report
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got.Driver.State != "ready" || len(got.Devices) != 7 || len(got.Excluded) != 1 {
		t.Fatalf("got %+v, want 7 devices and 1 exclusion", got)
	}
	if e := got.Excluded[0]; e.Index != 3 || e.Reason == "" {
		t.Errorf("excluded: %+v", e)
	}
	for _, d := range got.Devices {
		if !d.Schedulable || d.MemoryBytes == 0 || d.Model == "" || d.NUMANode < 0 {
			t.Errorf("%+v", d)
		}
		if _, err := os.Stat(filepath.Join(m.Root, "sys/bus/pci/devices", string(d.PCI))); err != nil {
			t.Error(err)
		}
	}
	table, err := exec.Command(binary, flags(m)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"driver ready ", string(got.Devices[6].ID), "excluded: ", got.Excluded[0].Reason} {
		if !strings.Contains(string(table), want) {
			t.Errorf("%q is not in\n%s", want, table)
		}
	}
}
