package core_test

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// During maintenance no unit takes work, in any health mode.
func TestMaintenance(t *testing.T) {
	for _, mode := range []core.HealthMode{core.ModeEnforce, core.ModeObserve, core.ModeOff} {
		t.Run(string(mode), func(t *testing.T) {
			l := newRestartFixture(t, coretest.GPUs(2))
			l.cfg.Health.Mode = mode
			l.read(1)
			l.state = l.state.EnterMaintenance(l.cfg, l.now, core.Maintenance{Since: l.now})
			for u := range l.state.Inventory.Units() {
				if u.Health.Schedulable() || u.Health.Cause() != "MAINTENANCE" {
					t.Errorf("%s: %s", u.ID, u.Health)
				}
			}
			if d := l.state.Inventory.Driver(); d.State != core.DriverReleased || !strings.Contains(d.Reason, "released") {
				t.Errorf("driver: %+v", d)
			}
			if _, err := l.state.Inventory.Reserve(core.UnitID(coretest.GPU(0))); err == nil {
				t.Error("a unit was reserved")
			}
			l.state = l.state.ExitMaintenance()
			l.read(1)
			for u := range l.state.Inventory.Units() {
				if u.Health.State != core.Healthy {
					t.Errorf("afterwards %s: %s", u.ID, u.Health)
				}
			}
		})
	}
}

// Conditions from before maintenance remain, unless there is evidence for recovery.
func TestMaintenanceKeepsConditions(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(xidEvent(gpu(0), 95))
	l.samples[coretest.GPU(0)].RecoveryAction = core.RecoveryUnknown
	l.state = l.state.EnterMaintenance(l.cfg, l.now, core.Maintenance{Since: l.now})
	l.state = l.state.ExitMaintenance()
	l.read(20)
	l.expect("afterwards", map[core.DeviceID]string{coretest.GPU(0): "unhealthy XID_95", coretest.GPU(1): "healthy "})
}

func TestMaintenanceOverRestartAndReboot(t *testing.T) {
	for next, want := range map[string]bool{"one": true, "two": false} {
		l := newRestartFixture(t, coretest.GPUs(1))
		away := core.Maintenance{Since: l.now.UTC(), Until: l.now.Add(time.Hour).UTC()}
		l.state = l.state.EnterMaintenance(l.cfg, l.now, away)
		l.restart("one", next)
		if got := l.state.Maintenance.Active(l.now); got != want {
			t.Errorf("boot %s: maintenance %v", next, l.state.Maintenance)
		}
		if want && (l.state.Maintenance != away || l.state.Maintenance.Active(away.Until)) {
			t.Errorf("maintenance: %v, want %v and no longer", l.state.Maintenance, away)
		}
	}
}

// A driver of another version requires a new process of the agent, which detects that the driver was loaded again.
func TestDriverVersionChangedOverRestart(t *testing.T) {
	for version, want := range map[string]string{"580.95.05": "unhealthy XID_119", "590.1": "healthy "} {
		l := newRestartFixture(t, coretest.GPUs(1))
		l.host.Driver.Version = "580.95.05"
		l.read(1)
		l.observe(xidEvent(gpu(0), 119))
		l.restart("boot", "boot")
		l.host.Driver.Version = version
		l.read(200)
		l.expect("driver "+version, map[core.DeviceID]string{coretest.GPU(0): want})
	}
}
