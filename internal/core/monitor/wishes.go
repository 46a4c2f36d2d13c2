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
