package nvidia

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

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
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
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
