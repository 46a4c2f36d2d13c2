package nvidia

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The driver versions of these scenarios: the machine's, and a later one.
const older, newer = "550.163.01", "580.95.05"

func init() {
	scenarios["upgrade"] = upgradeScenario
	scenarios["module alone"] = moduleScenario
	scenarios["module late"] = lateScenario
	scenarios["no library"] = noLibraryScenario
	scenarios["in a session"] = sessionScenario
	scenarios["by name"] = byNameScenario
	scenarios["other folder"] = otherFolderScenario
	scenarios["bound"] = boundScenario
	scenarios["works"] = worksScenario
}

// TestVersionMismatch runs each way in which library and kernel module can differ.
func TestVersionMismatch(t *testing.T) {
	for scenario := range scenarios {
		if scenario == "use all" || scenario == "works" || strings.HasPrefix(scenario, "linker") {
			continue
		}
		t.Run(scenario, func(t *testing.T) {
			t.Parallel()
			m := install(t, "t4")
			out, err := runScenario(t, m.Root, scenario, "LD_LIBRARY_PATH="+filepath.Dir(m.Library))
			if err != nil {
				t.Fatal(out)
			}
			// A new process works, as the error of the old one promises.
			if out, err := runScenario(t, m.Root, "works"); err != nil && scenario != "bound" {
				t.Error("a new process:", out)
			}
		})
	}
}

func worksScenario(m *simdriver.Machine) error { return tryOpen(m, m.Root, opens) }

// The library is replaced first, then the module: Open works until the module is replaced.
func upgradeScenario(m *simdriver.Machine) error {
	open := func(want outcome, texts ...string) func() error {
		return func() error { return tryOpen(m, m.Root, want, texts...) }
	}
	return runSteps(
		open(opens),
		func() error { return m.ReplaceLibrary(newer) },
		open(opens),
		m.Unload,
		open(absent, "the kernel module is not loaded"),
		m.Load,
		open(opens),
		func() error { return m.SetModule(newer) },
		open(exits, "library "+older, "kernel module "+newer, "library on disk "+m.Library),
	)
}

// The module is replaced and the library is not: a new process would have the same library.
func moduleScenario(m *simdriver.Machine) error {
	open := func(want outcome, texts ...string) func() error {
		return func() error { return tryOpen(m, m.Root, want, texts...) }
	}
	return runSteps(
		func() error { return m.SetModule(newer) },
		open(fails, "library "+older, "kernel module "+newer, "load the module of the library's version, or reboot"),
		func() error { return m.SetModule(older) },
		open(opens),
		func() error { return m.SetModule(newer) },
		open(fails),
		func() error { return m.ReplaceLibrary(newer) },
		open(exits),
	)
}

// The process starts after the library was replaced and before the module is: it has the new library.
func lateScenario(m *simdriver.Machine) error {
	return runSteps(
		func() error { return m.ReplaceLibrary(newer) },
		func() error { return tryOpen(m, m.Root, fails, "library "+newer, "kernel module "+older) },
		func() error { return m.SetModule(newer) },
		func() error { return tryOpen(m, m.Root, opens) },
	)
}

// No library was loaded when the first one appears. One that is removed and restored is the same.
func noLibraryScenario(m *simdriver.Machine) error {
	open := func(want outcome) func() error { return func() error { return tryOpen(m, m.Root, want) } }
	return runSteps(
		m.Hide, open(absent),
		func() error { return m.SetDriver(newer) }, open(opens),
		m.Hide, open(absent),
		m.Unhide, open(opens),
	)
}

// Any call may return the code, and the file on disk decides then too.
func sessionScenario(m *simdriver.Machine) error {
	s, err := Open(Options{Roots: roots(m)})
	if err != nil {
		return err
	}
	if _, err := s.Snapshot(); err != nil {
		return err
	}
	expectError := func(want error) error {
		_, snapErr := s.Snapshot()
		_, probeErr := s.Probe()
		_, usageErr := s.Usage()
		for _, err := range []error{snapErr, probeErr, usageErr} {
			if !errors.Is(err, want) || errors.Is(err, gpu.ErrDriverLost) && errors.Is(err, gpu.ErrDriverStale) {
				return fmt.Errorf("%w, want %w", err, want)
			}
		}
		return nil
	}
	return runSteps(
		func() error { return m.Fail(simdriver.All, "nvmlDevice*", "LIB_RM_VERSION_MISMATCH", simdriver.Always) },
		func() error { return expectError(gpu.ErrDriverLost) },
		m.Hide,
		func() error { return expectError(gpu.ErrDriverLost) },
		func() error { return m.ReplaceLibrary(older) },
		func() error { return expectError(gpu.ErrDriverStale) },
		func() error { return m.Heal() },
		s.Close,
	)
}

