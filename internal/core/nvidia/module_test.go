package nvidia

import (
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// That the kernel module was unloaded is what the kernel or NVML shows, never that a library is missing.
func TestEvidenceThatTheModuleWasUnloaded(t *testing.T) {
	for _, c := range []struct {
		name   string
		happen func(*simdriver.Machine) error
		before bool // a session was open before
		hidden bool // the kernel shows no module in this container
		want   bool
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
		{name: "it fails", happen: func(m *simdriver.Machine) error { return m.Fail(simdriver.All, "nvmlInit", "UNKNOWN", 1) }, before: true},
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
			if got := errors.Is(err, core.ErrUnloaded); err == nil || got != c.want || got && !errors.Is(err, core.ErrNoDriver) {
				t.Errorf("unloaded: %t, want %t: %v", got, c.want, err)
			}
		})
	}
}

func hideAndUnload(m *simdriver.Machine) error { return errors.Join(m.Hide(), m.Unload()) }

// notLoaded is what NVML answers where /dev/nvidiactl is missing.
func notLoaded(m *simdriver.Machine) error {
	return m.Fail(simdriver.All, "nvmlInit", "DRIVER_NOT_LOADED", 1)
}
