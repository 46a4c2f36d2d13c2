package monitor_test

import (
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A failed proof counts when the call returns: every adapter reads the published inventory, and none gives the GPU out any more. (Case 2.)
func TestFailedProofCountsAtOnce(t *testing.T) {
	onGPUs(t, 2, func(t *testing.T, _ *coretest.Machine, r *running) {
		id := inventory.UnitID(coretest.GPU(1))
		changed := r.Changed()
		must(t, r.ProofFailed(t.Context(), coretest.GPU(1), health.ProofFailure{Summary: "sums differ", State: health.Unhealthy}))
		_, err := r.Current().Reserve(id)
		if refused, ok := errors.AsType[*inventory.UnhealthyUnitsError](err); !ok || refused.Units[0].Health.Cause() != "PROOF_FAILED" || refused.Units[0].Health.Detail != "sums differ" {
			t.Errorf("reserved: %v", err)
		}
		select {
		case <-changed:
		default:
			t.Error("no adapter is woken")
		}
		must(t, r.ProofPassed(t.Context(), coretest.GPU(1)))
		if _, err := r.Current().Reserve(id); err != nil {
			t.Errorf("after a proof that passed: %v", err)
		}
	})
}
