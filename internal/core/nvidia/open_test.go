package nvidia

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

var functionScenarios = map[string]func(*child){
	"open":    func(c *child) { c.open(opens) },
	"use all": useAll,
	"limits":  useLimits,
}

// useLimits prints why there are no limits of memory.
func useLimits(c *child) {
	s, err := Open(Options{Roots: roots(c.Machine)})
	c.check(err)
	snap, err := s.Snapshot()
	c.check(err)
	answers, err := s.MemoryLimits([]gpu.LimitQuery{{GPU: snap.Devices[0].ID, Group: "/"}})
	c.check(err)
	fmt.Println("limits:", s.LimitsUnsupported(), answers[0].State == gpu.NoLimit)
	c.check(s.Close())
}

// useAll makes every call about a machine and prints the result.
func useAll(c *child) {
	s, err := Open(Options{Roots: roots(c.Machine), Processes: true})
	c.check(err)
	snap, err := s.Snapshot()
	c.check(err)
	for _, e := range snap.Excluded {
		fmt.Println("excluded", e.Index, e.Reason)
	}
	_, probeErr := s.Probe()
	_, usageErr := s.Usage()
	_, waitErr := s.Wait(0)
	c.check(probeErr, usageErr, waitErr, c.XID(5, 94, simdriver.At{GI: 9, CI: 0}))
	obs, err := s.Wait(0)
	for _, o := range obs {
		fmt.Println("event", o.At.GI == 9, o.At.GI == gpu.Whole)
	}
	c.check(err)
	fmt.Println("devices", len(snap.Devices))
	c.check(s.Close())
}

// useWithout runs useAll with a library that lacks functions.
func useWithout(t *testing.T, names ...string) (output string, err error) {
	t.Helper()
	return runScenario(t, install(t, "a100-mig", names...).Root, "use all")
}

// If any one function is missing, Open succeeds, or its error names the function; the process never ends.
func TestEachFunctionMissing(t *testing.T) {
	if testing.Short() {
		t.Skip("a process per function")
	}
	identity := []string{"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetMigDeviceHandleByIndex"}
	for _, call := range allCalls() {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			out, err := useWithout(t, functionsOf(call)...)
			switch {
			case slices.Contains(mandatory, call):
				if err == nil || !strings.Contains(out, "lacks "+call) {
					t.Errorf("%v: %s", err, out)
				}
			case err != nil:
				t.Errorf("%v: %s", err, out)
			case slices.Contains(identity, call):
				if !strings.Contains(out, "excluded 5 "+call+": not in this driver") {
					t.Error(out)
				}
			case call == "nvmlDeviceGetMigMode", call == "nvmlDeviceGetMaxMigDeviceCount":
				if !strings.Contains(out, "devices 8\n") {
					t.Error(out)
				}
			case !strings.Contains(out, "devices 20\n"):
				t.Error(out)
			}
		})
	}
}

// With the mandatory functions only, eight GPUs are read.
func TestOldestDriver(t *testing.T) {
	var names []string
	for _, call := range allCalls() {
		versions := functionsOf(call)
		if !slices.Contains(mandatory, call) {
			names = append(names, versions...)
		} else if call != "nvmlInit" {
			names = append(names, versions[:len(versions)-1]...) // the oldest version of each remains
		}
	}
	slices.Sort(names)
	out, err := useWithout(t, slices.Compact(names)...)
	if err != nil || !strings.Contains(out, "devices 8\n") {
		t.Errorf("%v: %s", err, out)
	}
}

// A driver without one of the functions has no limits of memory, whatever its version is.
func TestLimitsWithoutFunctions(t *testing.T) {
	m := install(t, "t4")
	must(t, m.SetDriver("615.71.09"), m.Without(setLimits))
	out, err := runScenario(t, m.Root, "limits")
	if err != nil || out != "limits: driver 615.71.09 lacks nvmlDeviceSetMemoryLimits_v1: want 615 or newer true\n" {
		t.Errorf("%v: %s", err, out)
	}
}

// The older event wait does not report the MIG instance of an event: it concerns the whole GPU then.
func TestEventsWithoutAttribution(t *testing.T) {
	out, err := useWithout(t, eventWaitV2)
	if err != nil || !strings.Contains(out, "event false true\n") {
		t.Errorf("%v: %s", err, out)
	}
	out, err = useWithout(t)
	if err != nil || !strings.Contains(out, "event true false\n") {
		t.Errorf("with it: %v: %s", err, out)
	}
}

