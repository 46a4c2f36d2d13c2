package health

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// rig is a machine followed by hand. It does in one goroutine what the monitor does in three, and nothing
// happens but in step, look and hear:
//
//	step(30s) = clock +10s, look; clock +10s, look; clock +10s, look
//	look      = hear, then a reading if one is due, else a check
type rig struct {
	*simdriver.Machine
	t         testing.TB
	cfg       core.Config
	now       time.Time // the clock of everything that is judged here
	patience  time.Duration
	session   *nvidia.Session
	state     core.State
	read      time.Time     // when the machine was read last
	published []publication // what an orchestrator would have been told
}

// publication is an inventory whose units differ from those before.
type publication struct {
	at        time.Time
	inventory *inventory.Inventory
}

// tells reports whether an orchestrator hears of the second inventory: it knows units, not links.
func tells(prev, next *inventory.Inventory) bool {
	return !slices.Equal(slices.Collect(prev.Units()), slices.Collect(next.Units()))
}

// begin is when every test begins.
var begin = time.Date(2026, time.November, 20, 10, 0, 0, 0, time.UTC)

// newRig lays out a machine; nobody has asked it anything yet. Prepare it, then call look.
func newRig(t testing.TB, machine string, tune ...func(*core.Config)) *rig {
	t.Helper()
	return rigOn(t, simdriver.Start(t, machine), tune...)
}

// rigOn is newRig for a machine that is laid out already.
func rigOn(t testing.TB, machine *simdriver.Machine, tune ...func(*core.Config)) *rig {
	t.Helper()
	m := &rig{Machine: machine, t: t, cfg: core.DefaultConfig(), now: begin}
	m.cfg.MIG, m.cfg.Roots = inventory.MIGMixed, rootsOf(m.Machine)
	for _, f := range tune {
		f(&m.cfg)
	}
	if err := m.cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	m.publish(core.NewState(m.cfg))
	t.Cleanup(m.close)
	return m
}

// well is a rig whose machine was looked at and is well.
func well(t testing.TB, machine string, tune ...func(*core.Config)) *rig {
	t.Helper()
	m := newRig(t, machine, tune...)
	m.look()
	m.expect("at the start", nil)
	return m
}

func rootsOf(m *simdriver.Machine) core.Roots {
	return core.Roots{Driver: m.Root, Dev: m.Root, Sys: filepath.Join(m.Root, "sys"), Proc: filepath.Join(m.Root, "proc")}
}

// step lets the time pass, a probe period at a time.
func (m *rig) step(d time.Duration) {
	m.t.Helper()
	for end := m.now.Add(d); m.now.Before(end); {
		m.now = m.now.Add(min(m.cfg.Probe, end.Sub(m.now)))
		m.look()
	}
}

// look is one round: events first, then what the driver says now.
func (m *rig) look() {
	m.t.Helper()
	if m.session == nil && !m.open() {
		return
	}
	hint := m.hear()
	if hint || m.now.Sub(m.read) >= m.cfg.Rescan {
		m.scan()
		return
	}
	if m.check() {
		m.scan() // a GPU went or came: read what that means
	}
}

// open opens a session; false if the driver does not let it, which is published.
func (m *rig) open() bool {
	m.t.Helper()
	s, err := nvidia.Open(nvidia.Options{Roots: m.cfg.Roots, Deadline: m.patience, Now: func() time.Time { return m.now }})
	if err != nil {
		m.noDriver(err)
		return false
	}
	m.session, m.read = s, time.Time{}
	return true
}

// noDriver takes in that there is no session, and why.
func (m *rig) noDriver(err error) {
	m.t.Helper()
	if m.session != nil {
		m.close()
	}
	m.publish(m.state.Read(m.cfg, m.now, gpu.Unavailable(err)))
}

// hear folds all events that wait, and reports whether one of them says that the machine changed.
func (m *rig) hear() (hint bool) {
	m.t.Helper()
	for {
		obs, err := m.session.Wait(0)
		if err != nil || len(obs) == 0 {
			return hint // why there are no events, the check shows
		}
		hint = hint || slices.ContainsFunc(obs, func(o health.Observation) bool { return o.Kind == 0 })
		m.observe(obs...)
	}
}

// scan reads the machine, with a check.
func (m *rig) scan() {
	m.t.Helper()
	snap, err := m.session.Snapshot()
	if err != nil {
		m.noDriver(err)
		return
	}
	obs, err := m.session.Probe()
	if err != nil {
		m.noDriver(err)
		return
	}
	m.read = m.now
	m.publish(m.state.Read(m.cfg, m.now, snap, obs...))
}

// check asks every GPU, and reports whether that changed what is offered.
func (m *rig) check() (changed bool) {
	m.t.Helper()
	obs, err := m.session.Probe()
	if err != nil {
		m.noDriver(err)
		return false
	}
	return m.observe(obs...)
}

func (m *rig) observe(obs ...health.Observation) (changed bool) {
	return m.publish(m.state.Observe(m.cfg, m.now, obs...))
}

// publish keeps a state, and its inventory if an orchestrator would be told. It reports whether the
// inventory changed at all.
func (m *rig) publish(s core.State) (changed bool) {
	if tells(m.state.Inventory, s.Inventory) {
		m.published = append(m.published, publication{m.now, s.Inventory})
	}
	changed = !s.Inventory.Equal(m.state.Inventory)
	m.state = s
	return changed
}

// close ends the session, once no call is in the driver.
func (m *rig) close() {
	m.t.Helper()
	if m.session == nil {
		return
	}
	until(m.t, "no call is in the driver", func() bool { return len(m.session.Busy()) == 0 })
	if err := m.session.Close(); err != nil {
		m.t.Error("close:", err)
	}
	m.session = nil
}

// heal ends all faults, and returns when the driver can be asked about every GPU again.
func (m *rig) heal() {
	m.t.Helper()
	must(m.t, m.Heal())
	until(m.t, "nobody is waited for", func() bool {
		snap, err := m.session.Snapshot()
		must(m.t, err)
		return !slices.ContainsFunc(snap.Excluded, func(e gpu.Exclusion) bool { return e.Failure == gpu.FailurePending })
	})
}

// xid raises an XID and has it heard at once.
func (m *rig) xid(slot int, code uint64, at ...simdriver.At) {
	m.t.Helper()
	must(m.t, m.XID(slot, code, at...))
	m.look()
}

// event raises another event and has it heard at once.
func (m *rig) event(slot int, kind uint64) {
	m.t.Helper()
	must(m.t, m.Event(slot, kind, 0))
	m.look()
}

// set changes the machine; it is noticed at the next look.
func (m *rig) set(slot int, lines ...string) {
	m.t.Helper()
	must(m.t, m.Change(slot, lines...))
}

// reset resets a GPU; it is noticed at the next look.
func (m *rig) reset(slot int) {
	m.t.Helper()
	must(m.t, m.Reset(slot))
}
