package agents

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
)

// An allocation has its devices as soon as the Nomad agent's API shows it, before any of its processes uses one. nomad-gpu serves its pages
// and follows the API at the same time.
func TestOwnersFromTheNomadAgent(t *testing.T) {
	t.Parallel()
	const node, alloc = "f7476465-4d6e-c0de-26d0-e383c49be941", "5b1f3c58-2f0f-1f7b-9c0e-7ad8a6cf2f7a"
	a := newAgent(t, nomadGPU, "h100x8", map[string]any{"http_address": freeAddress(t)})
	api := http.NewServeMux()
	api.HandleFunc("/v1/agent/self", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"stats":{"client":{"node_id":%q}}}`, node)
	})
	api.HandleFunc("/v1/node/"+node+"/allocations", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("index") != "0" {
			<-r.Context().Done() // nothing changes
			return
		}
		w.Header().Set("X-Nomad-Index", "7")
		fmt.Fprintf(w, `[{"ID":%q,"Namespace":"default","JobID":"train","ClientStatus":"running","AllocatedResources":{"Tasks":{"main":{"Devices":`+
			`[{"Vendor":"nvidia","Type":"gpu","Name":"H100","DeviceIDs":[%q]}]}}}}]`, alloc, a.driver.UUID(3))
	})
	api.HandleFunc("/v1/acl/", withoutACL)
	server := httptest.NewServer(api)
	t.Cleanup(server.Close) // after the agent has ended, whose query is open
	a.settings["nomad_address"] = server.URL
	a.startHealthy()
	a.awaitPage("/metrics", http.StatusOK, fmt.Sprintf(
		`tandem_device_owner{container="main",device=%q,id=%q,name="train",namespace="default",orchestrator="nomad"} 1`, a.driver.UUID(3), alloc))
	a.metrics("tandem_holders_known 1", fmt.Sprintf(`tandem_device_held{device=%q} 0`, a.driver.UUID(0)))
	a.prints("job default/train (allocation "+alloc+"), task main", "inspect")
	a.stop()
}
