package core_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// restartFixture is a host over restarts of its agent. The samples of its GPUs can be set.
type restartFixture struct {
	testing.TB
	cfg     core.Config
	now     time.Time
	host    core.Snapshot
	samples map[core.DeviceID]*core.HealthSample
	state   core.State
}

// newRestartFixture begins with healthy GPUs and one snapshot.
func newRestartFixture(t testing.TB, machine core.Snapshot) *restartFixture {
	t.Helper()
	l := &restartFixture{TB: t, cfg: core.DefaultConfig(), now: testStart, host: machine, samples: map[core.DeviceID]*core.HealthSample{}}
	l.cfg.MIG = core.MIGMixed
	for _, o := range healthyChecks(machine) {
		l.samples[o.At.GPU] = &o.Sample
	}
	l.state = core.NewState(l.cfg)
	l.read(1)
	return l
}

// gpu returns the placement of the n-th GPU of coretest.GPUs.
func gpu(n int) core.Placement { return core.WholeGPU(coretest.GPU(n)) }

// read reads n snapshots with health checks, one per checkInterval.
func (l *restartFixture) read(n int) {
	for range n {
		l.now = l.now.Add(checkInterval)
		var checks []core.Observation
		for _, d := range l.host.Devices {
			if v, ok := l.samples[d.ID]; ok {
				checks = append(checks, core.Observation{At: d.At, Kind: core.Checked, Sample: *v})
			}
		}
		l.state = l.state.Read(l.cfg, l.now, l.host, checks...)
	}
}

func (l *restartFixture) observe(obs ...core.Observation) {
	l.state = l.state.Observe(l.cfg, l.now, obs...)
}

// noDriver reads a snapshot of a driver that is not ready.
func (l *restartFixture) noDriver(state core.DriverState) {
	l.now = l.now.Add(checkInterval)
	l.state = l.state.Read(l.cfg, l.now, core.NoDriver(state, "not there"))
}

// restart ends the agent and starts another one, under the same boot ID or a new one.
func (l *restartFixture) restart(boot, next string) {
	l.Helper()
	text, err := json.Marshal(l.state.Checkpoint(boot))
	if err != nil {
		l.Fatal(err)
	}
	var record core.Checkpoint
	if err := json.Unmarshal(text, &record); err != nil {
		l.Fatal(err)
	}
	l.state = core.Restore(l.cfg, record, next)
	if n := l.state.Inventory.Len(); n != 0 {
		l.Errorf("%d units are offered before the driver was asked", n)
	}
}

// expect compares the offered devices: state and cause of each.
func (l *restartFixture) expect(when string, want map[core.DeviceID]string) {
	l.Helper()
	got := map[core.DeviceID]string{}
	for u := range l.state.Inventory.Units() {
		got[u.Device.ID] = u.Health.State.String() + " " + u.Health.Cause()
	}
	for id := range want {
		if got[id] != want[id] {
			l.Errorf("%s: %s is %q, want %q", when, id, got[id], want[id])
		}
	}
	if len(got) != len(want) {
		l.Errorf("%s: offered %v, want %v", when, got, want)
	}
}
