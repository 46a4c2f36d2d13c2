package monitor

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// request is work for the reader; what it found comes back as a result.
type request uint8

const (
	readProbe request = iota
	readSnapshot
	readUsage
)

type result struct {
	request  request
	snapshot core.Snapshot
	obs      []core.Observation
	usage    []core.Usage
	err      error
}

type news struct {
	obs []core.Observation
	err error
}

// follow folds what a session says until it is of no more use or ctx ends.
//
//	reader  <- request - follow - publish -> cell
//	        - result  ->   ^
//	waiter  - news ------- '
func (m *Monitor) follow(ctx context.Context, s Session) error {
	ctx, cancel := context.WithCancel(ctx)
	requests, results, events := make(chan request), make(chan result), make(chan news)
	var workers sync.WaitGroup
	workers.Go(func() { m.read(ctx, s, requests, results) })
	workers.Go(func() { wait(ctx, s, events) })
	defer m.leave(s, &workers)
	defer cancel()

	rescan, probe := time.NewTicker(m.cfg.Rescan), time.NewTicker(m.cfg.Probe)
	watch := time.NewTicker(watchEvery)
	defer rescan.Stop()
	defer probe.Stop()
	defer watch.Stop()

	want := wishes{snapshot: true}
	defer want.refuse()
	var attention attention
	for {
		var send chan<- request
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
			if m.take(r) && r.request == readProbe {
				want.snapshot = true // a GPU went or came: read what that means
			}
			if r.request != readUsage { // Nomad asks for numbers every second: that is no look at health
				attention.checked(time.Now())
			}
		case n := <-events:
			m.gauges.set(func(s *Stats) { s.EventsFail = n.err != nil })
			m.hear(n.obs, &want, &attention)
			want.probe = want.probe || n.err != nil
		case <-watch.C:
			m.watchdog(s)
			want.probe = want.probe || attention.due(time.Now())
		case o := <-m.told:
			m.hear([]core.Observation{o}, &want, &attention)
		case o := <-m.orders:
			m.obey(o)
			want.probe = true
		case <-rescan.C:
			want.snapshot = true
		case <-probe.C:
			want.probe = true
		case u := <-m.usage:
			want.usage = append(want.usage, u)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// take folds a result and reports whether it changed what is offered.
func (m *Monitor) take(r result) bool {
	switch r.request {
	case readSnapshot:
		return m.publish(m.State().Read(m.cfg, time.Now(), r.snapshot, r.obs...))
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
	if slices.ContainsFunc(obs, func(o core.Observation) bool { return o.Kind != core.Reserved }) {
		want.probe = want.probe || a.event(time.Now())
	}
}

// isHint reports whether an event only says that the machine has changed: its layout may have, too.
func isHint(o core.Observation) bool { return o.Kind == 0 }

// attention decides when to check out of turn: at once when something happened, and then the rarer the
// longer ago that is, because the driver's verdict on a fault follows in its own time. A storm of events is
// checked on once a second.
type attention struct{ happened, looked time.Time }

func (a *attention) checked(now time.Time) { a.looked = now }

func (a *attention) event(now time.Time) bool {
	a.happened = now
	return now.Sub(a.looked) >= eagerly
}

func (a *attention) due(now time.Time) bool {
	since := now.Sub(a.happened)
	return !a.happened.IsZero() && since < attentive && now.Sub(a.looked) >= max(eagerly, since/3)
}

// watchdog notes a call that is overdue against the GPU it is about, and lets the time pass in the ledger.
func (m *Monitor) watchdog(s Session) {
	var overdue []core.Observation
	for _, call := range s.Busy() {
		if time.Since(call.Since) >= m.cfg.Health.Deadline {
			overdue = append(overdue, core.Observation{At: call.At, Kind: core.NoAnswer, Detail: call.Name})
		}
	}
	m.gauges.set(func(s *Stats) { s.Stuck = len(overdue) })
	if overdue != nil || m.State().Restless() {
		m.observe(overdue...)
	}
}

// leave closes the session once the workers are out of it. A worker that hangs in the driver can't be
// waited for: it and the session are abandoned, and the process is expected to end or to stay without.
func (m *Monitor) leave(s Session, workers *sync.WaitGroup) {
	over := make(chan struct{})
	go func() {
		defer close(over)
		workers.Wait()
		if err := s.Close(); err != nil {
			m.log.Warn("closing the driver", "error", err)
		}
	}()
	m.abandon(over, nameOf(s.Busy()))
}

// wishes are what the reader shall do next. A wish made twice is one wish; one made while the reader is
// at it is a new one, as the reading may already be past what changed.
type wishes struct {
	snapshot, probe bool
	usage           []usageRequest
	busy            bool
	asking          []usageRequest // whom the reading in progress will answer
}

// next is the most useful wish: a full reading, then waiting callers, then a probe.
func (w *wishes) next() (request, bool) {
	switch {
	case w.snapshot:
		return readSnapshot, true
	case len(w.usage) > 0:
		return readUsage, true
	case w.probe:
		return readProbe, true
	}
	return 0, false
}

func (w *wishes) start(r request) {
	w.busy = true
	switch r {
	case readSnapshot:
		w.snapshot = false
	case readProbe:
		w.probe = false
	case readUsage:
		w.asking, w.usage = w.usage, nil
	}
}

func (w *wishes) done(r result) {
	w.busy = false
	if r.request != readUsage {
		return
	}
	for _, u := range w.asking {
		u.reply <- usageReply{r.usage, r.err}
	}
	w.asking = nil
}

// refuse answers those who still wait when the session is over.
func (w *wishes) refuse() {
	for _, u := range append(w.asking, w.usage...) {
		u.reply <- usageReply{err: core.ErrNoDriver}
	}
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
func wait(ctx context.Context, s Session, events chan<- news) {
	for failing := false; ctx.Err() == nil; {
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
