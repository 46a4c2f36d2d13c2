package monitor

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/watch"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// eventBatch is the result of one event wait.
type eventBatch struct {
	obs []health.Observation
	err error
}

// runSession opens a session and follows it until its end.
func (m *Monitor) runSession(ctx context.Context) error {
	released := make(chan struct{})
	m.released.Store(released)
	session, err := m.connect(ctx, released)
	if err != nil {
		return err
	}
	return m.followSession(ctx, session, released)
}

// followSession applies what a session reads to the state until the session is lost, maintenance begins or ctx ends.
//
//	reader  <- request - followSession - publish -> state
//	        - result  ->   ^
//	waiter  - eventBatch - '
func (m *Monitor) followSession(ctx context.Context, s Session, released chan<- struct{}) error {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	requests, results, events := make(chan request), make(chan result), make(chan eventBatch)
	var workers sync.WaitGroup
	workers.Go(func() { m.runReader(ctx, s, requests, results) })
	waiter := m.tasks.Register("event wait")
	workers.Go(func() { runWaiter(ctx, s, events, waiter) })
	defer func() { m.endSession(outer, s, &workers, released) }()
	defer cancel()

	rescan, probe := time.NewTicker(m.cfg.Rescan), time.NewTicker(m.cfg.Probe)
	tick := time.NewTicker(checkEvery)
	defer rescan.Stop()
	defer probe.Stop()
	defer tick.Stop()

	pending := pendingRequests{snapshot: true, usage: m.usage}
	defer m.usage.finish(nil, gpu.ErrNoDriver) // for the callers that still wait
	var scheduler probeScheduler
	eventsFail := false
	for {
		var send chan<- request
		m.task.Heartbeat(checkEvery)
		next, any := pending.next()
		if any && !pending.busy {
			send = requests
		}
		select {
		case send <- next:
			pending.start(next)
		case r := <-results:
			pending.busy = false
			if r.request == readUsage {
				m.usage.finish(r.usage, r.err)
				continue
			}
			if r.err != nil {
				m.noDriver(r.err) // before the session is closed, which takes time
				return r.err
			}
			changed := m.handleReading(s, r)
			pending.snapshot = pending.snapshot || changed && r.request == readProbe // a GPU was lost or returned: read all
			scheduler.lastCheck = time.Now()
		case b := <-events:
			eventsFail = b.err != nil
			m.stats.set(func(s *Stats) { s.EventsFail = eventsFail })
			m.handleEvents(b.obs, &pending, &scheduler)
			pending.probe = pending.probe || b.err != nil
		case <-tick.C:
			m.checkCalls(s)
			m.checkNodes(s)
			m.stats.set(func(s *Stats) { s.EventsFail = eventsFail || waiter.Late(time.Now()) })
			pending.probe = pending.probe || scheduler.due(time.Now())
		case o := <-m.reported:
			m.handleEvents([]health.Observation{o}, &pending, &scheduler)
		case <-m.hostChanged:
			m.applyHost()
		case c := <-m.commands:
			if m.apply(c); m.inMaintenance() {
				return errMaintenance
			}
			pending.probe = true
		case <-rescan.C:
			pending.snapshot = true
		case <-probe.C:
			pending.probe = true
		case <-m.usage.requested: // pending.next returns it
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// handleReading applies a reading of health and reports whether that changed the inventory.
func (m *Monitor) handleReading(s Session, r result) (changed bool) {
	if r.request == readProbe {
		return m.observe(r.obs...)
	}
	r.snapshot.Nodes = s.Nodes() // newer ones may have been published since the reading began
	return m.update(func(s core.State, now time.Time) core.State { return s.Read(m.cfg, now, r.snapshot, r.obs...) })
}

// handleEvents applies events immediately and requests the reading or check that they call for.
func (m *Monitor) handleEvents(obs []health.Observation, pending *pendingRequests, scheduler *probeScheduler) {
	if len(obs) == 0 {
		return
	}
	m.observe(obs...)
	// An event that names no fault shows that the GPUs or their layout may have changed.
	pending.snapshot = pending.snapshot || slices.ContainsFunc(obs, func(o health.Observation) bool { return o.Kind == 0 })
	if slices.ContainsFunc(obs, func(o health.Observation) bool { return o.Kind != health.KernelLogRead }) {
		pending.probe = pending.probe || scheduler.event(time.Now())
	}
}

// checkCalls records an overdue call against its GPU and lets time pass in the ledger. A call about a GPU whose UUID was
// never read counts against none.
func (m *Monitor) checkCalls(s Session) {
	var overdue []health.Observation
	stuck, calls := 0, s.Busy()
	for _, call := range calls {
		if time.Since(call.Since) < m.cfg.Health.CallDeadline {
			continue
		}
		stuck++
		if unidentified := call.At == gpu.Node && call.Index >= 0; !unidentified {
			overdue = append(overdue, health.Observation{At: call.At, Kind: health.Unresponsive, Detail: call.Name})
		}
	}
	m.stats.set(func(s *Stats) { s.Stuck, s.Calls = stuck, calls })
	if overdue != nil || m.State().NeedsTick() || m.reservations.pending() {
		m.observe(overdue...)
	}
}

// checkNodes publishes a change of the device nodes. This goroutine lists them, not the reader: nvidia-modprobe creates some
// when the first CUDA program starts, and a container that is created a second later must get them even while the driver is
// slow. /dev is a tmpfs, so listing it waits for no disk.
func (m *Monitor) checkNodes(s Session) {
	state := m.State()
	if nodes := s.Nodes(); state.Snapshot.Driver.State == gpu.DriverReady && !slices.Equal(nodes, state.Snapshot.Nodes) {
		m.update(func(s core.State, now time.Time) core.State { return s.WithNodes(m.cfg, now, nodes) })
	}
}

// endSession closes the session once the workers have left it. If a worker hangs in the driver, it and the session are
// abandoned.
func (m *Monitor) endSession(ctx context.Context, s Session, workers *sync.WaitGroup, released chan<- struct{}) {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		workers.Wait()
		m.closeSession(ctx, s, released)
	}()
	m.awaitOrAbandon(closed, oldestCall(s.Busy()))
	m.stats.set(func(s *Stats) { s.Stuck, s.EventsFail = 0, false })
}

// runReader makes one request at a time of the driver until ctx ends.
//
// A full reading includes a check, so that no device is published as healthy before it was checked. Events are registered for
// by then: the check finds what happened before.
func (m *Monitor) runReader(ctx context.Context, s Session, requests <-chan request, results chan<- result) {
	for {
		r := result{}
		select {
		case r.request = <-requests:
		case <-ctx.Done():
			return
		}
		switch r.request {
		case readSnapshot:
			if r.snapshot, r.err = s.Snapshot(); r.err == nil {
				r.obs, r.err = m.probe(s)
			}
		case readProbe:
			r.obs, r.err = m.probe(s)
		case readUsage:
			r.usage, r.err = s.Usage()
		}
		select {
		case results <- r:
		case <-ctx.Done():
			return
		}
	}
}

// probe checks the health of all GPUs and measures how long that takes.
func (m *Monitor) probe(s Session) ([]health.Observation, error) {
	began := time.Now()
	obs, err := s.Probe()
	m.stats.checked(time.Since(began))
	return obs, err
}

// runWaiter sends events, and a batch when the event wait begins to fail or succeeds again. It pauses after an error, because
// a failed wait returns immediately and a lost GPU would otherwise use a whole CPU core.
func runWaiter(ctx context.Context, s Session, events chan<- eventBatch, task *watchdog.Task) {
	defer task.Done()
	for failing := false; ctx.Err() == nil; {
		task.Heartbeat(waitAtMost + waitPause)
		obs, err := s.Wait(waitAtMost)
		same := (err != nil) == failing
		failing = err != nil
		if !same || len(obs) > 0 {
			select {
			case events <- eventBatch{obs, err}:
			case <-ctx.Done():
				return
			}
		}
		if failing {
			watch.Sleep(ctx, waitPause)
		}
	}
}

// oldestCall is the name of the oldest call in progress; "" if there is none.
func oldestCall(calls []gpu.Call) string {
	if len(calls) == 0 {
		return ""
	}
	return calls[0].Name
}
