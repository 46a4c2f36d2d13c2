package monitor

import (
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

// wishes are what the reader shall do next. A wish made twice is one wish; one made while the reader is
// at it is a new one, as the reading may already be past what changed.
type wishes struct {
	snapshot, probe bool
	usage           *usageReadings
	busy            bool
	deferred        bool // callers for usage were waiting when the latest reading of health began
}

// next is what to read next: what concerns health goes first, a full reading before a check. Usage waits for one
// reading of health at most, beside one under way: a stream of events, each of which asks for a check, does not keep it
// from its callers, nor do callers who ask all the time keep a check from its turn.
func (w *wishes) next() (request, bool) {
	usage := w.usage.wanted()
	switch {
	case usage && w.deferred:
		return readUsage, true
	case w.snapshot:
		return readSnapshot, true
	case w.probe:
		return readProbe, true
	}
	return readUsage, usage
}

func (w *wishes) start(r request) {
	w.busy = true
	w.deferred = r != readUsage && w.usage.wanted()
	switch r {
	case readSnapshot:
		w.snapshot = false
	case readProbe:
		w.probe = false
	case readUsage:
		w.usage.begin()
	}
}

func (w *wishes) done(r result) {
	w.busy = false
	if r.request == readUsage {
		w.usage.finish(r.usage, r.err)
	}
}

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
