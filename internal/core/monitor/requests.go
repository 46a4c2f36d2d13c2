package monitor

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// request is work for the reader, which returns a result.
type request uint8

const (
	readProbe request = iota
	readSnapshot
	readUsage
	callLimits // a call about limits of device memory
)

type result struct {
	request  request
	snapshot gpu.Snapshot
	obs      []health.Observation
	usage    []gpu.Usage
	limits   string // of a full reading: why the driver has no limits
	err      error
}

// pendingRequests are the requests that the reader makes next. Equal requests are one. A request made while the reader serves
// an equal one is a new one, as the reading may already be past what changed.
type pendingRequests struct {
	snapshot, probe bool
	usage           *usageReadings
	limits          *limitCalls
	busy            bool
	deferred        bool // callers were waiting when the latest reading of health began
	latest          request
}

// next is the request to make next: health goes first, a full reading before a check. Callers wait for one reading of health
// at most, beside one in progress: neither does a stream of events, each of which requests a check, keep usage and limits from their
// callers, nor do callers keep a check from being made.
func (p *pendingRequests) next() (request, bool) {
	wanted, waiting := p.wanted()
	switch {
	case waiting && p.deferred:
		return wanted, true
	case p.snapshot:
		return readSnapshot, true
	case p.probe:
		return readProbe, true
	}
	return wanted, waiting
}

// wanted is the request of the callers that is made next: limits first, as new work may wait for one; after a call about limits, usage.
func (p *pendingRequests) wanted() (request, bool) {
	usage, limits := p.usage.waiting(), p.limits.waiting()
	if limits && (!usage || p.latest != callLimits) {
		return callLimits, true
	}
	return readUsage, usage
}

func (p *pendingRequests) start(r request) {
	p.busy = true
	_, waiting := p.wanted()
	p.deferred, p.latest = waiting && (r == readSnapshot || r == readProbe), r
	switch r {
	case readSnapshot:
		p.snapshot = false
	case readProbe:
		p.probe = false
	case readUsage:
		p.usage.begin()
	case callLimits: // the reader takes the call
	}
}

// probeScheduler decides when to check outside the regular interval: immediately after an event, and then at growing intervals,
// because the driver sets its recovery action some time after the fault. During a storm of events it checks once a second.
type probeScheduler struct {
	lastEvent, lastCheck time.Time
	changed              bool      // an event that names no GPU shows that they may have changed, and it has caused no full reading so far
	lastFull             time.Time // when such an event caused one
}

// event reports whether a check is due now.
func (s *probeScheduler) event(now time.Time) bool {
	s.lastEvent = now
	return now.Sub(s.lastCheck) >= probePause
}

// full reports whether a full reading after an event that names no GPU is due now: the first at once, and then once a second, because each includes a check.
func (s *probeScheduler) full(now time.Time) bool {
	due := s.changed && now.Sub(s.lastFull) >= probePause
	if due {
		s.changed, s.lastFull = false, now
	}
	return due
}

// active reports whether later checks after an event follow.
func (s *probeScheduler) active(now time.Time) bool { return now.Sub(s.lastEvent) < followUpFor }

// due reports whether a later check after an event is due.
func (s *probeScheduler) due(now time.Time) bool {
	return s.active(now) && now.Sub(s.lastCheck) >= max(probePause, now.Sub(s.lastEvent)/3)
}
