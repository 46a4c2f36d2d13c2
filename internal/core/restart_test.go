package core_test

import (
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// The first snapshot after a restart shows which devices still exist.
func TestDevicesAfterRestart(t *testing.T) {
	t.Run("one died", func(t *testing.T) {
		for _, next := range []string{"boot", "other boot"} {
			l := newRestartFixture(t, coretest.GPUs(2))
			l.restart("boot", next)
			l.host = without(l.host, coretest.GPU(1))
			l.read(1)
			l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"})
		}
	})
	t.Run("one was replaced", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		l.observe(xidEvent(gpuAt(1), 119))
		l.restart("boot", "boot")
		l.host = coretest.GPUs(2)
		l.host.Devices[1].ID, l.host.Devices[1].At = "GPU-new", gpu.WholeGPU("GPU-new")
		fresh := healthySample()
		l.samples["GPU-new"] = &fresh
		l.read(1)
		l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", "GPU-new": "healthy "})
		if _, ok := l.state.Ledger.History(coretest.GPU(1)); ok || len(l.state.Ledger.Conditions()) != 0 {
			t.Errorf("the history of the old one is kept: %v", l.state.Ledger.Conditions())
		}
	})
	t.Run("MIG instances changed", func(t *testing.T) {
		l := newRestartFixture(t, migMachine())
		l.restart("boot", "boot")
		l.host = without(l.host, "MIG-1")
		l.read(1)
		l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", "MIG-2": "healthy "})
	})
	t.Run("over restarts without a reading", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		for range 3 {
			l.restart("boot", "boot")
		}
		l.host = without(l.host, coretest.GPU(1))
		l.read(1)
		l.expect("in the first reading", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"})
	})
}

// A driver that is not ready gives no information on devices: they stay, unless the host was rebooted.
func TestDevicesWithoutADriver(t *testing.T) {
	unknown := map[gpu.DeviceID]string{coretest.GPU(0): "unknown NVML_UNAVAILABLE", coretest.GPU(1): "unknown NVML_UNAVAILABLE"}
	well := map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "healthy "}
	l := newRestartFixture(t, coretest.GPUs(2))
	l.restart("boot 1", "boot 1")
	l.noDriver(gpu.DriverFailed)
	l.expect("the same boot", unknown)
	l.read(1)
	l.expect("the driver is back", well)

	l.observe(xidEvent(gpuAt(0), 157))
	l.restart("boot 1", "boot 2")
	for range 2 { // a second restart before the driver was ready
		l.noDriver(gpu.DriverAbsent)
		l.expect("another boot", nil)
		l.restart("boot 2", "boot 2")
	}
	l.noDriver(gpu.DriverAbsent)
	l.expect("another boot", nil)
	l.host = without(l.host, coretest.GPU(1))
	l.read(1)
	l.expect("the driver is ready", map[gpu.DeviceID]string{coretest.GPU(0): "degraded XID_157", coretest.GPU(1): "lost LOST"})
	l.restart("boot 2", "boot 2")
	l.noDriver(gpu.DriverFailed)
	l.expect("that boot again", map[gpu.DeviceID]string{coretest.GPU(0): "unknown NVML_UNAVAILABLE", coretest.GPU(1): "lost LOST"})
}

// A GPU that the driver has not listed for a day is dropped.
func TestForget(t *testing.T) {
	gone := func(l *restartFixture) { l.host = without(l.host, coretest.GPU(1)) }
	both := map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"}
	one := map[gpu.DeviceID]string{coretest.GPU(0): "healthy "}
	hours := func(l *restartFixture, n int) {
		l.now = l.now.Add(time.Duration(n)*time.Hour - checkInterval)
		l.read(1)
	}
	t.Run("after a day", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		gone(l)
		l.read(1)
		hours(l, 23)
		l.expect("within the day", both)
		hours(l, 1)
		l.now = l.now.Add(time.Minute)
		l.observe()
		l.expect("after it", one)
		if _, ok := l.state.Ledger.History(coretest.GPU(1)); ok || len(l.state.Ledger.Conditions()) != 0 {
			t.Errorf("something is left of it: %v", l.state.Ledger.Conditions())
		}
	})
	t.Run("with other conditions", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		l.observe(xidEvent(gpuAt(1), 79))
		gone(l)
		l.read(1)
		hours(l, 24)
		l.now = l.now.Add(time.Minute)
		l.observe()
		l.expect("after a day", one)
	})
	t.Run("over restarts", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		gone(l)
		l.read(1)
		for range 23 {
			l.restart("boot", "boot")
			hours(l, 1)
			l.expect("within the day", both)
		}
		l.restart("boot", "boot")
		hours(l, 1)
		l.expect("after it", one)
	})
	t.Run("but not while it is listed", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		slot := l.host.Devices[1].PCI
		gone(l)
		l.host.Excluded = []gpu.Exclusion{{Index: 1, PCI: slot, Failure: gpu.FailureLost, Reason: "GPU is lost"}}
		l.read(1)
		hours(l, 48)
		l.expect("after two days", both)
	})
	t.Run("nor while the driver is not ready", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		gone(l)
		l.read(1)
		l.now = l.now.Add(48 * time.Hour)
		l.noDriver(gpu.DriverFailed)
		l.expect("after two days", map[gpu.DeviceID]string{coretest.GPU(0): "unknown NVML_UNAVAILABLE", coretest.GPU(1): "lost LOST"})
	})
	t.Run("counted from the last loss", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(2))
		whole := l.host
		gone(l)
		l.read(1)
		hours(l, 23)
		l.host = whole
		l.read(1)
		gone(l)
		l.read(1)
		hours(l, 23)
		l.expect("it was there in between", both)
	})
}

