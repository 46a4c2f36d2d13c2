package core_test

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
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

// A driver that is not ready gives no information on devices: they stay, unless the node was rebooted.
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

// Two nodes have the same random faults, recoveries, commands and restarts. The wall clock of one of them is set
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

// A removed GPU is listed as lost for a day. How long the node was off is unknown, because its clock may be wrong
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

// A restart neither clears nor drops a condition. A reboot clears exactly those that it is evidence for.
func TestRestartAndReboot(t *testing.T) {
	set := func(change func(*health.Sample), checks int) func(*restartFixture) {
		return func(l *restartFixture) { change(l.samples[coretest.GPU(0)]); l.read(checks) }
	}
	codes := func(codes ...uint64) func(*restartFixture) {
		return func(l *restartFixture) {
			for _, code := range codes {
				l.observe(xidEvent(gpuAt(0), code))
			}
		}
	}
	type restartCase struct {
		name    string
		happen  func(*restartFixture)
		kept    string
		outlive bool // the condition remains after a reboot
	}
	cases := []restartCase{
		{"contained", codes(94), "degraded XID_94", false},
		{"reset", codes(95), "unhealthy XID_95", false},
		{"reset, recovery action not reported", codes(119), "unhealthy XID_119", false},
		{"node", codes(54), "unhealthy XID_54", false},
		{"fabric", codes(74), "degraded XID_74", false},
		{"suspect", codes(500), "degraded XID_500", false},
		{"event", func(l *restartFixture) { l.observe(health.Observation{At: gpuAt(0), Kind: health.Event, Code: 0x2000}) }, "unhealthy EVENT_0x2000", false},
		{"permanent damage", codes(157), "degraded XID_157", true},
		{"end of life", codes(164), "degraded XID_164", true},
		{"workloads", func(l *restartFixture) {
			for range 3 {
				l.observe(health.Observation{At: gpuAt(0), Kind: health.Reserved}, xidEvent(gpuAt(0), 31))
			}
		}, "degraded WORKLOADS_FAILING", false},
		{"ECC", set(func(v *health.Sample) { v.Uncorrectable.Value++ }, 1), "degraded ECC_UNCORRECTABLE", false},
		{"operational event", func(l *restartFixture) {
			o := operationalEvent(health.OperationalEvent{Severity: health.SeverityFatal})
			o.At = gpuAt(0)
			l.observe(o)
		}, "degraded OPERATIONAL_EVENT", false},
		{"errors", func(l *restartFixture) {
			for range 3 {
				l.observe(health.Observation{At: gpuAt(0), Kind: health.ProbeFailed})
			}
		}, "unhealthy PROBE_FAILED", false},
		{"hang", func(l *restartFixture) { l.observe(health.Observation{At: gpuAt(0), Kind: health.Unresponsive}) }, "unhealthy NOT_ANSWERING", false},
		{"lost", func(l *restartFixture) { l.observe(health.Observation{At: gpuAt(0), Kind: health.Lost}) }, "lost LOST", false},
		{"service", func(l *restartFixture) {
			for _, code := range []uint64{46, 119, 140} {
				codes(code)(l)
				l.observe(health.Observation{At: gpuAt(0), Kind: health.DriverRebound})
				l.now = l.now.Add(time.Second)
				l.observe(health.Observation{At: gpuAt(0), Kind: health.DriverRebound})
				l.read(40)
			}
		}, "unhealthy NEEDS_SERVICE", true},
	}
	for _, level := range levelReasons() {
		cases = append(cases, restartCase{level.cause, set(level.set, level.checks), level.state.String() + " " + level.cause, level.over == never && level.state == health.Unhealthy})
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			for _, reboot := range []bool{false, true} {
				l := newRestartFixture(t, coretest.GPUs(2))
				tc.happen(l)
				l.expect("before", map[gpu.DeviceID]string{coretest.GPU(0): tc.kept, coretest.GPU(1): "healthy "})
				next := "boot 1"
				if reboot {
					next = "boot 2"
				}
				before := l.state.Ledger.Conditions()
				l.restart("boot 1", next)
				after := l.state.Ledger.Conditions()
				switch {
				case reboot && !tc.outlive:
					if len(after) != 0 {
						t.Errorf("after a reboot conditions %v", after)
					}
				case len(after) != len(before):
					t.Errorf("before %v, after %v", before, after)
				}
				for i, c := range after {
					if b := before[i]; c.Cause() != b.Cause() || !c.Since.Equal(b.Since) || !c.Last.Equal(b.Last) || c.Count != b.Count || c.State != b.State {
						t.Errorf("was %+v, is %+v", b, c)
					}
				}
				if reboot && !tc.outlive {
					*l.samples[coretest.GPU(0)] = healthySample()
					l.read(1)
					l.expect("after the reboot", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "healthy "})
				}
			}
		})
	}
}

// What is valid only within a process is not in the checkpoint.
func TestCheckpointLeavesOut(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	simulated := xidEvent(gpuAt(0), 95)
	simulated.Simulated = true
	l.observe(simulated, health.Observation{At: gpu.Node, Kind: health.Unresponsive})
	l.noDriver(gpu.DriverFailed)
	l.observe(health.Observation{At: gpuAt(1), Kind: health.CallPending})
	if n := len(l.state.Ledger.Conditions()); n != 4 {
		t.Fatalf("%d conditions", n)
	}
	if cs := l.state.Checkpoint("boot").Conditions; len(cs) != 0 {
		t.Errorf("recorded: %v", cs)
	}
}

