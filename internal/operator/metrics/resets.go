package metrics

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// The metrics of resets: of the GPUs that are listed and are faulty, or were reset, if it is decided about resets.
var (
	resetsBegun      = shared.Counter("resets_begun_total", "Resets of GPUs that were begun on the node, those before this start of the agent included.")
	resetRunning     = shared.Gauge("reset_running", "1 while the GPU is reset: it takes no work.", "gpu")
	resetAttempts    = shared.Gauge("reset_attempts", "Resets of the GPU for its present fault in which nvidia-smi was called.", "gpu")
	resetRefusals    = shared.Gauge("reset_refusals", "Resets of the GPU for its present fault that did not begin or were refused because something had it, or may have had it.", "gpu")
	resetTime        = shared.Gauge("reset_timestamp_seconds", "When the latest reset of the GPU ended: done, in-use, refused, failed, interrupted.", "gpu", "outcome")
	resetDue         = shared.Gauge("reset_due", "1 if the GPU is faulty and its reset waits for nothing: with reset.mode report it would be reset.", "gpu")
	resetWaiting     = shared.Gauge("reset_waiting", "1 for what the reset of a faulty GPU waits for.", "gpu", "code")
	resetNeedsPerson = shared.Gauge("reset_needs_person", "1 if what the reset of the GPU waits for does not end without a person.", "gpu")
)

// collectResets adds the metrics of resets; nil = it is not decided about them.
func collectResets(p *metric.Samples, s Source) {
	if s.Resets == nil {
		return
	}
	p.Add(resetsBegun, float64(s.Resets.State.Begun))
	for _, id := range s.State.Inventory.GPUs() {
		gpu := string(id)
		r, known := s.Resets.State.Of(id)
		due := slices.ContainsFunc(s.Resets.Begin, func(b reset.Begin) bool { return b.GPU == id })
		waits := slices.DeleteFunc(slices.Clone(s.Resets.Waits), func(w reset.Wait) bool { return w.GPU != id })
		if !known && !due && len(waits) == 0 {
			continue
		}
		p.AddBool(resetRunning, r.Running != nil, gpu)
		p.Add(resetAttempts, float64(r.Attempts), gpu)
		p.Add(resetRefusals, float64(r.Refusals), gpu)
		if r.Last != nil {
			p.Add(resetTime, timestamp(r.Last.At), gpu, r.Last.Outcome.String())
		}
		p.AddBool(resetDue, due && r.Running == nil, gpu)
		for _, w := range waits {
			p.Add(resetWaiting, 1, gpu, string(w.Code))
		}
		p.AddBool(resetNeedsPerson, slices.ContainsFunc(waits, func(w reset.Wait) bool { return w.Alert }), gpu)
	}
}