// An old loss that the GPU has answered after, and that no operator has cleared, does not make the next one a day old.
func TestForgetIsNotCountedFromAnEarlierLoss(t *testing.T) {
	for name, between := range map[string]func(*restartFixture){
		"in one process":      func(*restartFixture) {},
		"over a restart":      func(l *restartFixture) { l.restart("boot", "boot") },
		"the driver was away": func(l *restartFixture) { l.noDriver(gpu.DriverFailed) },
		"after one reading":   func(l *restartFixture) { l.restart("boot", "boot"); l.read(1); l.restart("boot", "boot") },
		"restarted without it": func(l *restartFixture) {
			l.restart("boot", "boot")
			l.noDriver(gpu.DriverFailed)
			l.restart("boot", "boot")
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newRestartFixture(t, coretest.GPUs(2))
			l.cfg.Health.ManualRecovery = true
			l.cfg.Policy = shareFirst(1)
			l.cfg.Policy.Shares[0].Select.Indices = gpuIndices(1).Indices
			whole := l.host
			l.read(1)
			l.host = without(whole, coretest.GPU(1))
			l.read(1)
			l.host = whole
			l.read(5)
			l.expect("it answers again", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy LOST"})
			l.now = l.now.Add(48 * time.Hour)
			l.read(1)
			between(l)
			l.host = without(whole, coretest.GPU(1))
			for range 3 {
				l.read(1)
				l.expect("lost again", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"})
			}
			if got := l.state.Binding.Counts[0].Taken; len(got) != 1 || got[0] != coretest.GPU(1) {
				t.Errorf("the share is bound to %v", got)
			}
			l.now = l.now.Add(l.cfg.Health.RemoveLostAfter)
			l.read(2)
			l.expect("a day later", map[gpu.DeviceID]string{coretest.GPU(0): "healthy "})
		})
	}
}

// whole compares unexported fields too.
var whole = cmp.Exporter(func(reflect.Type) bool { return true })

// setWallClock sets the wall clock and thereby the boot time, which is computed from the uptime.
func (f *randomSim) setWallClock() {
	d := time.Duration(f.clockRand.Int64N(int64(96*time.Hour))-int64(48*time.Hour)) / time.Second * time.Second
	if f.clockRand.IntN(4) == 0 {
		d = time.Duration(f.clockRand.IntN(2)-1) * 365 * 24 * time.Hour
	}
	f.now, f.bootTime, f.lastRead, f.clockOffset = f.now.Add(d), f.bootTime.Add(d), f.lastRead.Add(d), f.clockOffset+d
}

// Two hosts have the same random faults, recoveries, commands and restarts. The wall clock of one of them is set
// by days, forward and back, while its agent runs and while it does not. The states of both stay equal.
func TestClockChangesHaveNoEffect(t *testing.T) {
	for seed := range uint64(60) {
		steady, jumping := newRandomSim(seed), newRandomSim(seed)
		jumping.clockRand = rand.New(rand.NewPCG(seed, 7))
		for step := range 200 {
			if jumping.clockRand.IntN(5) == 0 {
				was := jumping.clockOffset
				jumping.setWallClock()
				jumping.state = jumping.state.Shift(jumping.clockOffset - was)
			}
			steady.step()
			jumping.step()
			if step%5 != 0 {
				continue
			}
			want, got := steady.state.Checkpoint("boot"), jumping.state.Shift(-jumping.clockOffset).Checkpoint("boot")
			if diff := cmp.Diff(want, got, whole); diff != "" {
				t.Fatalf("seed %d, step %d, clock set by %v in all: %s", seed, step, jumping.clockOffset, diff)
			}
		}
	}
}

// checkpointWithXID returns the checkpoint of a GPU with an XID, two minutes after it, with a known boot time.
func checkpointWithXID(t *testing.T) (*restartFixture, core.Checkpoint) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.state = core.Restore(l.cfg, core.Checkpoint{BootID: "a", BootTime: testStart.Add(-time.Hour)}, "a")
	l.read(1)
	l.observe(xidEvent(gpuAt(1), 119))
	l.read(12)
	return l, l.state.Checkpoint("a")
}

