package core_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

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
