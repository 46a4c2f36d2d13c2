package core_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// otherGPUs returns a node with n GPUs, none of which is in coretest.GPUs(8), at other PCI addresses.
func otherGPUs(n int) gpu.Snapshot {
	s := coretest.GPUs(n)
	for i := range s.Devices {
		s.Devices[i].ID = coretest.GPU(100 + i)
		s.Devices[i].At = gpu.WholeGPU(s.Devices[i].ID)
		s.Devices[i].PCI = gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 0x60+i))
	}
	s.Links = nil
	return gpu.NewSnapshot(s)
}

// withExcluded adds unreadable devices to a snapshot.
func withExcluded(s gpu.Snapshot, excluded ...gpu.Exclusion) gpu.Snapshot {
	s.Excluded = append(slices.Clone(s.Excluded), excluded...)
	return gpu.NewSnapshot(s)
}

// onlyExcluded returns a snapshot without readable devices.
func onlyExcluded(excluded ...gpu.Exclusion) gpu.Snapshot {
	return withExcluded(gpu.Snapshot{Driver: coretest.GPUs(1).Driver}, excluded...)
}

// A state directory from a cloned image or a moved disk contains GPUs of another node. They are dropped, and not
// lost. A node whose own GPUs are lost keeps its history.
func TestForeignHistoryIsDropped(t *testing.T) {
	nameless := gpu.Exclusion{Index: 1, Failure: gpu.FailureError, Reason: "no UUID"}
	slot := gpu.Exclusion{Index: 1, PCI: "0000:11:00.0", Failure: gpu.FailureLost, Reason: "no UUID"}
	own := gpu.Exclusion{Index: 1, At: gpuAt(1), PCI: "0000:11:00.0", Failure: gpu.FailureLost, Reason: "lost"}
	strange := gpu.Exclusion{Index: 1, At: gpu.WholeGPU(coretest.GPU(101)), PCI: "0000:11:00.0", Failure: gpu.FailureError, Reason: "error"}
	for name, tc := range map[string]struct {
		readings []gpu.Snapshot
		dropped  bool
		lost     int
	}{
		"other GPUs":                        {[]gpu.Snapshot{otherGPUs(2)}, true, 0},
		"more of them":                      {[]gpu.Snapshot{otherGPUs(8)}, true, 0},
		"one that names itself and no more": {[]gpu.Snapshot{withExcluded(otherGPUs(1), strange)}, true, 0},
		"after a driver that was not ready": {[]gpu.Snapshot{gpu.NoDriver(gpu.DriverAbsent, "none"), otherGPUs(2)}, true, 0},
		"after a driver that named no GPU":  {[]gpu.Snapshot{onlyExcluded(), otherGPUs(2)}, true, 0},
		"after a doubt that is over":        {[]gpu.Snapshot{withExcluded(otherGPUs(1), nameless), otherGPUs(2)}, true, 0},
		"one of three has no UUID":          {[]gpu.Snapshot{withExcluded(otherGPUs(2), nameless)}, true, 0},
		"the same GPUs":                     {[]gpu.Snapshot{coretest.GPUs(2), otherGPUs(2)}, false, 2},
		"all have fallen off the bus":       {[]gpu.Snapshot{onlyExcluded()}, false, 2},
		"the driver is not ready":           {[]gpu.Snapshot{gpu.NoDriver(gpu.DriverFailed, "mismatch")}, false, 0},
		"one is left, the other is lost":    {[]gpu.Snapshot{coretest.GPUs(1)}, false, 1},
		"one is replaced, one is left":      {[]gpu.Snapshot{withExcluded(coretest.GPUs(1), strange)}, false, 0},
		"one is lost but known by its UUID": {[]gpu.Snapshot{withExcluded(otherGPUs(1), own)}, false, 2},
		"one of two has no UUID":            {[]gpu.Snapshot{withExcluded(otherGPUs(1), nameless)}, false, 0},
		"one in a known slot has no UUID":   {[]gpu.Snapshot{withExcluded(otherGPUs(1), slot)}, false, 2},
		"none can be read, all are named":   {[]gpu.Snapshot{onlyExcluded(strange)}, false, 1},
		"all are replaced while it runs":    {[]gpu.Snapshot{coretest.GPUs(2), otherGPUs(1)}, false, 2},
	} {
		for boot, next := range map[string]string{"same boot": "boot 1", "another boot": "boot 2"} {
			t.Run(name+", "+boot, func(t *testing.T) {
				l := newRestartFixture(t, coretest.GPUs(2))
				l.observe(xidEvent(gpuAt(1), 95))
				l.restart("boot 1", next)
				for _, reading := range tc.readings {
					l.now = l.now.Add(time.Second)
					l.state = l.state.Read(l.cfg, l.now, reading, healthyChecks(reading)...)
				}
				if got := l.state.Foreign != nil; got != tc.dropped {
					t.Fatalf("dropped: %v (%v), want %v", got, l.state.Foreign, tc.dropped)
				}
				lost := 0
				for u := range l.state.Allocatable.Units() {
					if u.Health.State == health.GPULost {
						lost++
					}
				}
				if lost != tc.lost {
					t.Errorf("%d GPUs are lost, want %d", lost, tc.lost)
				}
				if !tc.dropped {
					return
				}
				if f := l.state.Foreign; !slices.Equal(f.HistoryGPUs, []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}) || f.DriverGPUs[0] != coretest.GPU(100) {
					t.Errorf("%v", f)
				}
				record := l.state.Checkpoint(next)
				for _, d := range record.Devices {
					if slices.Contains(l.state.Foreign.HistoryGPUs, d.At.GPU) {
						t.Errorf("%s is kept", d.ID)
					}
				}
				if _, known := record.GPUs[coretest.GPU(1)]; known || len(record.Conditions) > 0 {
					t.Errorf("kept: %v, %v", record.GPUs, record.Conditions)
				}
			})
		}
	}
}

