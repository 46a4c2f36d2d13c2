package coretest

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Machine is a fake driver that a test controls while a monitor follows it. Make one with NewMachine. All methods are safe for
// concurrent use and work inside a testing/synctest bubble.
type Machine struct {
	mu       sync.Mutex
	snapshot gpu.Snapshot
	openErr  error
	fault    error                                   // of every call of an open session
	failed   map[gpu.DeviceID]health.ObservationKind // GPUs that do not answer
	hang     map[string]hang
	delay    map[string]time.Duration
	busy     gpu.Call
	events   chan health.Observation
	waitErr  error
	calls    map[string]int
	open     int
	nodes    chan struct{} // capacity 1
}

type hang struct {
	at      gpu.Placement
	release chan struct{}
	late    bool // the call hangs at its end
}

// NewMachine returns a machine whose snapshot is s.
func NewMachine(s gpu.Snapshot) *Machine {
	return &Machine{
		snapshot: s,
		failed:   map[gpu.DeviceID]health.ObservationKind{},
		hang:     map[string]hang{},
		delay:    map[string]time.Duration{},
		events:   make(chan health.Observation, 1024),
		calls:    map[string]int{},
		nodes:    make(chan struct{}, 1),
	}
}

// Set replaces the snapshot. Other device nodes are an event.
func (m *Machine) Set(s gpu.Snapshot) {
	m.locked(func() {
		if !slices.Equal(s.Nodes, m.snapshot.Nodes) {
			watch.Notify(m.nodes)
		}
		m.snapshot = s
	})
}

// LoseNodeEvents ends the events of device nodes.
func (m *Machine) LoseNodeEvents() { m.locked(func() { m.nodes = make(chan struct{}, 1) }) }

// FailOpen makes Open fail with err; nil ends that.
func (m *Machine) FailOpen(err error) { m.locked(func() { m.openErr = err }) }

// FailSession makes every call of a session fail with err; nil ends that.
func (m *Machine) FailSession(err error) { m.locked(func() { m.fault = err }) }

// FailWait makes the event wait fail immediately with err; nil ends that.
func (m *Machine) FailWait(err error) { m.locked(func() { m.waitErr = err }) }

// FailGPU makes every call about a GPU fail with kind (Lost or ProbeFailed), until RecoverGPU.
func (m *Machine) FailGPU(id gpu.DeviceID, kind health.ObservationKind) {
	m.locked(func() { m.failed[id] = kind })
}

// RecoverGPU ends FailGPU.
func (m *Machine) RecoverGPU(id gpu.DeviceID) { m.locked(func() { delete(m.failed, id) }) }

// SendEvent queues an event for the event wait.
func (m *Machine) SendEvent(o health.Observation) { m.events <- o }

// Hang makes the next and every later call of a session method ("Open", "Snapshot", "Probe", "Usage",
// "Wait", "Close") block, until the returned function is called.
func (m *Machine) Hang(method string, at gpu.Placement) (release func()) {
	return m.setHang(method, at, false)
}

// HangAfter is Hang for "Snapshot", which blocks at the end of the call.
func (m *Machine) HangAfter(method string, at gpu.Placement) (release func()) {
	return m.setHang(method, at, true)
}

func (m *Machine) setHang(method string, at gpu.Placement, late bool) (release func()) {
	h := hang{at, make(chan struct{}), late}
	m.locked(func() { m.hang[method] = h })
	return func() {
		m.locked(func() { delete(m.hang, method) })
		close(h.release)
	}
}

// Delay makes every call of a session method take d.
func (m *Machine) Delay(method string, d time.Duration) { m.locked(func() { m.delay[method] = d }) }

// Calls is the number of calls of each session method.
func (m *Machine) Calls() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.calls)
}

// Sessions is the number of open sessions.
func (m *Machine) Sessions() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.open
}

// Open opens a session; it is the first argument of monitor.New.
func (m *Machine) Open() (monitor.Session, error) {
	m.enter("Open")
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.openErr != nil {
		return nil, m.openErr
	}
	m.open++
	return &session{m, m.nodes}, nil
}

