package monitor

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

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

// followSession applies what a session reads to the state until the session is lost, maintenance or a release of the driver begins, or ctx ends.
//
//	reader  <- request - followSession - publish -> state
//	        - result  ->   ^
//	waiter  - eventBatch - '
//
// An idle agent is woken by the end of an event wait, each waitAtMost, and looks then at what no event reports. The tick is for
// when that is not enough: something is due sooner, or the event wait does not return.
func (m *Monitor) followSession(ctx context.Context, s Session, released chan<- struct{}) error {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	requests, results, events := make(chan request), make(chan result), make(chan eventBatch)
	last := make(chan []health.Observation, 1)
	var workers sync.WaitGroup
	workers.Go(func() { m.runReader(ctx, s, requests, results) })
	waiter := m.tasks.Register("event wait")
	workers.Go(func() { last <- runWaiter(ctx, s, events, waiter) })
	defer func() {
		m.endSession(outer, s, &workers, released)
		m.observeLast(last)
	}()
	defer cancel()

	rescan, probe := time.NewTicker(m.cfg.Rescan), time.NewTicker(m.cfg.Probe)
	defer rescan.Stop()
	defer probe.Stop()
	f := followed{
		Session: s, pending: pendingRequests{snapshot: true, usage: m.usage, limits: m.limits}, waiter: waiter,
		tick: time.NewTicker(checkEvery), interval: checkEvery,
	}
	defer f.tick.Stop()
	defer m.usage.finish(nil, gpu.ErrNoDriver) // for the callers that still wait
	defer m.limits.end()
	for {
		var send chan<- request
		m.task.Heartbeat(f.interval)
		next, any := f.pending.next()
		if any && !f.pending.busy {
			send = requests
		}
		select {
		case send <- next:
			f.pending.start(next)
		case r := <-results:
			if err := m.handleResult(&f, r); err != nil {
				return err
			}
		case b := <-events:
			m.handleBatch(&f, b)
		case <-s.NodesChanged():
			m.checkNodes(&f)
		case <-f.tick.C:
			m.look(&f)
		case o := <-m.reported:
			m.handleEvents(&f, o)
		case <-m.hostChanged:
			if m.applyHost(); m.paused() {
				return errMaintenance
			}
		case c := <-m.commands:
			if m.apply(c); m.paused() {
				return errMaintenance
			}
			f.pending.probe = true
		case <-rescan.C:
			f.pending.snapshot = true
		case <-probe.C:
			f.pending.probe = true
		case <-m.usage.requested: // pending.next returns it
		case <-m.limits.requested:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// followed is a session that Run's goroutine follows.
type followed struct {
	Session
	pending      pendingRequests
	scheduler    probeScheduler
	waiter       *watchdog.Task
	eventsFail   bool // the latest event wait failed
	tick         *time.Ticker
	nodesChecked time.Time
	interval     time.Duration // of tick: checkEvery, or idleEvery while nothing is due sooner than the next event wait ends
}

// handleResult applies a reading. An error ends the session.
func (m *Monitor) handleResult(f *followed, r result) error {
	f.pending.busy = false
	switch {
	case r.request == readUsage:
		m.usage.finish(r.usage, r.err)
		return nil
	case r.request == callLimits: // the reader has answered the caller
		return nil
	case r.err != nil:
		m.noDriver(r.err) // before the session is closed, which takes time
		return r.err
	}
	changed := m.handleReading(f, r)
	f.pending.snapshot = f.pending.snapshot || changed && r.request == readProbe // a GPU was lost or returned: read all
	f.scheduler.lastCheck = time.Now()
	f.setInterval(m.State())
	return nil
}

// handleReading applies a reading of health and reports whether that changed the inventory.
func (m *Monitor) handleReading(s Session, r result) (changed bool) {
	if r.request == readProbe {
		return m.observe(r.obs...)
	}
	m.limits.unsupported.Store(&r.limits)
	r.snapshot.Nodes = s.Nodes() // newer ones may have been published since the reading began
	return m.update(func(s core.State, now time.Time) core.State { return s.Read(m.cfg, now, r.snapshot, r.obs...) })
}

// handleEvents applies events immediately and requests the reading or check that they call for.
func (m *Monitor) handleEvents(f *followed, obs ...health.Observation) {
	if len(obs) == 0 {
		return
	}
	m.observe(obs...)
	// An event that names no fault shows that the GPUs or their layout may have changed. Of those that name no GPU either there may be any number.
	for _, o := range obs {
		f.pending.snapshot = f.pending.snapshot || o.Kind == 0 && o.At != gpu.Node
		f.scheduler.changed = f.scheduler.changed || o.Kind == 0 && o.At == gpu.Node
	}
	f.pending.snapshot = f.pending.snapshot || f.scheduler.full(time.Now())
	m.logged.logOperational(m.log, obs)
	if slices.ContainsFunc(obs, health.Observation.CallsForCheck) {
		f.pending.probe = f.pending.probe || f.scheduler.event(time.Now())
	}
	f.setInterval(m.State())
}

// look does what no event reports: overdue calls, device nodes, the passage of time, later checks after an event.
func (m *Monitor) look(f *followed) {
	now := time.Now()
	m.checkCalls(f)
	if f.NodesChanged() == nil || now.Sub(f.nodesChecked) >= idleEvery {
		m.checkNodes(f)
	}
	m.stats.set(func(s *Stats) { s.EventsFail = f.noEvents(now) })
	f.pending.snapshot = f.pending.snapshot || f.scheduler.full(now)
	f.pending.probe = f.pending.probe || f.scheduler.due(now)
	m.listPrior()
	if m.State().Release.GPU != "" { // the first reading is not complete
		m.passTime()
	}
	f.setInterval(m.State())
}

// noEvents reports whether the event wait fails or does not return.
func (f *followed) noEvents(now time.Time) bool { return f.eventsFail || f.waiter.Late(now) }

// setInterval sets the interval of the tick. It is short while a call is in progress, which may become overdue, after an event,
// while the event wait fails, and while a unit is about to leave the list.
func (f *followed) setInterval(s core.State) {
	d, now := idleEvery, time.Now()
	if f.pending.busy || f.noEvents(now) || f.scheduler.active(now) || s.Allocatable.Retiring() {
		d = checkEvery
	}
	if d != f.interval {
		f.interval = d
		f.tick.Reset(d)
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
func (m *Monitor) checkNodes(f *followed) {
	f.nodesChecked = time.Now()
	state := m.State()
	if nodes := f.Nodes(); state.Snapshot.Driver.State == gpu.DriverReady && !slices.Equal(nodes, state.Snapshot.Nodes) {
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
				r.limits = limitsUnsupported(s)
				r.obs, r.err = m.probe(s)
			}
		case readProbe:
			r.obs, r.err = m.probe(s)
		case readUsage:
			r.usage, r.err = s.Usage()
		case callLimits:
			m.limits.makeNext(s)
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

// oldestCall is the name of the oldest call in progress; "" if there is none.
func oldestCall(calls []gpu.Call) string {
	if len(calls) == 0 {
		return ""
	}
	return calls[0].Name
}
