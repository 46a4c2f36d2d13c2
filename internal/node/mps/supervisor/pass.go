package supervisor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/mps"
)

// attempt is when the daemon of a pool may be started or ended, after a failure or while it has clients.
type attempt struct {
	backoff *backoff.ExponentialBackOff
	next    time.Time
}

// presence is what is seen of the daemon of a pool.
type presence uint8

const (
	gone        presence = iota // none runs
	serving                     // ours serves its control file
	unreachable                 // ours runs, and its control file is gone or another one: no client finds it
	foreign                     // another program's serves its control file
)

// look looks for the daemon of a pool. One that has a record, and whose process has ended, is gone: what serves its
// control file then is not another program's daemon, which would have found ours running.
func (s *Supervisor) look(pool string, r record, recorded bool) presence {
	control, err := mps.FindControl(s.folders(pool).pipe)
	runs := recorded && r.Process.runs()
	switch {
	case runs && err == nil && control == r.Control:
		return serving
	case runs:
		return unreachable
	case !recorded && err == nil:
		return foreign
	}
	return gone
}

// pass ends the daemons that are not wanted as they are, and then starts those that are missing: a GPU has one MPS
// server.
func (s *Supervisor) pass(ctx context.Context) {
	if !s.known {
		return
	}
	for _, r := range s.records() {
		s.follow(ctx, r)
	}
	records := s.records()
	for _, name := range slices.Sorted(maps.Keys(s.wanted)) {
		r, recorded := records[name]
		switch s.look(name, r, recorded) {
		case gone:
			if s.takenOf(s.wanted[name]) == "" {
				s.try(name, func() error { return s.start(ctx, s.wanted[name], records) })
			}
		case foreign:
			s.logOnce(name, "foreign", func() {
				s.opts.Log.Info("MPS control daemon was started by another program, and is left to it", "pool", name)
			})
		case serving, unreachable:
		}
	}
}

// follow ends a daemon that is not wanted as it is.
func (s *Supervisor) follow(ctx context.Context, r record) {
	name := r.Pool.Name
	if r.State == mps.Starting && r.Process == (process{}) { // the one before ended while it started the daemon
		r = s.adopt(r)
	}
	want, ok := s.wanted[name]
	stays := ok && want.equal(r.Pool)
	at, taken := s.look(name, r, true), s.takenOf(r.Pool)
	switch {
	case stays && at == serving && r.State != mps.Starting && taken != "":
		s.yield(ctx, r, taken)
	case stays && at == serving && r.State != mps.Starting:
		delete(s.idle, name)
		delete(s.logged, name)
		s.mark(r, mps.Ready)
	case stays && at == gone && taken == "": // it is started again
	default:
		r = s.mark(r, mps.Ending)
		s.try(name, func() error { return s.end(ctx, r) })
	}
}

// adopt records the process of a daemon that was started and not recorded.
func (s *Supervisor) adopt(r record) record {
	pipe := s.folders(r.Pool.Name).pipe
	p, found := findDaemon(pipe)
	if !found {
		return r
	}
	r.Process = p
	r.Control, _ = mps.FindControl(pipe) // without it the daemon is unreachable
	s.note(r)
	return r
}

// takenOf returns a GPU of a pool that an agent has taken; "" = there is none.
func (s *Supervisor) takenOf(p Pool) gpu.DeviceID {
	for _, d := range p.Devices {
		if _, taken := s.taken[d.ID]; taken {
			return d.ID
		}
	}
	return ""
}

// heldOf returns a GPU of a pool that work has, or may have while an agent has not answered; "" = there is none.
func (s *Supervisor) heldOf(p Pool) gpu.DeviceID {
	for _, d := range p.Devices {
		if s.held[d.ID] || !s.known {
			return d.ID
		}
	}
	return ""
}

// yield ends the daemon of a pool when an agent has taken one of its GPUs and no work uses the daemon. Until then the
// pool takes work. Then the daemon takes no clients for idleFor, and yield ends it if it still has none.
func (s *Supervisor) yield(ctx context.Context, r record, taken gpu.DeviceID) {
	name := r.Pool.Name
	held := s.heldOf(r.Pool)
	if held != "" || !s.due(name) {
		delete(s.idle, name)
		s.mark(r, mps.Ready)
		if held != "" {
			why := fmt.Sprintf("%s is taken for a proof or a reset, and work may have %s of the same pool", taken, held)
			s.logOnce(name, why, func() { s.opts.Log.Info("MPS control daemon: waiting", "pool", name, "reason", why) })
		}
		return
	}
	if s.idle[name].IsZero() {
		s.idle[name] = time.Now()
	}
	r = s.mark(r, mps.Ending)
	if time.Since(s.idle[name]) < s.idleFor {
		return
	}
	s.try(name, func() error {
		err := s.end(ctx, r)
		if e, waits := errors.AsType[*waitError](err); waits && !e.told {
			delete(s.idle, name)
			s.mark(r, mps.Ready)
		}
		return err
	})
}

// mark records whether a daemon takes clients. From when it does not, the agents give its GPUs no work, so that its
// clients become fewer.
func (s *Supervisor) mark(r record, state mps.State) record {
	if r.State == state || r.State == mps.Starting {
		return r
	}
	r.State = state
	s.note(r)
	return r
}

// note writes a record, and logs that it can't.
func (s *Supervisor) note(r record) {
	if err := s.write(r); err != nil {
		s.logOnce("record", err.Error(), func() {
			s.opts.Log.Warn("MPS control daemon: no record", "pool", r.Pool.Name, "error", err)
		})
	}
}

// try makes an attempt for a pool, if it is time, and logs each new reason for which it fails.
func (s *Supervisor) try(name string, do func() error) {
	a := s.retry[name]
	if a == nil {
		a = &attempt{backoff: backoff.NewExponentialBackOff()}
		a.backoff.InitialInterval, a.backoff.MaxInterval = retryFirst, retryMost
		s.retry[name] = a
	}
	if !s.due(name) {
		return
	}
	err := do()
	if err == nil {
		delete(s.retry, name)
		delete(s.logged, name)
		return
	}
	a.next = time.Now().Add(a.backoff.NextBackOff())
	s.logOnce(name, err.Error(), func() {
		if _, waits := errors.AsType[*waitError](err); waits {
			s.opts.Log.Info("MPS control daemon: waiting", "pool", name, "reason", err)
			return
		}
		s.opts.Log.Warn("MPS control daemon: failed, tried again", "pool", name, "error", err)
	})
}

// due reports whether it is time for an attempt for a pool.
func (s *Supervisor) due(name string) bool {
	a := s.retry[name]
	return a == nil || !time.Now().Before(a.next)
}

// waitError is why a daemon is not started or ended yet. It is no failure.
type waitError struct {
	text string
	told bool // to end: the daemon takes no clients any more
}

func (e *waitError) Error() string { return e.text }
