package nvidia

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestDriverUnloadedAndLoaded(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := open(t, m)
	snapshot(t, s)
	must(t, m.Unload())
	_, snapErr := s.Snapshot()
	_, probeErr := s.Probe()
	_, usageErr := s.Usage()
	for _, err := range []error{snapErr, probeErr, usageErr} {
		if !errors.Is(err, core.ErrDriverLost) || strings.Contains(err.Error(), "\n") {
			t.Errorf("unloaded: %v", err)
		}
	}
	must(t, s.Close(), s.Close())
	_, err := Open(Options{Roots: roots(m)})
	_, again := Open(Options{Roots: roots(m)})
	if !errors.Is(err, core.ErrNoDriver) || err.Error() != again.Error() {
		t.Errorf("open: %v, then %v", err, again)
	}
	must(t, m.Load())
	if snap := snapshot(t, open(t, m)); len(snap.Devices) != 1 {
		t.Errorf("loaded: %d devices", len(snap.Devices))
	}
}

func TestDriverReplaced(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := open(t, m)
	snapshot(t, s)
	must(t, m.SetDriver("580.95.05"))
	if _, err := s.Snapshot(); !errors.Is(err, core.ErrDriverLost) && !errors.Is(err, core.ErrDriverStale) {
		t.Errorf("snapshot: %v", err)
	}
	must(t, s.Close())
	if _, err := Open(Options{Roots: roots(m)}); !errors.Is(err, core.ErrDriverStale) {
		t.Errorf("open: %v", err)
	}
}

func TestDriverWideCodes(t *testing.T) {
	for code, want := range map[string]error{
		"UNINITIALIZED": core.ErrDriverLost, "DRIVER_NOT_LOADED": core.ErrDriverLost,
		"LIB_RM_VERSION_MISMATCH": core.ErrDriverLost, // the library on disk is the one that this process has
	} {
		for _, call := range []string{
			"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo",
			"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState",
		} {
			m := simdriver.Start(t, "a100-mig")
			s := open(t, m)
			must(t, m.Fail(simdriver.All, call, code, simdriver.Always))
			if _, err := s.Snapshot(); !errors.Is(err, want) || errors.Is(err, core.ErrDriverStale) {
				t.Errorf("%s, %s: %v", call, code, err)
			}
			must(t, s.Close())
		}
	}
	m := simdriver.Start(t, "t4")
	s := open(t, m)
	must(t, m.Fail(simdriver.All, "nvmlDeviceGetCount", "UNKNOWN", simdriver.Always))
	if _, err := s.Snapshot(); !errors.Is(err, core.ErrDriverLost) {
		t.Errorf("count: %v", err)
	}
	if _, err := s.Probe(); !errors.Is(err, core.ErrDriverLost) {
		t.Errorf("probe without a reading: %v", err)
	}
}
