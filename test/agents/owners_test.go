package agents

import (
	"fmt"
	"net/http"
	"testing"
)

// An allocation has its devices as soon as the Nomad agent's API shows it, before any of its processes uses one. nomad-gpu serves its pages
// and follows the API at the same time.
func TestOwnersFromTheNomadAgent(t *testing.T) {
	t.Parallel()
	nomad, address := startNomadAPI(t)
	a := newAgent(t, nomadGPU, "h100x8", map[string]any{"http_address": freeAddress(t), "nomad_address": address})
	nomad.set(a.driver.UUID(3))
	a.startHealthy()
	a.awaitPage("/metrics", http.StatusOK, fmt.Sprintf(
		`tandem_device_owner{container="main",device=%q,id="5b1f3c58",name="train",namespace="default",orchestrator="nomad"} 1`, a.driver.UUID(3)))
	a.metrics("tandem_holders_known 1", fmt.Sprintf(`tandem_device_held{device=%q} 0`, a.driver.UUID(0)))
	a.prints("job default/train (allocation 5b1f3c58), task main", "inspect")
	a.stop()
}
