package nvidia

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// watched runs a monitor over the real session and gives a function that waits for an inventory.
func watched(t *testing.T, m *simdriver.Machine, cfg core.Config) (until func(what string, ok func(*core.Inventory) bool)) {
	t.Helper()
	mon := monitor.New(func() (monitor.Session, error) {
		s, err := Open(Options{Roots: roots(m), Deadline: 100 * time.Millisecond})
		if err != nil {
			return nil, err // not a nil *Session in an interface
		}
		return s, nil
	}, cfg, slog.New(slog.DiscardHandler), nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- mon.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return func(what string, ok func(*core.Inventory) bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		for inv := range mon.Watch(ctx) {
			if ok(inv) {
				return
			}
		}
		t.Fatalf("never %s; last: driver %+v", what, mon.Current().Driver())
	}
}

// health says whether a unit has a state of health and the others are well.
func health(id core.DeviceID, units int, state core.HealthState, reason core.Reason) func(*core.Inventory) bool {
	return func(inv *core.Inventory) bool {
		n, ok := 0, false
		for u := range inv.Units() {
			n++
			if u.Device.ID == id {
				ok = u.Health.State == state && u.Health.Reason == reason
			} else if u.Health.State != core.Healthy {
				return false
			}
		}
		return ok && n == units
	}
}

// eager is a configuration that recovers at once, where there is evidence.
func eager() core.Config {
	cfg := core.DefaultConfig()
	cfg.Probe, cfg.Rescan = 50*time.Millisecond, 200*time.Millisecond
	cfg.Health.Dwell, cfg.Health.MaxDwell = time.Millisecond, time.Millisecond
	return cfg
}

func TestMonitorSeesWhatHappens(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	cfg := eager()
	until := watched(t, m, cfg)
	until("eight healthy GPUs", health(h100ID, 8, core.Healthy, core.ReasonNone))

	must(t, m.Lose(3))
	until("lost", health(h100ID, 8, core.GPULost, core.ReasonLost))
	must(t, m.Restore(3))
	until("restored", health(h100ID, 8, core.Healthy, core.ReasonNone))

	must(t, m.Fail(simdriver.GPU(3), "nvml*", "UNKNOWN", simdriver.Always))
	until("failing", health(h100ID, 8, core.Unhealthy, core.ReasonProbe))
	must(t, m.Heal())
	until("healed", health(h100ID, 8, core.Healthy, core.ReasonNone))
}

func TestMonitorHearsXIDs(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	until := watched(t, m, core.DefaultConfig())
	until("eight healthy GPUs", health(h100ID, 8, core.Healthy, core.ReasonNone))
	eventuallyHeard(t, m, func() error { return errors.Join(m.XID(4, 13), m.XID(3, 79)) })
	until("XID", health(h100ID, 8, core.GPULost, core.ReasonXID))
}

func TestMonitorSeesAHang(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	cfg := eager()
	cfg.Health.Deadline = 200 * time.Millisecond
	until := watched(t, m, cfg)
	until("eight healthy GPUs", health(h100ID, 8, core.Healthy, core.ReasonNone))
	must(t, m.Hang(simdriver.GPU(3), "nvmlDeviceGetUUID"))
	until("hanging", health(h100ID, 8, core.Unhealthy, core.ReasonUnresponsive))
	must(t, m.Heal())
	until("answering", health(h100ID, 8, core.Healthy, core.ReasonNone))
}

func TestMonitorSurvivesTheDriver(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Unload())
	cfg := core.DefaultConfig()
	cfg.Probe = 50 * time.Millisecond
	until := watched(t, m, cfg)
	state := func(s core.DriverState, units int) func(*core.Inventory) bool {
		return func(inv *core.Inventory) bool {
			n := 0
			for range inv.Units() {
				n++
			}
			return inv.Driver().State == s && n == units
		}
	}
	until("absent", state(core.DriverAbsent, 0))
	must(t, m.Load())
	until("ready", state(core.DriverReady, 8))
	must(t, m.Unload())
	until("absent again, the GPUs listed", state(core.DriverAbsent, 8))
	must(t, m.Load())
	until("healthy again", health(h100ID, 8, core.Healthy, core.ReasonNone))
}

// One XID with an instance makes that instance unhealthy, one without makes all of the GPU's.
func TestMonitorAttributesXIDs(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	cfg := core.DefaultConfig()
	cfg.MIG = core.MIGMixed
	until := watched(t, m, cfg)
	instances, err := m.Instances(5)
	must(t, err)
	const units = 4 + 7 + 4 + 1
	id := core.DeviceID(instances[2]) // gi 9
	until("healthy instances", health(id, units, core.Healthy, core.ReasonNone))
	// The event set is made after the first reading; an XID before that is nobody's to hear.
	sick := func(want int) func(*core.Inventory) bool {
		return func(inv *core.Inventory) bool {
			n := 0
			for u := range inv.Units() {
				if u.Health.Reason == core.ReasonXID {
					n++
				}
			}
			return n == want
		}
	}
	eventuallyHeard(t, m, func() error { return m.XID(5, 94, simdriver.At{GI: 9, CI: 0}) })
	until("one sick instance", sick(1))
	must(t, m.XID(5, 79))
	until("all four sick", sick(4))
}

// eventuallyHeard raises an event once the process waits for events.
func eventuallyHeard(t *testing.T, m *simdriver.Machine, raise func() error) {
	t.Helper()
	eventually(t, func() (uint64, bool) {
		calls, err := m.Calls()
		must(t, err)
		n := calls["nvmlEventSetWait_v2"]
		return n, n > 0
	})
	must(t, raise())
}
