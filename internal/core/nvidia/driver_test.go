package nvidia

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
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
		if !errors.Is(err, gpu.ErrDriverLost) || strings.Contains(err.Error(), "\n") {
			t.Errorf("unloaded: %v", err)
		}
	}
	must(t, s.Close(), s.Close())
	_, err := Open(Options{Roots: roots(m)})
	_, again := Open(Options{Roots: roots(m)})
	if !errors.Is(err, gpu.ErrNoDriver) || err.Error() != again.Error() {
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
	if _, err := s.Snapshot(); !errors.Is(err, gpu.ErrDriverLost) && !errors.Is(err, gpu.ErrDriverStale) {
		t.Errorf("snapshot: %v", err)
	}
	must(t, s.Close())
	if _, err := Open(Options{Roots: roots(m)}); !errors.Is(err, gpu.ErrDriverStale) {
		t.Errorf("open: %v", err)
	}
}

func TestDriverWideCodes(t *testing.T) {
	for code, want := range map[string]error{
		"UNINITIALIZED": gpu.ErrDriverLost, "DRIVER_NOT_LOADED": gpu.ErrDriverLost,
		"LIB_RM_VERSION_MISMATCH": gpu.ErrDriverLost, // the library on disk is the loaded one
	} {
		for _, call := range []string{
			"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo",
			"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState",
		} {
			m := simdriver.Start(t, "a100-mig")
			s := open(t, m)
			must(t, m.Fail(simdriver.All, call, code, simdriver.Always))
			if _, err := s.Snapshot(); !errors.Is(err, want) || errors.Is(err, gpu.ErrDriverStale) {
				t.Errorf("%s, %s: %v", call, code, err)
			}
			must(t, s.Close())
		}
	}
	m := simdriver.Start(t, "t4")
	s := open(t, m)
	must(t, m.Fail(simdriver.All, "nvmlDeviceGetCount", "UNKNOWN", simdriver.Always))
	if _, err := s.Snapshot(); !errors.Is(err, gpu.ErrDriverLost) {
		t.Errorf("count: %v", err)
	}
	if _, err := s.Probe(); !errors.Is(err, gpu.ErrDriverLost) {
		t.Errorf("probe without a reading: %v", err)
	}
}

// A GPU of which all calls fail is unhealthy in the monitor's inventory until they succeed. Other faults from the library to
// the inventory are in test/health.
func TestMonitorReportsFailingCalls(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	cfg := core.DefaultConfig()
	cfg.Probe, cfg.Rescan = 50*time.Millisecond, 200*time.Millisecond
	cfg.Health.RecoveryDwell, cfg.Health.MaxRecoveryDwell = time.Millisecond, time.Millisecond
	mon := monitor.New(func() (monitor.Session, error) {
		s, err := Open(Options{Roots: roots(m), Deadline: 100 * time.Millisecond})
		if err != nil {
			return nil, err // not a nil *Session in an interface
		}
		return s, nil
	}, cfg, slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- mon.Run(ctx) }()
	await := func(what string, state health.State, reason health.Reason) {
		t.Helper()
		for inv := range mon.Watch(ctx) {
			states := map[gpu.DeviceID]health.State{}
			others := 0
			for u := range inv.Units() {
				if u.Device.ID == h100ID && u.Health.Reason == reason {
					states[h100ID] = u.Health.State
				} else if u.Health.State == health.Healthy {
					others++
				}
			}
			if got, ok := states[h100ID]; ok && got == state && others == 7 {
				return
			}
		}
		t.Fatalf("never %s; driver %+v", what, mon.Current().Driver())
	}
	await("healthy", health.Healthy, health.ReasonNone)
	must(t, m.Fail(simdriver.GPU(3), "nvml*", "UNKNOWN", simdriver.Always))
	await("unhealthy", health.Unhealthy, health.ReasonProbe)
	must(t, m.Heal())
	await("healthy again", health.Healthy, health.ReasonNone)
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
