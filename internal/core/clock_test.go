package core_test

import (
	stdcmp "cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

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
		{"nothing jumped", core.Boot{ID: "a", Time: booted}, in(time.Minute), at, booted},
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
			got.BootID = stdcmp.Or(tc.boot.ID, got.BootID)
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

// A second process starts after a reboot, before the driver is ready, as after a change of the configuration. Both
// checkpoints are of the new boot.
func TestCheckpointBeforeFirstSnapshot(t *testing.T) {
	l := newRestartFixture(t, coretest.GPUs(2))
	l.restart("a", "b")
	l.noDriver(gpu.DriverAbsent)
	if r := l.state.Checkpoint("b"); r.BootID != "b" || !r.NotReadSinceBoot {
		t.Errorf("boot %q, unread %t", r.BootID, r.NotReadSinceBoot)
	}
	l.restart("b", "b")
	l.noDriver(gpu.DriverAbsent)
	l.expect("no driver since the reboot", map[gpu.DeviceID]string{})
	l.read(2)
	if r := l.state.Checkpoint("b"); r.NotReadSinceBoot {
		t.Error("unread")
	}
	l.observe(xidEvent(gpuAt(1), 119))
	l.restart("b", "b")
	l.read(1)
	l.expect("restarted", map[gpu.DeviceID]string{coretest.GPU(0): "healthy ", coretest.GPU(1): "unhealthy XID_119"})
}

// The memory for codes that a driver invents is bounded, and codes with a name are still counted.
func TestBoundedUnderRandomCodes(t *testing.T) {
	const gpus, total, batch = 4, 1_000_000, 1000
	random := rand.New(rand.NewPCG(1, 2))
	p, l, now := health.DefaultPolicy(), health.Ledger{}, testStart
	obs := make([]health.Observation, batch)
	for range total / batch {
		for i := range obs {
			obs[i] = xidEvent(gpu.WholeGPU(gpu.DeviceID(fmt.Sprint("GPU-", random.IntN(gpus)))), random.Uint64())
		}
		now = now.Add(10 * time.Millisecond)
		l = l.Apply(p, now, obs...)
	}
	if n := len(l.Conditions()); n > gpus*70 {
		t.Errorf("%d conditions", n)
	}
	var counted uint64
	for i := range gpus {
		history, _ := l.History(gpu.DeviceID(fmt.Sprint("GPU-", i)))
		if n := len(history.FaultCounts); n > 70 {
			t.Errorf("%d tallies", n)
		}
		for _, tally := range history.FaultCounts {
			counted += tally.Count
		}
	}
	if counted != total {
		t.Errorf("%d of %d XIDs were counted", counted, total)
	}
	lost := gpu.WholeGPU("GPU-0")
	if h := l.Apply(p, now, xidEvent(lost, 79)).Health(lost); h.Code != 79 {
		t.Errorf("a known XID afterwards: %s", h)
	}
}

// A year of faults takes no more memory than a day.
func TestBoundedOverUptime(t *testing.T) {
	s := newLedgerFixture(t)
	size := func() int {
		record := core.State{Ledger: s.ledger}.Checkpoint("boot")
		text, err := json.Marshal(record)
		if err != nil {
			t.Fatal(err)
		}
		return len(text)
	}
	day := func() {
		for hour := range 24 {
			s.allocate(a)
			s.reportXIDs(13, 31, 80, 94, 95, 109, 500+uint64(hour))
			s.setSample(func(v *health.Sample) { v.Uncorrectable.Value++ })
			s.check(3)
			s.reset()
			s.failing[a.GPU] = health.Lost
			s.check(2)
			delete(s.failing, a.GPU)
			s.check(10)
			s.now = s.now.Add(time.Hour)
			_, _ = s.clear(health.Command{})
		}
	}
	for range 2 {
		day()
	}
	first := size()
	for range 30 {
		day()
	}
	if last := size(); last > first+first/10 {
		t.Errorf("%d bytes after two days, %d after a month", first, last)
	}
}