func TestNoLibrary(t *testing.T) {
	root := t.TempDir()
	_, err := Open(Options{Roots: core.Roots{Driver: root}})
	_, again := Open(Options{Roots: core.Roots{Driver: root}})
	if !errors.Is(err, gpu.ErrNoDriver) || err.Error() != again.Error() || strings.Contains(err.Error(), "\n") {
		t.Fatalf("%v, then %v", err, again)
	}
	for _, folder := range libraryFolders {
		if !strings.Contains(err.Error(), filepath.Join(root, folder)) {
			t.Errorf("%v does not list %s", err, folder)
		}
	}
}

// A library that exists and can't be loaded is not gpu.ErrNoDriver, and the error has the reason.
func TestBrokenLibrary(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "lib64", libraryName)
	must(t, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte("not a library"), 0o644))
	_, err := findLibrary(root) // Open uses the library that this process has loaded
	if err == nil || errors.Is(err, gpu.ErrNoDriver) || !strings.Contains(err.Error(), file) || strings.Contains(err.Error(), "\n") {
		t.Error(err)
	}
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

// The errors of Open without a working driver. The kernel or NVML shows that the kernel module was unloaded; a missing library
// does not.
func TestOpenFails(t *testing.T) {
	for _, c := range []struct {
		name   string
		happen func(*simdriver.Machine) error
		before bool // a session was open before
		hidden bool // the kernel shows no module in this container
		want   bool // gpu.ErrUnloaded
		failed bool // not gpu.ErrNoDriver
	}{
		{name: "unloaded", happen: (*simdriver.Machine).Unload, before: true, want: true},
		{name: "not loaded at the start", happen: (*simdriver.Machine).Unload, want: true},
		{name: "unloaded, not visible", happen: (*simdriver.Machine).Unload, before: true, hidden: true, want: true},
		{name: "no library", happen: (*simdriver.Machine).Hide, before: true},
		{name: "no library, not visible", happen: (*simdriver.Machine).Hide, before: true, hidden: true},
		{name: "no library and no module", happen: hideAndUnload, before: true, want: true},
		{name: "no library and no module at the start", happen: hideAndUnload},
		{name: "no library and no module, not visible", happen: hideAndUnload, before: true, hidden: true},
		{name: "a node is missing", happen: notLoaded, before: true},
		{name: "a node is missing, not visible", happen: notLoaded, before: true, hidden: true, want: true},
		{name: "a part of the driver is missing", happen: func(m *simdriver.Machine) error {
			return m.Fail(simdriver.All, "nvmlInit", "LIBRARY_NOT_FOUND", 1)
		}, before: true},
		{name: "nvmlInit fails", happen: func(m *simdriver.Machine) error { return m.Fail(simdriver.All, "nvmlInit", "NO_PERMISSION", 1) }, before: true, failed: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := simdriver.Start(t, "t4")
			r := roots(m)
			if c.hidden {
				r.Sys, r.Proc = t.TempDir(), t.TempDir()
			}
			if c.before {
				s, err := Open(Options{Roots: r})
				must(t, err)
				must(t, s.Close())
			}
			must(t, c.happen(m))
			_, err := Open(Options{Roots: r})
			if err == nil || errors.Is(err, gpu.ErrUnloaded) != c.want || errors.Is(err, gpu.ErrNoDriver) == c.failed || strings.Contains(err.Error(), "\n") {
				t.Errorf("unloaded %t, failed %t: %v", c.want, c.failed, err)
			}
			if e, ok := errors.AsType[*nvmlError](err); c.failed && (!ok || e.Call != "nvmlInit") {
				t.Error(err)
			}
			_ = m.Unhide() // fails if the library was not hidden
			must(t, m.Load())
			must(t, open(t, m).Close())
		})
	}
}

func hideAndUnload(m *simdriver.Machine) error { return errors.Join(m.Hide(), m.Unload()) }

// notLoaded is NVML's answer if /dev/nvidiactl is missing.
func notLoaded(m *simdriver.Machine) error {
	return m.Fail(simdriver.All, "nvmlInit", "DRIVER_NOT_LOADED", 1)
}

func TestDriverFingerprint(t *testing.T) {
	root := t.TempDir()
	roots := core.Roots{Driver: root, Dev: root, Sys: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc")}
	seen := map[string]string{}
	step := func(what string) {
		t.Helper()
		now := DriverFingerprint(roots)
		if before, ok := seen[now]; ok {
			t.Errorf("%s has the fingerprint of %s: %q", what, before, now)
		}
		seen[now] = what
		if again := DriverFingerprint(roots); again != now {
			t.Errorf("%s: %q, then %q", what, now, again)
		}
	}
	put := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
	}
	step("nothing")
	put("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "")
	step("a library")
	put("sys/module/nvidia/version", "570.1\n")
	step("a module")
	put("sys/module/nvidia/version", "580.1\n")
	step("another module")
	put("dev/nvidiactl", "")
	step("its node")
}