// Progress of a recovery starts again; counts and ignored conditions are kept.
func TestRestartKeepsHistory(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.observe(xidEvent(gpuAt(0), 95), xidEvent(gpuAt(1), 119))
	l.read(7)
	if c := l.state.Ledger.Conditions()[0]; c.CleanChecks < 3 {
		t.Fatalf("recovery has not begun: %+v", c)
	}
	state, _, err := l.state.Ignore(l.cfg, l.now, health.Command{GPU: coretest.GPU(1)}, l.now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	l.state = state
	l.restart("boot", "boot")
	if c := l.state.Ledger.Conditions()[0]; c.CleanChecks != 0 || !c.ClearingSince.IsZero() {
		t.Errorf("progress: %+v", c)
	}
	history, _ := l.state.Ledger.History(coretest.GPU(0))
	if len(history.FaultCounts) != 1 || len(history.UnhealthyEpisodes) != 1 || history.UnhealthySince.IsZero() || !history.SevereCause || history.MaxNVLinks != 18 {
		t.Errorf("history: %+v", history)
	}
	l.read(6)
	l.expect("the dwell time started again", map[gpu.DeviceID]string{coretest.GPU(0): "unhealthy XID_95", coretest.GPU(1): "healthy "})
	l.read(1)
	l.expect("and is over", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "healthy "})
	l.read(360)
	l.expect("ignored for an hour", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
	if history, _ := l.state.Ledger.History(coretest.GPU(0)); len(history.Recoveries) != 1 || len(history.UnhealthyEpisodes) != 1 {
		t.Errorf("one episode over a restart: %+v", history)
	}
}

// A reset while no agent was running is detected by the next agent, by the same signs.
func TestResetDuringAbsence(t *testing.T) {
	signs := map[string]struct {
		signs []resetSign
		want  string
	}{
		"nothing": {none[:1], "unhealthy XID_119"}, "one counter": {weak[:1], "unhealthy XID_119"}, "two counters": {weak[:2], "healthy "},
	}
	for _, s := range strong {
		signs[s.name] = struct {
			signs []resetSign
			want  string
		}{[]resetSign{s}, "healthy "}
	}
	for name, tc := range signs {
		l := newRestartFixture(t, coretest.GPUs(1))
		for _, s := range tc.signs {
			if s.before != nil {
				s.before(l.samples[coretest.GPU(0)])
			}
		}
		l.read(1)
		l.observe(xidEvent(gpuAt(0), 119))
		l.restart("boot", "boot")
		l.now = l.now.Add(time.Hour)
		for _, s := range tc.signs {
			s.after(l.samples[coretest.GPU(0)])
		}
		l.read(8)
		l.expect(name, map[gpu.DeviceID]string{coretest.GPU(0): tc.want})
	}
	t.Run("lost before, responding after it", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(1))
		l.observe(xidEvent(gpuAt(0), 119), health.Observation{At: gpuAt(0), Kind: health.Lost})
		l.restart("boot", "boot")
		l.samples[coretest.GPU(0)].Energy.Value = 100
		l.read(1)
		l.expect("at the first check", map[gpu.DeviceID]string{coretest.GPU(0): "lost LOST"})
		l.read(8)
		l.expect("in the end", map[gpu.DeviceID]string{coretest.GPU(0): "healthy "})
	})
	t.Run("back before the restart", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(1))
		l.observe(health.Observation{At: gpuAt(0), Kind: health.Lost})
		l.read(1)
		l.observe(xidEvent(gpuAt(0), 119))
		l.restart("boot", "boot")
		l.read(30)
		l.expect("it responded before the fault", map[gpu.DeviceID]string{coretest.GPU(0): "unhealthy XID_119"})
	})
	t.Run("errors while no agent was running", func(t *testing.T) {
		l := newRestartFixture(t, coretest.GPUs(1))
		l.restart("boot", "boot")
		l.samples[coretest.GPU(0)].Uncorrectable.Value += 3
		l.read(1)
		l.expect("counted on", map[gpu.DeviceID]string{coretest.GPU(0): "degraded ECC_UNCORRECTABLE"})
		l.restart("boot", "other boot")
		l.samples[coretest.GPU(0)].Uncorrectable.Value += 3
		l.read(1)
		l.expect("counted from zero", map[gpu.DeviceID]string{coretest.GPU(0): "healthy "})
	})
}

// A checkpoint can contain values that no agent wrote.
func TestRestoreDamagedCheckpoint(t *testing.T) {
	c := health.Condition{At: gpuAt(1), Reason: health.ReasonXID, Code: 95, State: health.Unhealthy, Since: testStart, Last: testStart, Count: 1}
	later, other := c, c
	later.Last, later.Count = testStart.Add(time.Hour), 2
	other.At = gpuAt(0)
	s := core.Restore(core.DefaultConfig(), core.Checkpoint{BootID: "boot", Conditions: []health.Condition{later, c, other}}, "boot")
	cs := s.Ledger.Conditions()
	if len(cs) != 2 || cs[0].At != other.At || !cs[1].Since.Equal(testStart) || !cs[1].Last.Equal(later.Last) || cs[1].Count != 3 {
		t.Errorf("restored: %+v", cs)
	}
	s = s.Read(core.DefaultConfig(), testStart.Add(2*time.Hour), coretest.GPUs(2), healthyChecks(coretest.GPUs(2))...)
	for u := range s.Allocatable.Units() {
		if u.Health.State != health.Unhealthy {
			t.Errorf("%s: %s", u.ID, u.Health)
		}
	}
	if s := core.Restore(core.DefaultConfig(), core.Checkpoint{}, "boot"); s.NeedsTick() || len(slices.Collect(s.Allocatable.Units())) != 0 {
		t.Error("an empty checkpoint has an effect")
	}
}
