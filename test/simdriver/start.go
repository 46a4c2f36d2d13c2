package simdriver

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
)

// The library that tests of this process load. go-nvml binds NVML's symbols
// once per process, so all tests must load the same file; which machine it
// answers for is read from the environment at every init.
var shared = sync.OnceValues(func() (string, error) { return buildCached(context.Background()) })

// Start installs a machine for one test, points this process at it, and fails
// the test in the end if the library was misused. Load m.Library, or give
// m.Root to a child process. Tests that use it cannot run in parallel.
func Start(t testing.TB, nameOrFile string) *Machine {
	t.Helper()
	return StartText(t, textOf(t, nameOrFile))
}

// StartParallel is Start for a test that gives m.Root to child processes only: it can run in parallel with others. The library is a file of the
// machine, also where another file system has the build cache, so that a process finds the machine by the library's path alone.
func StartParallel(t testing.TB, nameOrFile string) *Machine {
	t.Helper()
	return install(t, textOf(t, nameOrFile))
}

func textOf(t testing.TB, nameOrFile string) string {
	t.Helper()
	text, err := Text(nameOrFile)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// StartText is Start for a machine.conf given as text.
func StartText(t testing.TB, text string) *Machine {
	t.Helper()
	m := install(t, text)
	library, err := shared()
	if err == nil {
		err = m.share(library)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("SIMDRIVER_MACHINE", m.Root)
	return m
}

func install(t testing.TB, text string) *Machine {
	t.Helper()
	m, err := installAny(t.Context(), t.TempDir(), text)
	if errors.Is(err, ErrNoCompiler) {
		t.Skip("SKIPPED: the simulated driver needs a C compiler: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.memacct.end)
	t.Cleanup(func() {
		violations, err := m.Violations()
		if err != nil {
			t.Error(err)
		}
		for _, v := range violations {
			t.Errorf("NVML misused: %s", v)
		}
	})
	return m
}

// share makes the machine's library the file that this process has mapped: by a symbolic link, where the
// build cache is on another file system and the installed one is a copy.
func (m *Machine) share(library string) error {
	m.Library = library
	mapped, err := os.Stat(library)
	if err != nil {
		return err
	}
	if installed, err := os.Stat(m.libraryPath()); err != nil || os.SameFile(mapped, installed) {
		return err
	}
	if err := os.Remove(m.libraryPath()); err != nil {
		return err
	}
	return os.Symlink(library, m.libraryPath())
}
