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
)

type result struct {
	request  request
	snapshot gpu.Snapshot
	obs      []health.Observation
	usage    []gpu.Usage
	err      error
}

// pendingRequests are the requests that the reader makes next. Equal requests are one. A request made while the reader serves
// an equal one is a new one, as the reading may already be past what changed.
type pendingRequests struct {
	snapshot, probe bool
	usage           *usageReadings
	busy            bool
	deferred        bool // callers for usage were waiting when the latest reading of health began
}

// next is the request to make next: health goes first, a full reading before a check. Usage waits for one reading of health
// at most, beside one in progress: neither does a stream of events, each of which requests a check, keep usage from its
// callers, nor do callers for usage keep a check from being made.
func (p *pendingRequests) next() (request, bool) {
	usage := p.usage.waiting()
	switch {
	case usage && p.deferred:
		return readUsage, true
	case p.snapshot:
		return readSnapshot, true
	case p.probe:
		return readProbe, true
	}
	return readUsage, usage
}

func (p *pendingRequests) start(r request) {
	p.busy = true
	p.deferred = r != readUsage && p.usage.waiting()
	switch r {
	case readSnapshot:
		p.snapshot = false
	case readProbe:
		p.probe = false
	case readUsage:
		p.usage.begin()
	}
}

// probeScheduler decides when to check outside the regular interval: immediately after an event, and then at growing intervals,
// because the driver sets its recovery action some time after the fault. During a storm of events it checks once a second.
type probeScheduler struct{ lastEvent, lastCheck time.Time }

// event reports whether a check is due now.
func (s *probeScheduler) event(now time.Time) bool {
	s.lastEvent = now
	return now.Sub(s.lastCheck) >= probePause
}

// active reports whether later checks after an event follow.
func (s *probeScheduler) active(now time.Time) bool { return now.Sub(s.lastEvent) < followUpFor }

// due reports whether a later check after an event is due.
func (s *probeScheduler) due(now time.Time) bool {
	return s.active(now) && now.Sub(s.lastCheck) >= max(probePause, now.Sub(s.lastEvent)/3)
}