// An agent ends before it can detect that the history is another node's. The next one finds GPUs of this node in
// it, because the first one has read them.
func TestForeignHistoryIsDroppedByLaterProcess(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(3))
	l.restart("boot", "boot")
	nameless := gpu.Exclusion{Index: 1, Failure: gpu.FailureError, Reason: "no UUID"}
	l.host = withExcluded(otherGPUs(1), nameless)
	l.read(1)
	l.restart("boot", "boot")
	l.read(1)
	if l.state.Foreign != nil {
		t.Errorf("dropped while it may be of this node: %v", l.state.Foreign)
	}
	l.restart("boot", "boot")
	l.restart("boot", "boot") // that process saved its state, and ended before its first snapshot
	l.host = otherGPUs(2)
	l.read(1)
	if f := l.state.Foreign; f == nil || len(f.HistoryGPUs) != 3 {
		t.Fatalf("dropped: %v", f)
	}
	for u := range l.state.Allocatable.Units() {
		if slices.Contains(l.state.Foreign.HistoryGPUs, u.Device.ID) && u.Health.Reason != health.ReasonWithdrawn {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
}

// A GPU that could never be read is known by its conditions.
func TestForeignHistoryOfUnreadableGPU(t *testing.T) {
	cfg := core.DefaultConfig()
	r := core.Checkpoint{BootID: "boot", Devices: coretest.GPUs(1).Devices, Conditions: []health.Condition{{
		At: gpuAt(1), Reason: health.ReasonXID, Code: 95, State: health.Unhealthy, Since: testStart, Last: testStart,
	}}}
	reading := coretest.GPUs(2)
	reading.Devices = reading.Devices[1:] // the first has fallen off the bus, the second responds
	s := core.Restore(cfg, r, "boot").Read(cfg, testStart, gpu.NewSnapshot(reading))
	if s.Foreign != nil || s.Ledger.Health(gpuAt(0)).State != health.GPULost {
		t.Errorf("dropped: %v; GPU 0 is %s", s.Foreign, s.Ledger.Health(gpuAt(0)))
	}
}

// The agent reads some GPUs of this node and restarts, in any order, before it can detect that the history is
// another node's.
func TestForeignHistoryOverRandomRestarts(t *testing.T) {
	for seed := range uint64(1000) {
		random := rand.New(rand.NewPCG(seed, 3)) //nolint:gosec // repeatable
		machine := otherGPUs(4)
		if random.IntN(2) == 0 { // of the same model
			for i := range machine.Devices {
				machine.Devices[i].PCI = coretest.GPUs(4).Devices[i].PCI
			}
		}
		l := newRestartFixture(t, coretest.GPUs(3))
		l.observe(xidEvent(gpuAt(0), 157), xidEvent(gpuAt(1), 157))
		for _, o := range healthyChecks(machine) {
			l.samples[o.At.GPU] = &o.Sample
		}
		boot := l.reboot("boot", random)
		l.cfg.Policy = shareFirst(2)
		unhealthy, pools := map[gpu.DeviceID]bool{}, map[gpu.DeviceID]string{}
		for step := range 12 {
			switch what := random.IntN(8); {
			case step == 11: // the last snapshot is complete
				l.host = machine
				l.read(1)
			case what < 4:
				l.host = partialSnapshot(machine, random)
				l.read(1)
			case what < 5:
				l.noDriver(gpu.DriverAbsent)
			case what < 7:
				next := l.reboot(boot, random)
				if next != boot {
					clear(pools) // bindings end with the boot
				}
				boot = next
				continue
			default:
				for u := range l.state.Allocatable.Units() {
					if u.Device.ID >= coretest.GPU(100) {
						l.observe(xidEvent(u.Device.At, 157))
						unhealthy[u.Device.ID] = true
					}
				}
			}
			l.expectOwnGPUs(unhealthy, pools)
			if l.state.Foreign != nil {
				break
			}
		}
		l.expectNoForeign(boot)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// reboot restarts the agent, and at random the host.
func (l *restartFixture) reboot(boot string, random *rand.Rand) (next string) {
	if next = boot; random.IntN(3) == 0 {
		next += "'"
	}
	l.restart(boot, next)
	return next
}

// partialSnapshot returns a snapshot in which some GPUs have no UUID, can't be read, or are not listed.
func partialSnapshot(machine gpu.Snapshot, random *rand.Rand) gpu.Snapshot {
	reading := gpu.Snapshot{Driver: machine.Driver}
	for i, d := range machine.Devices {
		e := gpu.Exclusion{Index: i, Failure: gpu.FailureError, Reason: "error"}
		switch random.IntN(6) {
		case 0, 1:
			reading.Devices = append(reading.Devices, d)
			continue
		case 2:
			e.Failure = gpu.FailureLost
		case 3:
			e.PCI = d.PCI
		case 4:
			e.PCI, e.At = d.PCI, d.At
		case 5:
			continue
		}
		reading.Excluded = append(reading.Excluded, e)
	}
	return gpu.NewSnapshot(reading)
}

// expectOwnGPUs: unhealthy GPUs of this node stay unhealthy, and its GPUs stay in their pools.
func (l *restartFixture) expectOwnGPUs(unhealthy map[gpu.DeviceID]bool, pools map[gpu.DeviceID]string) {
	l.Helper()
	for id := range unhealthy {
		if !slices.ContainsFunc(l.state.Ledger.Conditions(), func(c health.Condition) bool { return c.At.GPU == id && c.Code == 157 }) {
			l.Errorf("%s is not unhealthy any more", id)
		}
	}
	for u := range l.state.Allocatable.Units() {
		id := u.Device.ID
		if id < coretest.GPU(100) || u.Health.Reason == health.ReasonWithdrawn {
			continue
		}
		if pool, decided := pools[id]; decided && pool != u.Pool {
			l.Errorf("%s was in pool %s, and is in pool %s", id, pool, u.Pool)
		}
		pools[id] = u.Pool
	}
}

// expectNoForeign: nothing of the other node's GPUs is left.
func (l *restartFixture) expectNoForeign(boot string) {
	l.Helper()
	for u := range l.state.Allocatable.Units() {
		if u.Device.ID < coretest.GPU(100) && u.Health.Reason != health.ReasonWithdrawn {
			l.Errorf("%s is listed: %s", u.ID, u.Health)
		}
	}
	record, err := json.Marshal(l.state.Checkpoint(boot))
	if err != nil {
		l.Fatal(err)
	}
	for n := range 3 {
		if bytes.Contains(record, []byte(coretest.GPU(n))) {
			l.Errorf("%s is in the record", coretest.GPU(n))
		}
	}
}