func (m *Machine) locked(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// enter counts a call, and waits for its delay and while it hangs.
func (m *Machine) enter(method string) {
	var delay time.Duration
	m.locked(func() { m.calls[method]++; delay = m.delay[method] })
	time.Sleep(delay)
	m.block(method, false)
}

// block waits while a call hangs, at its beginning or (late) at its end.
func (m *Machine) block(method string, late bool) {
	m.mu.Lock()
	h, stuck := m.hang[method]
	stuck = stuck && h.late == late
	if stuck && method != "Wait" {
		m.busy = gpu.Call{Name: "nvml" + method, At: h.at, Index: -1, Since: time.Now()}
	}
	m.mu.Unlock()
	if stuck {
		<-h.release
		m.locked(func() { m.busy = gpu.Call{} })
	}
}

// session implements monitor.Session.
type session struct {
	m     *Machine
	nodes <-chan struct{}
}

func (s *session) Snapshot() (gpu.Snapshot, error) {
	s.m.enter("Snapshot")
	read, err := s.read()
	s.m.block("Snapshot", true)
	return read, err
}

func (s *session) read() (gpu.Snapshot, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	read := s.m.snapshot
	read.Devices = slices.DeleteFunc(slices.Clone(read.Devices), func(d gpu.Device) bool {
		_, failed := s.m.failed[d.At.GPU]
		return failed
	})
	read.Excluded = slices.Clone(read.Excluded)
	for _, d := range s.m.snapshot.Devices {
		if kind, failed := s.m.failed[d.ID]; failed {
			read.Excluded = append(read.Excluded, gpu.Exclusion{Index: d.Index, At: d.At, PCI: d.PCI, Failure: failure[kind], Reason: "scripted"})
		}
	}
	return gpu.NewSnapshot(read), s.m.fault
}

func (s *session) Probe() ([]health.Observation, error) {
	s.m.enter("Probe")
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	var obs []health.Observation
	for _, d := range s.m.snapshot.Devices {
		if d.Profile != "" {
			continue
		}
		kind := health.Checked
		if k, failed := s.m.failed[d.ID]; failed {
			kind = k
		}
		obs = append(obs, health.Observation{At: gpu.WholeGPU(d.ID), Kind: kind, Detail: map[bool]string{true: "scripted"}[kind != health.Checked]})
	}
	return obs, s.m.fault
}

func (s *session) Wait(most time.Duration) ([]health.Observation, error) {
	s.m.enter("Wait")
	s.m.mu.Lock()
	err := s.m.waitErr
	s.m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	select {
	case o := <-s.m.events:
		return []health.Observation{o}, nil
	case <-time.After(most):
		return nil, nil
	}
}

func (s *session) Usage() ([]gpu.Usage, error) {
	began := time.Now()
	s.m.enter("Usage")
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	var usage []gpu.Usage
	for _, d := range s.m.snapshot.Devices {
		usage = append(usage, gpu.Usage{Device: d.ID, At: began, MemoryTotal: gpu.OptionalUint64Of(d.Memory)})
	}
	return usage, s.m.fault
}

func (s *session) NodesChanged() <-chan struct{} { return s.nodes }

func (s *session) Nodes() []string {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return slices.Sorted(slices.Values(s.m.snapshot.Nodes))
}

func (s *session) Busy() []gpu.Call {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.busy.Since.IsZero() {
		return nil
	}
	return []gpu.Call{s.m.busy}
}

func (s *session) Close() error {
	s.m.enter("Close")
	s.m.locked(func() { s.m.open-- })
	return nil
}

// failure is the Failure of an excluded GPU whose check makes an observation.
var failure = map[health.ObservationKind]gpu.Failure{
	health.Lost: gpu.FailureLost, health.ProbeFailed: gpu.FailureError, health.CallPending: gpu.FailurePending, health.Unresponsive: gpu.FailureHung,
}
