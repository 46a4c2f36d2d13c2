package health

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig/inprocess"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// agent reads a simulated machine. It does in one goroutine what the monitor does in three, and only in update and step.
type agent struct {
	*simdriver.Machine
	t         testing.TB
	cfg       core.Config
	now       time.Time
	deadline  time.Duration // how long the session waits for a call
	session   *nvidia.Session
	state     core.State
	read      time.Time // time of the latest snapshot
	published []publication
}

// publication is an inventory whose units differ from those of the previous one.
type publication struct {
	at          time.Time
	allocatable *inventory.Allocatable
}

// testStart is the time at which every test begins.
var testStart = time.Date(2026, time.November, 20, 10, 0, 0, 0, time.UTC)

// newAgent starts a machine. The driver is called from the first update on.
func newAgent(t testing.TB, machine string, tune ...func(*core.Config)) *agent {
	t.Helper()
	m := &agent{Machine: simdriver.Start(t, machine), t: t, now: testStart, state: core.State{Allocatable: &inventory.Allocatable{}}}
	m.cfg = configOf(m.Machine, tune...)
	must(t, m.cfg.Validate())
	m.publish(core.NewState(m.cfg))
	t.Cleanup(m.close)
	return m
}

// newHealthyAgent starts a machine and reads it.
func newHealthyAgent(t testing.TB, machine string, tune ...func(*core.Config)) *agent {
	t.Helper()
	m := newAgent(t, machine, tune...)
	m.update()
	m.expect("at the start", nil)
	return m
}

// configOf is the default configuration, with the files of a machine.
func configOf(m *simdriver.Machine, tune ...func(*core.Config)) core.Config {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	cfg.Roots = inprocess.Roots(m)
	for _, f := range tune {
		f(&cfg)
	}
	return cfg
}

// step advances the clock by d, with an update after each interval between checks.
func (m *agent) step(d time.Duration) {
	m.t.Helper()
	for end := m.now.Add(d); m.now.Before(end); {
		m.now = m.now.Add(min(m.cfg.Probe, end.Sub(m.now)))
		m.update()
	}
}

// update applies the events of the driver, and then a snapshot if one is due, or else a health check.
func (m *agent) update() {
	m.t.Helper()
	if m.session == nil && !m.open() {
		return
	}
	changed := m.readEvents() || m.now.Sub(m.read) >= m.cfg.Rescan
	if !changed {
		obs, err := m.session.Probe()
		if err != nil {
			m.driverLost(err)
			return
		}
		changed = m.observe(obs...)
	}
	if changed {
		m.readSnapshot()
	}
}

// open opens a session.
func (m *agent) open() bool {
	m.t.Helper()
	s, err := nvidia.Open(nvidia.Options{Roots: m.cfg.Roots, Deadline: m.deadline, Now: func() time.Time { return m.now }})
	if err != nil {
		m.driverLost(err)
		return false
	}
	m.session, m.read = s, time.Time{}
	return true
}

func (m *agent) driverLost(err error) {
	m.t.Helper()
	m.close()
	m.publish(m.state.Read(m.cfg, m.now, gpu.Unavailable(err)))
}

// readEvents applies all events that are present, and reports whether one of them requires a snapshot.
func (m *agent) readEvents() (changed bool) {
	m.t.Helper()
	for {
		obs, err := m.session.Wait(0)
		if err != nil || len(obs) == 0 {
			return changed // the check shows why there are no events
		}
		changed = changed || slices.ContainsFunc(obs, func(o health.Observation) bool { return o.Kind == 0 })
		m.observe(obs...)
	}
}

func (m *agent) readSnapshot() {
	m.t.Helper()
	snap, err := m.session.Snapshot()
	if err != nil {
		m.driverLost(err)
		return
	}
	obs, err := m.session.Probe()
	if err != nil {
		m.driverLost(err)
		return
	}
	m.read = m.now
	m.publish(m.state.Read(m.cfg, m.now, snap, obs...))
}

func (m *agent) observe(obs ...health.Observation) (changed bool) {
	return m.publish(m.state.Observe(m.cfg, m.now, obs...))
}

// publish keeps a state, and its inventory if its units differ. It reports whether the inventory differs.
func (m *agent) publish(s core.State) (changed bool) {
	if !slices.Equal(slices.Collect(m.state.Allocatable.Units()), slices.Collect(s.Allocatable.Units())) {
		m.published = append(m.published, publication{m.now, s.Allocatable})
	}
	changed = !s.Allocatable.Equal(m.state.Allocatable)
	m.state = s
	return changed
}

// close closes the session when no call is in progress.
func (m *agent) close() {
	m.t.Helper()
	if m.session == nil {
		return
	}
	await(m.t, "no call in progress", func() bool { return len(m.session.Busy()) == 0 })
	must(m.t, m.session.Close())
	m.session = nil
}

// endHangs ends all faults, and returns when every GPU can be read again.
func (m *agent) endHangs() {
	m.t.Helper()
	must(m.t, m.Heal())
	await(m.t, "no GPU pending", func() bool {
		snap, err := m.session.Snapshot()
		must(m.t, err)
		return !slices.ContainsFunc(snap.Excluded, func(e gpu.Exclusion) bool { return e.Failure == gpu.FailurePending })
	})
}

// xid raises an XID, followed by an update.
func (m *agent) xid(slot int, code uint64, at ...simdriver.At) {
	m.t.Helper()
	must(m.t, m.XID(slot, code, at...))
	m.update()
}

// set changes a GPU; the next update reads it.
func (m *agent) set(slot int, lines ...string) {
	m.t.Helper()
	must(m.t, m.Change(slot, lines...))
}

// health is the published health of the GPU in a slot.
func (m *agent) health(slot int) health.Health {
	m.t.Helper()
	u, ok := m.state.Allocatable.Unit(inventory.UnitID(m.UUID(slot)))
	if !ok {
		m.t.Fatalf("%s is not listed", m.UUID(slot))
	}
	return u.Health
}

// states is the wanted state of each GPU by slot; GPUs that it lacks are healthy.
type states map[int]health.State

// expect compares the state of every GPU without MIG instances.
func (m *agent) expect(when string, want states) {
	m.t.Helper()
	slots, err := m.Slots()
	must(m.t, err)
	for _, slot := range slots {
		if instances, err := m.Instances(slot); err != nil || len(instances) > 0 {
			continue
		}
		if h := m.health(slot); h.State != want[slot] {
			m.t.Errorf("%s, after %v: GPU %d is %s; want %s", when, m.now.Sub(testStart), slot, h, want[slot])
		}
	}
}

// expectNeverHealthy: no publication had the GPU in a slot as healthy.
func (m *agent) expectNeverHealthy(slot int) {
	m.t.Helper()
	for _, p := range m.published {
		if u, ok := p.allocatable.Unit(inventory.UnitID(m.UUID(slot))); ok && u.Health.State == health.Healthy {
			m.t.Errorf("GPU %d was published as healthy after %v", slot, p.at.Sub(testStart))
		}
	}
}

// since returns the publications after t.
func since(published []publication, t time.Time) []publication {
	i := slices.IndexFunc(published, func(p publication) bool { return p.at.After(t) })
	if i < 0 {
		return nil
	}
	return published[i:]
}

var (
	must  = check.NoError
	await = check.Until
)
