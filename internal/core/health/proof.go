package health

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// ProofFailure is what a proof that a GPU did not pass means for it. A proof that could not run is none.
type ProofFailure struct {
	Summary string // of the proof; it is kept in one line of maxSummary bytes
	State   State  // Unhealthy or Degraded

	// Service means that the GPU needs service (ReasonNeedsService), which only an operator ends: it failed after a reset, too.
	Service bool
}

// maxSummary is the longest summary in the text of a condition, in bytes.
const maxSummary = 100

// ProofFailed records that a GPU failed its proof. The condition stays over restarts and reboots, until a proof passes or an operator clears it.
func (l Ledger) ProofFailed(p Policy, now time.Time, id gpu.DeviceID, f ProofFailure) Ledger {
	b := l.builder(p, now)
	c := b.recordEvent(Condition{At: gpu.WholeGPU(id), Reason: ReasonProofFailed})
	c.Detail, c.State = oneline.Of(f.Summary, maxSummary), f.State
	if f.State == Degraded && p.DegradedTakesNoWork {
		c.State = Unhealthy
	}
	if f.Service {
		b.requireService(id, "failed its proof again after a reset")
	}
	b.advance()
	return b.ledger()
}

// ProofPassed records that a GPU passed its proof, which ends the condition that an earlier one left, and unknown
// faults. It does not end the need of service, nor anything while an operator has to clear every condition
// (Policy.ManualRecovery).
func (l Ledger) ProofPassed(p Policy, now time.Time, id gpu.DeviceID) Ledger {
	b := l.builder(p, now)
	b.remove(id, func(c Condition) bool {
		return (c.Reason == ReasonProofFailed || c.Reason == ReasonFaultUnknown) && c.clearedBy(p) != 0
	})
	b.advance()
	return b.ledger()
}
