package core_test

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// listPrior lists the devices of the history, as the monitor does when the driver is slow to answer.
func (l *restartFixture) listPrior() {
	if !l.state.AwaitsDriver() {
		l.Error("the history has no devices that are not listed")
	}
	l.state = l.state.ListPrior(l.cfg, l.now)
	if l.state.AwaitsDriver() || !l.state.Allocatable.Provisional() {
		l.Error("the devices of the history are not listed, or count as an answer of the driver")
	}
}

// While the driver has not answered for the first time, the devices of the history are listed, unhealthy, with the
// reason. Its first answer shows which exist. A restart in between loses nothing.
func TestDevicesOfTheHistoryAreListedUntilTheDriverAnswers(t *testing.T) {
	unknown := map[gpu.DeviceID]string{coretest.GPU(0): "unknown NVML_UNAVAILABLE", coretest.GPU(1): "unknown NVML_UNAVAILABLE"}
	for _, next := range []string{"boot", "other boot"} {
		l := newRestartFixture(t, coretest.GPUs(2))
		l.observe(xidEvent(gpuAt(0), 157))
		l.restart("boot", next)
		l.expect("at the start", nil)
		for range 2 {
			l.listPrior()
			l.expect(next, unknown)
			l.restart(next, next)
		}
		l.listPrior()
		l.host = without(l.host, coretest.GPU(1))
		l.read(1)
		l.expect(next+", the driver has answered", map[gpu.DeviceID]string{coretest.GPU(0): "degraded XID_157", coretest.GPU(1): "lost LOST"})
	}
}

// A driver that fails or is absent after a reboot is an answer: no device of the earlier boot stays, but as one that
// was withdrawn a moment ago.
func TestDevicesOfAnEarlierBootLeaveWithoutADriver(t *testing.T) {
	for _, state := range []gpu.DriverState{gpu.DriverFailed, gpu.DriverAbsent} {
		l := newRestartFixture(t, coretest.GPUs(2))
		l.restart("boot", "other boot")
		l.listPrior()
		l.noDriver(state)
		l.now = l.now.Add(l.cfg.Retire)
		l.noDriver(state)
		l.expect("without a driver", nil)
		l.read(1)
		l.expect("with a driver", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "healthy "})
	}
}

// The history of another node is listed no longer than until the driver has answered, and nothing of it stays: no
// device, no number.
func TestDevicesOfAnotherNodeAreListedUntilTheDriverAnswers(t *testing.T) {
	l := newPolicyFixture(t, inventory.Policy{})
	l.state = core.Restore(l.cfg, core.Checkpoint{BootID: "of another node", Devices: otherGPUs(2).Devices}, "boot")
	l.listPrior()
	for u := range l.state.Allocatable.Units() {
		if u.Health.Schedulable() {
			t.Errorf("%s takes work: %v", u.ID, u.Health)
		}
	}
	if n := len(l.state.Binding.Numbering.Numbers) + len(l.state.ProposedNumbering().Numbers); n > 0 {
		t.Errorf("devices of another node have %d numbers", n)
	}
	l.read(1)
	if l.state.Foreign == nil {
		t.Error("the history is not dropped")
	}
	l.now = l.now.Add(l.cfg.Retire)
	l.read(1)
	for u := range l.state.Allocatable.Units() {
		if u.Device.ID == otherGPUs(1).Devices[0].ID {
			t.Errorf("%s is listed: %v", u.ID, u.Health)
		}
	}
}
