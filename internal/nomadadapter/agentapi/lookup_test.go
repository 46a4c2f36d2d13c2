package agentapi

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// One allocation is asked for at once, before the client follows any; the driver of a task is that of its group in the job.
func TestLookup(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/allocation/a1" || r.Header.Get("X-Nomad-Token") != "secret" {
			http.Error(w, "alloc not found", http.StatusNotFound)
			return
		}
		job := `"TaskGroups":[{"Name":"other","Tasks":[{"Name":"main","Driver":"exec"}]},{"Name":"g","Tasks":[{"Name":"side","Driver":"exec"},{"Name":"main","Driver":"docker"}]}]`
		fmt.Fprint(w, strings.Replace(alloc("a1", "train", "pending", gpus), `"TaskGroups":[{"Name":"g"}]`, job, 1))
	}))
	defer server.Close()
	c := New(Options{Address: server.URL, Token: "secret", Log: slog.New(slog.DiscardHandler), LookupEnv: os.LookupEnv})
	r, err := c.Lookup(t.Context(), "a1")
	if err != nil || len(r.Holders) != 2 || r.Complete {
		t.Fatalf("%v %+v", err, r)
	}
	if task := r.Tasks[r.Holders[0].Work]; task.Driver != "docker" || !task.InContainer() || r.Work["a1"] != (holders.Work{Orchestrator: holders.Nomad, Namespace: "batch", Name: "train", ID: "a1"}) {
		t.Errorf("%+v", r)
	}
	if r, err := c.Lookup(t.Context(), "a2"); err == nil || r.Work != nil {
		t.Errorf("%v %+v", err, r)
	}
}
