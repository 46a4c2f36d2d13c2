package monitor

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

type news struct {
	obs []core.Observation
	err error
}

// follow folds what a session says until it is of no more use or ctx ends.
//
//	reader  <- request - follow - publish -> cell
//	        - result  ->   ^
//	waiter  - news ------- '
func (m *Monitor) follow(ctx context.Context, s Session, over chan<- struct{}) error {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	requests, results, events := make(chan request), make(chan result), make(chan news)
	var workers sync.WaitGroup
	workers.Go(func() { m.read(ctx, s, requests, results) })
	ears := m.board.Register("event wait")
	workers.Go(func() { wait(ctx, s, events, ears) })
	defer func() { m.leave(outer, s, &workers, over) }()
	defer cancel()

	rescan, probe := time.NewTicker(m.cfg.Rescan), time.NewTicker(m.cfg.Probe)
	watch := time.NewTicker(watchEvery)
	defer rescan.Stop()
	defer probe.Stop()
	defer watch.Stop()

	want := wishes{snapshot: true, usage: m.usage}
	defer m.usage.finish(nil, core.ErrNoDriver) // for the callers that still wait
	var attention attention
	deaf := false
	for {
		var send chan<- request
		m.turns.Heartbeat(watchEvery)
		next, any := want.next()
		if any && !want.busy {
			send = requests
		}
		select {
		case send <- next:
			want.start(next)
		case r := <-results:
			want.done(r)
			if r.err != nil && r.request != readUsage {
				m.noDriver(r.err) // now: leaving the session takes its time
				return r.err
			}
			if m.take(s, r) && r.request == readProbe {
				want.snapshot = true // a GPU went or came: read what that means
			}
			if r.request != readUsage { // Nomad asks for numbers every second: that is no look at health
				attention.checked(time.Now())
			}
		case n := <-events:
			deaf = n.err != nil
			m.gauges.set(func(s *Stats) { s.EventsFail = deaf })
			m.hear(n.obs, &want, &attention)
			want.probe = want.probe || n.err != nil
		case <-watch.C:
			m.watchdog(s)
			m.watchNodes(s)
			m.gauges.set(func(s *Stats) { s.EventsFail = deaf || ears.Late(time.Now()) })
			want.probe = want.probe || attention.due(time.Now())
		case o := <-m.told:
			m.hear([]core.Observation{o}, &want, &attention)
		case <-m.moved:
			m.settle()
		case o := <-m.orders:
			if m.obey(o); m.isAway() {
				return errAway
			}
			want.probe = true
		case <-rescan.C:
			want.snapshot = true
		case <-probe.C:
			want.probe = true
		case <-m.usage.asked: // want.next finds it
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// take folds a result and reports whether it changed what is offered.
func (m *Monitor) take(s Session, r result) bool {
	switch r.request {
	case readSnapshot:
		r.snapshot.Nodes = s.Nodes() // a reading takes its time, and later nodes may be published already
		return m.update(func(s core.State, now time.Time) core.State { return s.Read(m.cfg, now, r.snapshot, r.obs...) })
	case readProbe:
		return m.observe(r.obs...)
	case readUsage: // answered by wishes.done
	}
	return false
}

// hear takes in what happened: what it says counts at once, what the driver says now follows.
func (m *Monitor) hear(obs []core.Observation, want *wishes, a *attention) {
	if len(obs) == 0 {
		return
	}
	m.observe(obs...)
	want.snapshot = want.snapshot || slices.ContainsFunc(obs, isHint)
	if slices.ContainsFunc(obs, func(o core.Observation) bool { return o.Kind != core.Reserved && o.Kind != core.KernelLogRead }) {
		want.probe = want.probe || a.event(time.Now())
	}
}

// isHint reports whether an event only says that the machine has changed: its layout may have, too.
func isHint(o core.Observation) bool { return o.Kind == 0 }

// watchdog notes a call that is overdue against the GPU it is about, and lets the time pass in the ledger.
func (m *Monitor) watchdog(s Session) {
	var overdue []core.Observation
	stuck, calls := 0, s.Busy()
	for _, call := range calls {
		if time.Since(call.Since) < m.cfg.Health.Deadline {
			continue
		}
		stuck++
		if nameless := call.At == core.Node && call.Index >= 0; !nameless { // who was never read keeps nobody else
			overdue = append(overdue, core.Observation{At: call.At, Kind: core.Unresponsive, Detail: call.Name})
		}
	}
	m.gauges.set(func(s *Stats) { s.Stuck, s.Calls = stuck, calls })
	if overdue != nil || m.State().NeedsTick() {
		m.observe(overdue...)
	}
}

// watchNodes takes in which device nodes there are. They are looked at here, and not in the reader: nvidia-modprobe creates
// some when the first CUDA program starts, and a container that is created a second later must get them even while
// the driver is slow. /dev is in memory, so that this goroutine waits for no disk.
func (m *Monitor) watchNodes(s Session) {
	state := m.State()
	if nodes := s.Nodes(); state.Snapshot.Driver.State == core.DriverReady && !slices.Equal(nodes, state.Snapshot.Nodes) {
		m.update(func(s core.State, now time.Time) core.State { return s.WithNodes(m.cfg, now, nodes) })
	}
}

// leave closes the session once the workers are out of it. A worker that hangs in the driver can't be
// waited for: it and the session are abandoned, and the process is expected to end or to stay without.
func (m *Monitor) leave(ctx context.Context, s Session, workers *sync.WaitGroup, over chan<- struct{}) {
	left := make(chan struct{})
	go func() {
		defer close(left)
		workers.Wait()
		m.close(ctx, s, over)
	}()
	m.abandon(left, nameOf(s.Busy()))
	m.gauges.set(func(s *Stats) { s.Stuck, s.EventsFail = 0, false })
}

// read runs one request at a time in the driver.
//
// A full reading comes with a check, so that no device is offered as well of which nobody has asked. Events
// are registered for by then: what happened before that, the check finds.
func (m *Monitor) read(ctx context.Context, s Session, requests <-chan request, results chan<- result) {
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
				r.obs, r.err = m.check(s)
			}
		case readProbe:
			r.obs, r.err = m.check(s)
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

// check is a probe that is timed.
func (m *Monitor) check(s Session) ([]core.Observation, error) {
	began := time.Now()
	obs, err := s.Probe()
	m.gauges.checked(time.Since(began))
	return obs, err
}

// wait passes on events, and when the wait begins to fail or works again. After an error it pauses, because a
// wait that fails does so at once: without the pause a lost GPU would keep a core busy.
func wait(ctx context.Context, s Session, events chan<- news, ears *watchdog.Task) {
	defer ears.Done()
	for failing := false; ctx.Err() == nil; {
		ears.Heartbeat(waitAtMost + waitPause)
		obs, err := s.Wait(waitAtMost)
		same := (err != nil) == failing
		if failing = err != nil; same && len(obs) == 0 {
			if failing {
				rest(ctx, waitPause)
			}
			continue
		}
		select {
		case events <- news{obs, err}:
		case <-ctx.Done():
			return
		}
		if failing {
			rest(ctx, waitPause)
		}
	}
}

func nameOf(calls []core.Call) string {
	if len(calls) == 0 {
		return ""
	}
	return calls[0].Name
}
