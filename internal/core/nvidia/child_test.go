package nvidia

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A process keeps the library that it has loaded first, so a test that depends on the library runs in a process of its own: this
// test binary again, with the name of a scenario.
const (
	childRoot     = "TANDEM_TEST_DRIVER_ROOT"
	childScenario = "TANDEM_TEST_SCENE"
)

// child is such a process, with its machine.
type child struct{ *simdriver.Machine }

func TestMain(m *testing.M) {
	root := os.Getenv(childRoot)
	if root == "" {
		os.Exit(m.Run())
	}
	machine, err := simdriver.Open(root)
	c := &child{machine}
	c.check(err)
	all := maps.Clone(functionScenarios)
	maps.Copy(all, mismatchScenarios)
	maps.Copy(all, linkerScenarios)
	all[os.Getenv(childScenario)](c)
	os.Exit(0)
}

// check ends the process with the line of the caller if there is an error.
func (c *child) check(errs ...error) {
	if err := errors.Join(errs...); err != nil {
		_, _, line, _ := runtime.Caller(1)
		c.fail(line, err)
	}
}

func (c *child) fail(line int, err error) {
	fmt.Printf("line %d: %v\n", line, err)
	os.Exit(1)
}

// runScenario runs a scenario in a process of its own.
func runScenario(t *testing.T, root, scenario string, env ...string) (output string, err error) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self)
	cmd.Env = append(os.Environ(), childRoot+"="+root, childScenario+"="+scenario, "SIMDRIVER_MACHINE="+root)
	cmd.Env = append(cmd.Env, env...)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// install makes a machine for a child process, with a library file of its own that lacks functions.
func install(t *testing.T, name string, missing ...string) *simdriver.Machine {
	t.Helper()
	text, err := simdriver.Text(name)
	must(t, err)
	m, err := simdriver.InstallText(t.Context(), t.TempDir(), text)
	if errors.Is(err, simdriver.ErrNoCompiler) {
		t.Skip("SKIPPED: ", err)
	}
	must(t, err)
	must(t, m.Without(missing...))
	return m
}

// outcome is the result of Open.
type outcome string

const (
	opens  outcome = "opened"
	absent outcome = "no driver"
	exits  outcome = "new process needed"
	fails  outcome = "failed"
)

// open opens the driver twice: the error must be the same both times, and contain texts.
func (c *child) open(want outcome, texts ...string) { c.openAt(c.Root, want, texts...) }

// openAt is open with another driver root, called by a function of a scenario.
func (c *child) openAt(root string, want outcome, texts ...string) {
	var errs [2]string
	for i := range errs {
		r := roots(c.Machine)
		r.Driver = root
		s, err := Open(Options{Roots: r})
		got := opens
		switch {
		case err == nil:
			err = useSession(s)
		case errors.Is(err, gpu.ErrDriverStale):
			got = exits
		case errors.Is(err, gpu.ErrNoDriver):
			got = absent
		case errors.Is(err, gpu.ErrDriverLost):
			got = "driver lost before it was opened"
		default:
			got = fails
		}
		errs[i] = fmt.Sprint(err)
		lacks := func() bool {
			for _, text := range texts {
				if !strings.Contains(errs[i], text) {
					return true
				}
			}
			return false
		}
		if got != want || got == opens && err != nil || lacks() || errs[i] != errs[0] || strings.Contains(errs[i], "\n") {
			_, _, line, _ := runtime.Caller(2)
			c.fail(line, fmt.Errorf("%s: %w, at first %q; want: %s, with %q", got, err, errs[0], want, texts))
		}
	}
}