// For a library that the dynamic linker found, the file in the same folder decides.
func byNameScenario(m *simdriver.Machine) error {
	open := func(want outcome) func() error { return func() error { return tryOpen(m, "", want) } }
	return runSteps(
		open(opens),
		func() error { return m.SetModule(newer) },
		open(fails),
		m.Hide, open(absent), m.Unhide,
		func() error { return m.ReplaceLibrary(newer) },
		open(exits),
	)
}

// Another library appears in a folder that is searched earlier: calls and lookups still use the loaded one, which lacks a
// function that the new one has.
func otherFolderScenario(m *simdriver.Machine) error {
	library, err := os.ReadFile(m.Library)
	if err != nil {
		return err
	}
	first := filepath.Join(m.Root, libraryFolders[0], libraryName)
	if err := os.MkdirAll(filepath.Dir(first), 0o755); err != nil {
		return err
	}
	without := bytes.ReplaceAll(library, []byte("\x00"+removedFunction+"\x00"), []byte("\x00x"+removedFunction[1:]+"\x00"))
	has := func(want bool) func() error {
		return func() error {
			l, err := loadLibrary(m.Root)
			maps, _ := os.ReadFile("/proc/self/maps")
			if err != nil || l.has(removedFunction) != want || bytes.Contains(maps, []byte(first)) {
				return fmt.Errorf("has it: %t, want %t; %w\n%s", !want, want, err, maps)
			}
			return nil
		}
	}
	return runSteps(
		func() error { return os.Remove(m.Library) },
		func() error { return os.WriteFile(m.Library, without, 0o755) },
		func() error { return tryOpen(m, m.Root, opens) },
		has(false),
		func() error { return os.WriteFile(first, library, 0o755) },
		func() error { return tryOpen(m, m.Root, opens) },
		has(false),
		func() error { return m.SetModule(newer) },
		func() error { return tryOpen(m, m.Root, exits, "library on disk "+first) },
		func() error { return m.SetModule(older) },
		func() error { return tryOpen(m, m.Root, opens) },
	)
}

// A file that is bind-mounted into a container stays there when it is removed outside: it has no link then. A symbolic link to
// an open descriptor shows such a file without a mount.
func boundScenario(m *simdriver.Machine) error {
	library, err := os.ReadFile(m.Library)
	if err != nil {
		return err
	}
	outside := filepath.Join(m.Root, "outside.so")
	if err := os.WriteFile(outside, library, 0o755); err != nil {
		return err
	}
	f, err := os.Open(outside)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return runSteps(
		func() error { return os.Remove(m.Library) },
		func() error { return os.Symlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), m.Library) },
		func() error { return m.SetModule(newer) },
		func() error { return tryOpen(m, m.Root, fails) },
		func() error { return os.Remove(outside) },
		func() error { return tryOpen(m, m.Root, exits) },
	)
}

func TestVersionOnDisk(t *testing.T) {
	dir := t.TempDir()
	real := filepath.Join(dir, "libnvidia-ml.so."+newer)
	link := filepath.Join(dir, libraryName)
	must(t, os.WriteFile(real, nil, 0o644), os.Symlink(real, link))
	if got := statLibrary(link); got.version() != newer || got.id != statLibrary(real).id {
		t.Errorf("%+v is of version %s", got, got.version())
	}
	must(t, os.Remove(link), os.Rename(real, link))
	if got := statLibrary(link).version(); got != link {
		t.Errorf("a name without a version: %s", got)
	}
	if d := statLibrary(dir); d != (libraryFile{}) {
		t.Errorf("a folder: %+v", d)
	}
}