func TestRebase(t *testing.T) {
	l, r := checkpointWithXID(t)
	booted, at := r.BootTime, r.Conditions[0].Last // the time of the latest occurrence in it
	in := func(d time.Duration) time.Time { return l.now.Add(d) }
	for _, tc := range []struct {
		name       string
		boot       core.Boot
		now        time.Time // by the wall clock
		want       time.Time // of the XID
		wantBooted time.Time
	}{
		{"no change", core.Boot{ID: "a", Time: booted}, in(time.Minute), at, booted},
		{"slewed by NTP", core.Boot{ID: "a", Time: booted.Add(time.Second / 2)}, in(time.Minute), at, booted},
		{"forward", core.Boot{ID: "a", Time: booted.Add(26 * time.Hour)}, in(27 * time.Hour), at.Add(26 * time.Hour), booted.Add(26 * time.Hour)},
		{"back", core.Boot{ID: "a", Time: booted.Add(-26 * time.Hour)}, in(-25 * time.Hour), at.Add(-26 * time.Hour), booted.Add(-26 * time.Hour)},
		{"back, uptime unknown", core.Boot{ID: "a"}, in(-2 * time.Hour), in(-2 * time.Hour), booted.Add(in(-2 * time.Hour).Sub(at))},
		{"back, boot id unknown", core.Boot{Time: booted.Add(-2 * time.Hour)}, in(-2 * time.Hour), in(-2 * time.Hour), booted.Add(-2 * time.Hour)},
		{"a reboot", core.Boot{ID: "b", Time: in(time.Minute)}, in(2 * time.Minute), at, in(time.Minute)},
		{"a reboot, clock behind", core.Boot{ID: "b", Time: in(-time.Hour)}, in(-time.Minute), in(-time.Hour), in(-time.Hour)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := r.Rebase(tc.boot, tc.now)
			if c := got.Conditions[0]; !c.Last.Equal(tc.want) || !c.Since.Equal(tc.want) {
				t.Errorf("the XID is at %v, want %v", c.Last, tc.want)
			}
			if !got.BootTime.Equal(tc.wantBooted) {
				t.Errorf("booted at %v, want %v", got.BootTime, tc.wantBooted)
			}
			if tc.boot.ID != "" {
				got.BootID = tc.boot.ID
			}
			if diff := cmp.Diff(got, got.Rebase(tc.boot, tc.now), whole); diff != "" {
				t.Errorf("a second time changes it again: %s", diff)
			}
		})
	}
}

// A removed GPU is listed as lost for a day. How long the host was off is unknown, because its clock may be wrong
// at boot.
func TestForgetWithWrongClockAtBoot(t *testing.T) {
	l, _ := checkpointWithXID(t)
	l.host = coretest.GPUs(1)
	l.read(2)
	r := l.state.Checkpoint("a")
	l.now = l.now.Add(25 * time.Hour) // two minutes of it have really passed
	boot := core.Boot{ID: "b", Time: l.now.Add(-time.Minute)}
	l.state = core.Restore(l.cfg, r.Rebase(boot, l.now), boot.ID)
	l.read(1)
	l.expect("after the boot", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "lost LOST"})
	l.now = l.now.Add(l.cfg.Health.RemoveLostAfter)
	l.read(2)
	l.expect("a day later", map[gpu.DeviceID]string{coretest.GPU(0): "healthy "})
}

// A GPU that an agent can't identify when it starts after days may be one that was lost before: its history and its place in a policy stay.
func TestForgetWithUnidentifiedGPU(t *testing.T) {
	l, _ := checkpointWithXID(t)
	l.host = coretest.GPUs(1)
	l.read(2)
	l.restart("a", "a")
	l.now = l.now.Add(l.cfg.Health.RemoveLostAfter + time.Hour)
	l.host = withExcluded(coretest.GPUs(1), gpu.Exclusion{Index: 1, Failure: gpu.FailureError, Reason: "nvmlDeviceGetHandleByIndex: NOT_READY"})
	l.read(1)
	if _, known := l.state.Ledger.History(coretest.GPU(1)); !known {
		t.Error("the history was removed")
	}
}
