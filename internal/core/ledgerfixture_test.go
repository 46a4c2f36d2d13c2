package core_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The GPUs of most tests. Faults happen on a; b must not be affected.
var (
	a = gpu.WholeGPU("GPU-a")
	b = gpu.WholeGPU("GPU-b")
)

// testStart is the time at which every test begins.
var testStart = time.Date(2026, time.November, 20, 10, 31, 0, 0, time.UTC)

const (
	checkInterval = 10 * time.Second // between checks
	never         = time.Duration(0) // as the duration of a recovery that does not happen
)

// ledgerFixture applies observations of two GPUs to a ledger. Its clock advances in check, checkFor and wait only.
type ledgerFixture struct {
	testing.TB
	policy  health.Policy
	now     time.Time
	ledger  health.Ledger
	samples map[gpu.DeviceID]*health.Sample         // result of the next check
	failing map[gpu.DeviceID]health.ObservationKind // observed instead of a check
}

// newLedgerFixture returns a ledger with driver 580 and two GPUs that were checked and are healthy.
func newLedgerFixture(t testing.TB, tune ...func(*health.Policy)) *ledgerFixture {
	t.Helper()
	s := newUncheckedFixture(t, "580.95.05", tune...)
	s.check(1)
	s.expect("at the beginning", health.Healthy, "")
	return s
}

// newUncheckedFixture returns a ledger before the first check.
func newUncheckedFixture(t testing.TB, driver string, tune ...func(*health.Policy)) *ledgerFixture {
	t.Helper()
	va, vb := healthySample(), healthySample()
	s := &ledgerFixture{
		TB: t, policy: health.DefaultPolicy(), now: testStart,
		samples: map[gpu.DeviceID]*health.Sample{a.GPU: &va, b.GPU: &vb},
		failing: map[gpu.DeviceID]health.ObservationKind{},
	}
	for _, f := range tune {
		f(&s.policy)
	}
	s.observe(driverAvailable(driver))
	return s
}

// healthySample is the sample of a healthy GPU that reports every value.
func healthySample() health.Sample {
	gauge := func(v uint64) gpu.OptionalUint64 { return gpu.OptionalUint64{Value: v, OK: true} }
	return health.Sample{
		RecoveryAction: health.RecoveryNone,
		RemapPending:   health.No, RemapFailed: health.No, RepairPending: health.No, Unrepairable: health.No,
		SRAMThreshold: health.No, InfoROMCorrupt: health.No, Events: health.Yes,
		Uncorrectable: gauge(2), Energy: gauge(5_000_000), Replays: gauge(40),
		ThermalSlowdown: gauge(0), PowerBrake: gauge(0),
		PCIeWidth: 16, PCIeMaxWidth: 16, PCIeGen: 5, LinksUp: gauge(18), Fabric: health.FabricHealthy,
	}
}

func driverAvailable(driver string) health.Observation {
	return health.Observation{At: gpu.Node, Kind: health.DriverAvailable, Detail: driver}
}

func xidEvent(at gpu.Placement, code uint64) health.Observation {
	return health.Observation{At: at, Kind: health.XID, Code: code}
}

func gi(n uint32) gpu.Placement { return gpu.Placement{GPU: a.GPU, GI: n, CI: gpu.Whole} }

func ci(g, c uint32) gpu.Placement { return gpu.Placement{GPU: a.GPU, GI: g, CI: c} }

// setSample changes the sample of a from the next check on.
func (s *ledgerFixture) setSample(change func(*health.Sample)) { change(s.samples[a.GPU]) }

// newFixtureWith returns a ledger with another sample of a from the beginning.
func newFixtureWith(t testing.TB, driver string, change func(*health.Sample)) *ledgerFixture {
	t.Helper()
	s := newUncheckedFixture(t, driver)
	s.setSample(change)
	s.check(1)
	return s
}

// observe applies observations now.
func (s *ledgerFixture) observe(obs ...health.Observation) {
	s.ledger = s.ledger.Apply(s.policy, s.now, obs...)
}

// reportXIDs reports XIDs of a, now.
func (s *ledgerFixture) reportXIDs(codes ...uint64) {
	for _, code := range codes {
		s.observe(xidEvent(a, code))
	}
}

// check waits for checkInterval and checks both GPUs, n times.
func (s *ledgerFixture) check(n int) {
	for range n {
		s.now = s.now.Add(checkInterval)
		var obs []health.Observation
		for _, at := range []gpu.Placement{a, b} {
			o := health.Observation{At: at, Kind: health.Checked, Sample: *s.samples[at.GPU]}
			if kind, failed := s.failing[at.GPU]; failed {
				o = health.Observation{At: at, Kind: kind, Detail: "reported by the driver"}
			}
			obs = append(obs, o)
		}
		s.observe(obs...)
	}
}

