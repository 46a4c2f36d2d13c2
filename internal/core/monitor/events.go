package monitor

import (
	"context"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// eventBatch is the result of one event wait.
type eventBatch struct {
	obs []health.Observation
	err error
}

// runWaiter sends what each event wait returns, and returns what the last one did if that was not received. It pauses after an error,
// because a failed wait returns immediately and a lost GPU would otherwise use a whole CPU core.
func runWaiter(ctx context.Context, s Session, events chan<- eventBatch, task *watchdog.Task) []health.Observation {
	defer task.Done()
	for ctx.Err() == nil {
		task.Heartbeat(waitAtMost + waitPause)
		obs, err := s.Wait(waitAtMost)
		select {
		case events <- eventBatch{obs, err}:
		case <-ctx.Done():
			return obs
		}
		if err != nil {
			watch.Sleep(ctx, waitPause)
		}
	}
	return nil
}

// handleBatch applies what an event wait has returned. A wait that begins to fail calls for a check.
func (m *Monitor) handleBatch(f *followed, b eventBatch) {
	failing := b.err != nil
	f.pending.probe = f.pending.probe || failing && !f.eventsFail
	f.eventsFail = failing
	m.handleEvents(f, b.obs...)
	if len(b.obs) == 0 { // else the tick is on, and a storm of events is not one of looks
		m.look(f)
	}
}

// observeLast applies what the last event wait of a session returned after its end: an XID may come together with the error that ends the
// session, and no later session reports it. A wait that hangs is abandoned.
func (m *Monitor) observeLast(last <-chan []health.Observation) {
	select {
	case obs := <-last:
		m.observe(obs...)
	default:
	}
}