func useSession(s *Session) error {
	snap, err := s.Snapshot()
	if err == nil && len(snap.Devices) != 1 {
		err = fmt.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	_, probeErr := s.Probe()
	return errors.Join(err, probeErr, s.Close())
}

// The driver versions of these scenarios: the machine's, and a later one.
const older, newer = "550.163.01", "580.95.05"

// mismatchScenarios are the ways in which library and kernel module can differ.
var mismatchScenarios = map[string]func(*child){
	// The library is replaced first, then the module: Open works until the module is replaced.
	"upgrade": func(c *child) {
		c.open(opens)
		c.check(c.ReplaceLibrary(newer))
		c.open(opens)
		c.check(c.Unload())
		c.open(absent, "the kernel module is not loaded")
		c.check(c.Load())
		c.open(opens)
		c.check(c.SetModule(newer))
		c.open(exits, "library "+older, "kernel module "+newer, "library on disk "+c.Library)
	},
	// The module is replaced and the library is not: a new process would have the same library.
	"module alone": func(c *child) {
		c.check(c.SetModule(newer))
		c.open(fails, "library "+older, "kernel module "+newer, "load the module of the library's version, or reboot")
		c.check(c.SetModule(older))
		c.open(opens)
		c.check(c.SetModule(newer))
		c.open(fails)
		c.check(c.ReplaceLibrary(newer))
		c.open(exits)
	},
	// The process starts after the library was replaced and before the module is: it has the new library.
	"module late": func(c *child) {
		c.check(c.ReplaceLibrary(newer))
		c.open(fails, "library "+newer, "kernel module "+older)
		c.check(c.SetModule(newer))
		c.open(opens)
	},
	// No library was loaded when the first one appears. One that is removed and restored is the same.
	"no library": func(c *child) {
		c.check(c.Hide())
		c.open(absent)
		c.check(c.SetDriver(newer))
		c.open(opens)
		c.check(c.Hide())
		c.open(absent)
		c.check(c.Unhide())
		c.open(opens)
	},
	// Any call may return the code, and the file on disk decides then too.
	"in a session": func(c *child) {
		s, err := Open(Options{Roots: roots(c.Machine)})
		c.check(err)
		_, err = s.Snapshot()
		c.check(err, c.Fail(simdriver.All, "nvmlDevice*", "LIB_RM_VERSION_MISMATCH", simdriver.Always))
		for _, step := range []struct {
			do   func() error
			want error
		}{
			{func() error { return nil }, gpu.ErrDriverLost},
			{c.Hide, gpu.ErrDriverLost},
			{func() error { return c.ReplaceLibrary(older) }, gpu.ErrDriverStale},
		} {
			c.check(step.do())
			_, snapErr := s.Snapshot()
			_, probeErr := s.Probe()
			_, usageErr := s.Usage()
			for _, err := range []error{snapErr, probeErr, usageErr} {
				if !errors.Is(err, step.want) || errors.Is(err, gpu.ErrDriverLost) && errors.Is(err, gpu.ErrDriverStale) {
					c.check(fmt.Errorf("%w, want %w", err, step.want))
				}
			}
		}
		c.check(c.Heal(), s.Close())
	},
	// For a library that the dynamic linker found, the file in the same folder decides.
	"by name": func(c *child) {
		open := func(want outcome) { c.openAt("", want) }
		open(opens)
		c.check(c.SetModule(newer))
		open(fails)
		c.check(c.Hide())
		open(absent)
		c.check(c.Unhide(), c.ReplaceLibrary(newer))
		open(exits)
	},
	"other folder": otherFolderScenario,
	"bound":        boundScenario,
}

// Another library appears in a folder that is searched earlier: calls and lookups still use the loaded one, which lacks a
// function that the new one has.
func otherFolderScenario(c *child) {
	library, err := os.ReadFile(c.Library)
	first := filepath.Join(c.Root, libraryFolders[0], libraryName)
	c.check(err, os.MkdirAll(filepath.Dir(first), 0o755))
	openWithout := func() {
		c.open(opens)
		l, err := loadLibrary(c.Root)
		c.check(err)
		maps, err := os.ReadFile("/proc/self/maps")
		if c.check(err); l.has(removedFunction) || bytes.Contains(maps, []byte(first)) {
			c.check(fmt.Errorf("the new library is used: %s", maps))
		}
	}
	c.check(c.Without(removedFunction))
	openWithout()
	c.check(os.WriteFile(first, library, 0o755))
	openWithout()
	c.check(c.SetModule(newer))
	c.open(exits, "library on disk "+first)
	c.check(c.SetModule(older))
	c.open(opens)
}

// A file that is bind-mounted into a container stays there when it is removed outside: it has no link then. A symbolic link to
// an open descriptor shows such a file without a mount.
func boundScenario(c *child) {
	library, err := os.ReadFile(c.Library)
	outside := filepath.Join(c.Root, "outside.so")
	c.check(err, os.WriteFile(outside, library, 0o755))
	f, err := os.Open(outside)
	c.check(err, os.Remove(c.Library), os.Symlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), c.Library), c.SetModule(newer))
	c.open(fails)
	c.check(os.Remove(outside))
	c.open(exits)
	c.check(f.Close())
}

func TestVersionMismatch(t *testing.T) {
	for scenario := range mismatchScenarios {
		t.Run(scenario, func(t *testing.T) {
			t.Parallel()
			m := install(t, "t4")
			out, err := runScenario(t, m.Root, scenario, "LD_LIBRARY_PATH="+filepath.Dir(m.Library))
			if err != nil {
				t.Fatal(out)
			}
			// A new process works, as the error of the old one promises.
			if out, err := runScenario(t, m.Root, "open"); err != nil && scenario != "bound" {
				t.Error("a new process:", out)
			}
		})
	}
}
