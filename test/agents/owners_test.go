package agents

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// An allocation has its devices as soon as the Nomad agent's API shows it, before any of its processes uses one. nomad-gpu serves its pages
// and follows the API at the same time. Since when it has them outlives the process.
func TestOwnersFromTheNomadAgent(t *testing.T) {
	t.Parallel()
	nomad, address := startNomadAPI(t)
	a := newAgent(t, nomadGPU, "h100x8", map[string]any{"http_address": freeAddress(t), "nomad_address": address})
	nomad.set(a.driver.UUID(3))
	a.startHealthy()
	a.awaitPage("/metrics", http.StatusOK, fmt.Sprintf(
		`tandem_device_owner{container="main",device=%q,id="5b1f3c58",name="train",namespace="default",orchestrator="nomad"} 1`, a.driver.UUID(3)))
	a.metrics("tandem_holders_known 1", fmt.Sprintf(`tandem_device_held{device=%q} 0`, a.driver.UUID(0)))
	a.prints("job default/train (allocation 5b1f3c58), task main, since 2026-11-20T03:00:00Z", "inspect")
	a.stop()
}

// The address of the Nomad agent is not configured. The one that answers at NOMAD_ADDR counts when its node has a GPU of this host: until then it
// may be another node's, and the place of owners names what to set. That is no warning.
func TestOwnersWithoutAnAddress(t *testing.T) {
	t.Parallel()
	nomad, address := startNomadAPI(t)
	a := newAgent(t, nomadGPU, "h100x8", map[string]any{"http_address": freeAddress(t)})
	a.env = append(a.env, "NOMAD_ADDR="+address)
	nomad.set(a.driver.UUID(3))
	nomad.list("GPU-of-another-node")
	a.startHealthy()
	shows := func(text string) {
		t.Helper()
		a.await(text, func() bool { out, err := a.command("inspect"); return err == nil && strings.Contains(out, text) })
	}
	shows("owners unknown: set nomad_address (the Nomad agent at " + address + " is not this node's: its node one has none of these GPUs)")
	a.prints("owners unknown: set nomad_address", "top", "--once")
	a.awaitPage("/inventory", http.StatusOK, `"remedy": "set nomad_address"`)
	a.metrics("tandem_holders_known 0")
	if text, err := a.command("inspect", "--json"); err != nil || strings.Contains(text, "OWNERS_UNKNOWN") {
		t.Errorf("%v\n%s", err, text)
	}
	nomad.list(a.driver.UUID(0))
	shows("job default/train (allocation 5b1f3c58), task main, since 2026-11-20T03:00:00Z")
	a.metrics("tandem_holders_known 1")
	a.stop()
}
