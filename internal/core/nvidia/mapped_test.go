package nvidia

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The drivers of these scenes: the one that the machine comes with, and its successor.
const older, newer = "550.163.01", "580.95.05"

func init() {
	scenes["upgrade"] = upgradeScene
	scenes["module alone"] = moduleScene
	scenes["module late"] = lateScene
	scenes["no library"] = noLibraryScene
	scenes["in a session"] = sessionScene
	scenes["by name"] = byNameScene
	scenes["other folder"] = otherFolderScene
	scenes["bound"] = boundScene
	scenes["works"] = worksScene
}

// TestExitOnlyWhereItHelps plays each way in which library and kernel module can part.
func TestExitOnlyWhereItHelps(t *testing.T) {
	for scene := range scenes {
		if scene == "use all" || scene == "works" || strings.HasPrefix(scene, "linker") {
			continue
		}
		t.Run(scene, func(t *testing.T) {
			t.Parallel()
			m := install(t, "t4")
			out, err := play(t, m.Root, scene, "LD_LIBRARY_PATH="+filepath.Dir(m.Library))
			if err != nil {
				t.Fatal(out)
			}
			// A new process is what the old one asked for.
			if out, err := play(t, m.Root, "works"); err != nil && scene != "bound" {
				t.Error("a new process:", out)
			}
		})
	}
}

func worksScene(m *simdriver.Machine) error { return opening(m, m.Root, opens) }

// The package first, the module after it: nothing happens until the module is another one.
func upgradeScene(m *simdriver.Machine) error {
	open := func(want outcome, says ...string) func() error {
		return func() error { return opening(m, m.Root, want, says...) }
	}
	return steps(
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

// A module of another version and the library that was always there: a new process would have the same.
func moduleScene(m *simdriver.Machine) error {
	open := func(want outcome, says ...string) func() error {
		return func() error { return opening(m, m.Root, want, says...) }
	}
	return steps(
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

// The process came between the package and the module: it has the new library already.
func lateScene(m *simdriver.Machine) error {
	return steps(
		func() error { return m.ReplaceLibrary(newer) },
		func() error { return opening(m, m.Root, fails, "library "+newer, "kernel module "+older) },
		func() error { return m.SetModule(newer) },
		func() error { return opening(m, m.Root, opens) },
	)
}

// Nothing was mapped when the library came, whichever it is; one that goes and comes back is the same.
func noLibraryScene(m *simdriver.Machine) error {
	open := func(want outcome) func() error { return func() error { return opening(m, m.Root, want) } }
	return steps(
		m.Hide, open(absent),
		func() error { return m.SetDriver(newer) }, open(opens),
		m.Hide, open(absent),
		m.Unhide, open(opens),
	)
}

// The code may come from any call, and then too the file on disk decides.
func sessionScene(m *simdriver.Machine) error {
	s, err := Open(Options{Roots: roots(m)})
	if err != nil {
		return err
	}
	if _, err := s.Snapshot(); err != nil {
		return err
	}
	asks := func(want error) error {
		_, snapErr := s.Snapshot()
		_, probeErr := s.Probe()
		_, usageErr := s.Usage()
		for _, err := range []error{snapErr, probeErr, usageErr} {
			if !errors.Is(err, want) || errors.Is(err, core.ErrDriverLost) && errors.Is(err, core.ErrDriverStale) {
				return fmt.Errorf("%w, want %w", err, want)
			}
		}
		return nil
	}
	return steps(
		func() error { return m.Fail(simdriver.All, "nvmlDevice*", "LIB_RM_VERSION_MISMATCH", simdriver.Always) },
		func() error { return asks(core.ErrDriverLost) },
		m.Hide,
		func() error { return asks(core.ErrDriverLost) },
		func() error { return m.ReplaceLibrary(older) },
		func() error { return asks(core.ErrDriverStale) },
		func() error { return m.Heal() },
		s.Close,
	)
}

// On the dynamic linker's path it is the file of the same folder that counts.
func byNameScene(m *simdriver.Machine) error {
	open := func(want outcome) func() error { return func() error { return opening(m, "", want) } }
	return steps(
		open(opens),
		func() error { return m.SetModule(newer) },
		open(fails),
		m.Hide, open(absent), m.Unhide,
		func() error { return m.ReplaceLibrary(newer) },
		open(exits),
	)
}

// Another library in a folder that is looked at first: what runs, and what is asked what it has, stays the
// mapped one, which lacks a function that the new one has.
func otherFolderScene(m *simdriver.Machine) error {
	library, err := os.ReadFile(m.Library)
	if err != nil {
		return err
	}
	first := filepath.Join(m.Root, libraryFolders[0], libraryName)
	if err := os.MkdirAll(filepath.Dir(first), 0o755); err != nil {
		return err
	}
	without := bytes.ReplaceAll(library, []byte("\x00"+lacked+"\x00"), []byte("\x00x"+lacked[1:]+"\x00"))
	has := func(want bool) func() error {
		return func() error {
			l, err := takeLibrary(m.Root)
			maps, _ := os.ReadFile("/proc/self/maps")
			if err != nil || l.have[lacked] != want || bytes.Contains(maps, []byte(first)) {
				return fmt.Errorf("has it: %t, want %t; %w\n%s", l.have[lacked], want, err, maps)
			}
			return nil
		}
	}
	return steps(
		func() error { return os.Remove(m.Library) },
		func() error { return os.WriteFile(m.Library, without, 0o755) },
		func() error { return opening(m, m.Root, opens) },
		has(false),
		func() error { return os.WriteFile(first, library, 0o755) },
		func() error { return opening(m, m.Root, opens) },
		has(false),
		func() error { return m.SetModule(newer) },
		func() error { return opening(m, m.Root, exits, "library on disk "+first) },
		func() error { return m.SetModule(older) },
		func() error { return opening(m, m.Root, opens) },
	)
}

// A file that was bound into a container stays there when it is removed outside: it has no link then. A link
// to an open descriptor shows such a file without a mount.
func boundScene(m *simdriver.Machine) error {
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
	return steps(
		func() error { return os.Remove(m.Library) },
		func() error { return os.Symlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), m.Library) },
		func() error { return m.SetModule(newer) },
		func() error { return opening(m, m.Root, fails) },
		func() error { return os.Remove(outside) },
		func() error { return opening(m, m.Root, exits) },
	)
}

func TestVersionOnDisk(t *testing.T) {
	dir := t.TempDir()
	real := filepath.Join(dir, "libnvidia-ml.so."+newer)
	link := filepath.Join(dir, libraryName)
	must(t, os.WriteFile(real, nil, 0o644), os.Symlink(real, link))
	if got := diskOf(link); got.version() != newer || got.file != diskOf(real).file {
		t.Errorf("%+v is of version %s", got, got.version())
	}
	must(t, os.Remove(link), os.Rename(real, link))
	if got := diskOf(link).version(); got != link {
		t.Errorf("a name without a version: %s", got)
	}
	if d := diskOf(dir); d != (disk{}) {
		t.Errorf("a folder: %+v", d)
	}
}
