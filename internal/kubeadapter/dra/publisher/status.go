package publisher

import (
	"cmp"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Status is what the publisher has done and seen, for readiness, metrics and reports.
type Status struct {
	Slices, Devices int   // of the agent in the API, as far as it is known
	Generation      int64 // of the pool
	Announced       bool  // the API had everything at least once since the start

	Reachable        bool      // the API server answers
	UnreachableSince time.Time // zero = it answers, or was never reached so far

	Problem     string    // why the API lacks what the node has, in a line; "" = it has everything
	Since       time.Time // of Problem, or since when there is none
	LastSuccess time.Time // when the API was last known to have everything; zero = never

	LastWrite time.Time // of a slice by this process; zero = none so far

	LastError   string // of a request or of the server's answers; kept after a success. "" = none so far
	LastErrorAt time.Time

	Writes []Write // requests that change slices, by verb and result

	DropsShares bool     // the API server drops consumable capacity: feature gate DRAConsumableCapacity
	DropsTaints bool     // the API server drops taints: feature gate DRADeviceTaints. Unhealthy devices leave the slices, unless a claim has them
	OtherSlices []string // of the same driver and node that this agent did not make, sorted
	Conflicts   bool     // another driver of the same name creates them again and again
}

// Write counts the requests of a verb with a result.
type Write struct {
	Verb   string // create, update, delete
	Result string // ok, conflict, forbidden, unauthorized, invalid, not_found, unavailable, other
	Count  uint64
}

// counters are the requests by verb and result.
type counters map[Write]uint64 // the key's Count is 0

func (c counters) list() []Write {
	all := make([]Write, 0, len(c))
	for w, n := range c {
		w.Count = n
		all = append(all, w)
	}
	slices.SortFunc(all, func(a, b Write) int { return cmp.Or(cmp.Compare(a.Verb, b.Verb), cmp.Compare(a.Result, b.Result)) })
	return all
}

func (c counters) count(v verb, err error) { c[Write{Verb: string(v), Result: result(err)}]++ }

func result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, kubeapi.ErrConflict), errors.Is(err, kubeapi.ErrExists):
		return "conflict"
	case errors.Is(err, kubeapi.ErrForbidden):
		return "forbidden"
	case errors.Is(err, kubeapi.ErrUnauthorized):
		return "unauthorized"
	case errors.Is(err, kubeapi.ErrInvalid):
		return "invalid"
	case errors.Is(err, kubeapi.ErrNotFound):
		return "not_found"
	case errors.Is(err, kubeapi.ErrUnavailable):
		return "unavailable"
	}
	return "other"
}

// Published returns the present status.
func (p *Publisher) Published() Status { return p.status.Load() }

// Status returns a value that follows Published.
func (p *Publisher) Status() *watch.Value[Status] { return p.status }

// Ready returns nil when the API had everything once, and nothing but the API server keeps it from having it now. An API server that does
// not answer is no reason: slices stay as they are without it.
func (p *Publisher) Ready() error {
	s := p.Published()
	if s.Problem == "" || s.Announced && !s.Conflicts && !s.Reachable {
		return nil
	}
	return errors.New(s.Problem)
}

// publishStatus stores the status for readers.
func (p *Publisher) publishStatus() {
	s := p.current
	s.Writes = p.writes.list()
	s.DropsShares = p.dropShares.Load()
	s.OtherSlices = nil
	s.Slices, s.Devices, s.Generation = 0, 0, 0
	for _, name := range slices.Sorted(maps.Keys(p.cache.slices)) {
		slice := p.cache.slices[name]
		if !p.names.own(name) {
			s.OtherSlices = append(s.OtherSlices, name)
			continue
		}
		s.Slices++
		s.Devices += len(slice.Spec.Devices)
		s.Generation = max(s.Generation, slice.Spec.Pool.Generation)
	}
	s.Conflicts = p.other.conflicts()
	p.current = s
	p.status.Store(s)
}

// setProblem sets why the API lacks something; "" = it lacks nothing.
func (p *Publisher) setProblem(text string) {
	now := time.Now()
	if text == "" {
		p.current.LastSuccess, p.current.Announced = now, true
	}
	if text != p.current.Problem || p.current.Since.IsZero() {
		p.current.Problem, p.current.Since = text, now
	}
}

// setReachable records that the API server has answered.
func (p *Publisher) setReachable() {
	p.current.Reachable, p.current.UnreachableSince = true, time.Time{}
}

// setUnreachable records that it has not.
func (p *Publisher) setUnreachable() {
	if p.current.Reachable || p.current.UnreachableSince.IsZero() {
		p.current.Reachable, p.current.UnreachableSince = false, time.Now()
	}
}

// partialError is a failure that keeps nothing else from being published, and when what failed may be tried again.
type partialError struct {
	error
	again time.Time
}

// Unwrap returns the cause.
func (e partialError) Unwrap() error { return e.error }

// failed records why a round ended, and sets when the next try may be.
func (p *Publisher) failed(err error) {
	if waiting, ok := errors.AsType[waitError](err); ok {
		if waiting != notListed || len(p.lasting.List()) == 0 { // else why it has not answered is known
			p.setProblem(err.Error())
		}
		return
	}
	p.report(err)
	if _, ok := errors.AsType[otherDriverError](err); ok { // until something changes
		return
	}
	if partial, ok := errors.AsType[partialError](err); ok {
		p.compareAt(partial.again)
		return
	}
	p.pause(p.retry.next(err))
}

// report takes a failure, and logs it if that has not been done since all was published last.
func (p *Publisher) report(err error) {
	p.setProblem(err.Error())
	p.current.LastError, p.current.LastErrorAt = err.Error(), time.Now()
	if _, ok := errors.AsType[*kubeapi.RequestError](err); ok {
		p.setUnreachable()
	} else {
		p.setReachable()
	}
	one := problem.Problem{Object: err.Error()} // for the log alone: operators are told of the latest one
	const several = 100                         // causes in turns
	if all := p.lasting.List(); len(all) >= several && !slices.Contains(all, one) {
		p.lasting.Replace(one.Code, "")
	}
	p.lasting.Put(one, slog.LevelWarn, "resource slices not published", "error", err)
}

// pause sets a time in which no request is sent.
func (p *Publisher) pause(d time.Duration) {
	p.notBefore = time.Now().Add(d)
	p.compareAt(p.notBefore)
}
