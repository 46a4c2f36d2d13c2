package coretest

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Machine is a driver that a test scripts while a monitor follows it. Make one with NewMachine. All methods
// are safe for concurrent use and work inside a testing/synctest bubble.
type Machine struct {
	mu       sync.Mutex
	snapshot core.Snapshot
	openErr  error
	fault    error // of every call of an open session
	lost     map[core.DeviceID]core.ObservationKind
	hang     map[string]hang
	slow     map[string]time.Duration
	busy     core.Call
	events   chan core.Observation
	waitErr  error
	calls    map[string]int
	open     int
}

type hang struct {
	at      core.Placement
	release chan struct{}
	late    bool // the call has read everything when it hangs
}

// NewMachine returns a machine that reads as s.
func NewMachine(s core.Snapshot) *Machine {
	return &Machine{
		snapshot: s,
		lost:     map[core.DeviceID]core.ObservationKind{},
		hang:     map[string]hang{},
		slow:     map[string]time.Duration{},
		events:   make(chan core.Observation, 1024),
		calls:    map[string]int{},
	}
}

// Set replaces what the machine reads as.
func (m *Machine) Set(s core.Snapshot) { m.locked(func() { m.snapshot = s }) }

// FailOpen makes Open fail with err; nil heals it.
func (m *Machine) FailOpen(err error) { m.locked(func() { m.openErr = err }) }

// FailSession makes every call of a session fail with err; nil heals it.
func (m *Machine) FailSession(err error) { m.locked(func() { m.fault = err }) }

// FailWait makes the event wait fail at once with err; nil heals it.
func (m *Machine) FailWait(err error) { m.locked(func() { m.waitErr = err }) }

// Silence makes a GPU answer with kind (Lost or ProbeFailed).
func (m *Machine) Silence(id core.DeviceID, kind core.ObservationKind) {
	m.locked(func() { m.lost[id] = kind })
}

// Restore makes a silenced GPU answer again.
func (m *Machine) Restore(id core.DeviceID) { m.locked(func() { delete(m.lost, id) }) }

// Raise queues an event.
func (m *Machine) Raise(o core.Observation) { m.events <- o }

// Hang makes the next and every later call of a session method ("Open", "Snapshot", "Probe", "Usage",
// "Wait", "Close") block, until the returned function is called.
func (m *Machine) Hang(method string, at core.Placement) (release func()) {
	return m.block(method, at, false)
}

// HangAfter is Hang for "Snapshot", which blocks when it has read everything.
func (m *Machine) HangAfter(method string, at core.Placement) (release func()) {
	return m.block(method, at, true)
}

func (m *Machine) block(method string, at core.Placement, late bool) (release func()) {
	h := hang{at, make(chan struct{}), late}
	m.locked(func() { m.hang[method] = h })
	return func() {
		m.locked(func() { delete(m.hang, method) })
		close(h.release)
	}
}

// Slow makes every call of a session method take so long.
func (m *Machine) Slow(method string, d time.Duration) { m.locked(func() { m.slow[method] = d }) }

// Calls says how often each session method was called.
func (m *Machine) Calls() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.calls)
}

// Sessions is the number of sessions that are open.
func (m *Machine) Sessions() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.open
}

// Open is what monitor.New wants.
func (m *Machine) Open() (monitor.Session, error) {
	m.enter("Open")
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.openErr != nil {
		return nil, m.openErr
	}
	m.open++
	return &session{m}, nil
}

func (m *Machine) locked(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// enter counts a call, and takes as long as it is slow and hangs.
func (m *Machine) enter(method string) {
	var slow time.Duration
	m.locked(func() { m.calls[method]++; slow = m.slow[method] })
	time.Sleep(slow)
	m.sit(method, false)
}

// sit sits out a hang at the beginning of a call, or late.
func (m *Machine) sit(method string, late bool) {
	m.mu.Lock()
	h, stuck := m.hang[method]
	stuck = stuck && h.late == late
	if stuck && method != "Wait" {
		m.busy = core.Call{Name: "nvml" + method, At: h.at, Index: -1, Since: time.Now()}
	}
	m.mu.Unlock()
	if stuck {
		<-h.release
		m.locked(func() { m.busy = core.Call{} })
	}
}

// session implements monitor.Session.
type session struct{ m *Machine }

func (s *session) Snapshot() (core.Snapshot, error) {
	s.m.enter("Snapshot")
	read, err := s.read()
	s.m.sit("Snapshot", true)
	return read, err
}

func (s *session) read() (core.Snapshot, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	read := s.m.snapshot
	read.Devices = slices.DeleteFunc(slices.Clone(read.Devices), func(d core.Device) bool {
		_, silent := s.m.lost[d.At.GPU]
		return silent
	})
	read.Excluded = slices.Clone(read.Excluded)
	for _, d := range s.m.snapshot.Devices {
		if kind, silent := s.m.lost[d.ID]; silent {
			read.Excluded = append(read.Excluded, core.Exclusion{Index: d.Index, At: d.At, PCI: d.PCI, Failure: failure[kind], Reason: "scripted"})
		}
	}
	return core.NewSnapshot(read), s.m.fault
}

func (s *session) Probe() ([]core.Observation, error) {
	s.m.enter("Probe")
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	var obs []core.Observation
	for _, d := range s.m.snapshot.Devices {
		if d.Profile != "" {
			continue
		}
		kind := core.Checked
		if k, silent := s.m.lost[d.ID]; silent {
			kind = k
		}
		obs = append(obs, core.Observation{At: core.WholeGPU(d.ID), Kind: kind, Detail: map[bool]string{true: "scripted"}[kind != core.Checked]})
	}
	return obs, s.m.fault
}

func (s *session) Wait(most time.Duration) ([]core.Observation, error) {
	s.m.enter("Wait")
	s.m.mu.Lock()
	err := s.m.waitErr
	s.m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	select {
	case o := <-s.m.events:
		return []core.Observation{o}, nil
	case <-time.After(most):
		return nil, nil
	}
}

func (s *session) Usage() ([]core.Usage, error) {
	began := time.Now()
	s.m.enter("Usage")
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	var usage []core.Usage
	for _, d := range s.m.snapshot.Devices {
		usage = append(usage, core.Usage{Device: d.ID, At: began, MemoryTotal: core.OptionalUint64Of(d.Memory)})
	}
	return usage, s.m.fault
}

func (s *session) Nodes() []string {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return slices.Sorted(slices.Values(s.m.snapshot.Nodes))
}

func (s *session) Busy() []core.Call {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.busy.Since.IsZero() {
		return nil
	}
	return []core.Call{s.m.busy}
}

func (s *session) Close() error {
	s.m.enter("Close")
	s.m.locked(func() { s.m.open-- })
	return nil
}

// failure is why a reading excludes a GPU of which a check makes an observation.
var failure = map[core.ObservationKind]core.Failure{
	core.Lost: core.FailureLost, core.ProbeFailed: core.FailureError, core.CallPending: core.FailurePending, core.Unresponsive: core.FailureHung,
}