// checkFor checks for as long as d.
func (s *ledgerFixture) checkFor(d time.Duration) { s.check(int(d / checkInterval)) }

// wait advances the clock by d without a check.
func (s *ledgerFixture) wait(d time.Duration) {
	s.now = s.now.Add(d)
	s.observe()
}

// reset resets a as the recovery action required: the strongest sign of a reset.
func (s *ledgerFixture) reset() {
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset })
	s.check(1)
	s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryNone })
	s.check(1)
}

// recovery checks until a is healthy and returns how long that took; never after two hours.
func (s *ledgerFixture) recovery() time.Duration {
	began := s.now
	for s.now.Sub(began) < 2*time.Hour {
		if s.ledger.Health(a).State == health.Healthy {
			return s.now.Sub(began)
		}
		s.check(1)
	}
	return never
}

// expect compares the health of a, and requires that b is healthy.
func (s *ledgerFixture) expect(when string, state health.State, cause string) {
	s.Helper()
	s.expectAt(when, a, state, cause)
	if h := s.ledger.Health(b); h.State != health.Healthy {
		s.Errorf("%s the neighbour is %s", when, h)
	}
}

func (s *ledgerFixture) expectAt(when string, at gpu.Placement, state health.State, cause string) {
	s.Helper()
	if h := s.ledger.Health(at); h.State != state || h.Cause() != cause {
		s.Errorf("%s %v is %q (%s), want %s (%s)", when, at, h, h.Cause(), state, cause)
	}
}

// expectRecovery compares the time until a is healthy.
func (s *ledgerFixture) expectRecovery(when string, want time.Duration) {
	s.Helper()
	if got := s.recovery(); got != want {
		s.Errorf("%s it takes %v until a is healthy, want %v; %s", when, got, want, s.ledger.Health(a))
	}
}

// condition returns the condition with that cause on a or one of its instances.
func (s *ledgerFixture) condition(cause string) health.Condition {
	s.Helper()
	for _, c := range s.ledger.Conditions() {
		if c.At.GPU == a.GPU && c.Cause() == cause {
			return c
		}
	}
	s.Fatalf("no condition %s: %v", cause, s.ledger.Conditions())
	return health.Condition{}
}

// history returns the history of a.
func (s *ledgerFixture) history() health.GPUHistory {
	s.Helper()
	c, ok := s.ledger.History(a.GPU)
	if !ok {
		s.Fatal("no history")
	}
	return c
}

// restartFixture is a node over restarts of its agent. The samples of its GPUs can be set.
type restartFixture struct {
	testing.TB
	cfg     core.Config
	now     time.Time
	host    gpu.Snapshot
	samples map[gpu.DeviceID]*health.Sample
	state   core.State
}

// newRestartFixture begins with healthy GPUs and one snapshot.
func newRestartFixture(t testing.TB, machine gpu.Snapshot) *restartFixture {
	t.Helper()
	l := &restartFixture{TB: t, cfg: core.DefaultConfig(), now: testStart, host: machine, samples: map[gpu.DeviceID]*health.Sample{}}
	l.cfg.MIG = inventory.MIGMixed
	for _, o := range healthyChecks(machine) {
		l.samples[o.At.GPU] = &o.Sample
	}
	l.state = core.NewState(l.cfg)
	l.read(1)
	return l
}

// gpuAt returns the placement of the n-th GPU of coretest.GPUs.
func gpuAt(n int) gpu.Placement { return gpu.WholeGPU(coretest.GPU(n)) }

// read reads n snapshots with health checks, one per checkInterval.
func (l *restartFixture) read(n int) {
	for range n {
		l.now = l.now.Add(checkInterval)
		var checks []health.Observation
		for _, d := range l.host.Devices {
			if v, ok := l.samples[d.ID]; ok {
				checks = append(checks, health.Observation{At: d.At, Kind: health.Checked, Sample: *v})
			}
		}
		l.state = l.state.Read(l.cfg, l.now, l.host, checks...)
	}
}

func (l *restartFixture) observe(obs ...health.Observation) {
	l.state = l.state.Observe(l.cfg, l.now, obs...)
}

// noDriver reads a snapshot of a driver that is not ready.
func (l *restartFixture) noDriver(state gpu.DriverState) {
	l.now = l.now.Add(checkInterval)
	l.state = l.state.Read(l.cfg, l.now, gpu.NoDriver(state, "not there"))
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
	if n := l.state.Allocatable.Len(); n != 0 {
		l.Errorf("%d units are offered before the first snapshot", n)
	}
}

// expect compares the offered devices: state and cause of each.
func (l *restartFixture) expect(when string, want map[gpu.DeviceID]string) {
	l.Helper()
	got := map[gpu.DeviceID]string{}
	for u := range l.state.Allocatable.Units() {
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
