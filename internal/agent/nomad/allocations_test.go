package nomad

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

// slowAPI is the API of a Nomad agent whose queries that wait are not answered after the first one.
type slowAPI struct {
	policies string // of the token; "" = the servers have no ACLs

	mu    sync.Mutex
	holds gpu.DeviceID // of the one allocation; "" = there is none
	asked int          // queries that do not wait
	waits int
}

func (s *slowAPI) place(id gpu.DeviceID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holds = id
}

func (s *slowAPI) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

// answerAgain has the next query that waits answered.
func (s *slowAPI) answerAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waits = 0
}

func (s *slowAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/agent/self" {
		fmt.Fprint(w, `{"stats":{"client":{"node_id":"f7476465"}}}`)
		return
	}
	switch {
	case strings.HasPrefix(r.URL.Path, "/v1/acl/") && s.policies == "":
		http.Error(w, "ACL support disabled", http.StatusBadRequest)
		return
	case r.URL.Path == "/v1/acl/token/self":
		fmt.Fprint(w, `{"Type":"client"}`)
		return
	case r.URL.Path == "/v1/acl/policies":
		fmt.Fprint(w, `[{"Name":"tandem"}]`)
		return
	case r.URL.Path == "/v1/acl/policy/tandem":
		fmt.Fprint(w, s.policies)
		return
	}
	s.mu.Lock()
	if r.URL.Query().Has("index") {
		if s.waits++; s.waits > 1 {
			s.mu.Unlock()
			<-r.Context().Done()
			return
		}
	} else {
		s.asked++
	}
	defer s.mu.Unlock()
	w.Header().Set("X-Nomad-Index", "7")
	if s.holds == "" {
		fmt.Fprint(w, "[]")
		return
	}
	fmt.Fprintf(w, `[{"ID":"5b1f3c58","JobID":"train","ClientStatus":"pending","AllocatedResources":{"Tasks":{"main":{"Devices":[{"Vendor":"nvidia","Type":"gpu","DeviceIDs":[%q]}]}}}}]`, s.holds)
}

// That nothing has a GPU is known only by an answer of just now, which the record asks for while the GPU moves, and only then.
func TestAllocationsOfGPUs(t *testing.T) {
	api := &slowAPI{}
	server := httptest.NewServer(api)
	defer server.Close()
	client := agentapi.New(agentapi.Options{Address: server.URL, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	changed, ended := make(chan struct{}, 10), make(chan struct{})
	go func() { defer close(ended); client.Run(ctx, nil, func() { changed <- struct{}{} }) }()
	defer func() { cancel(); <-ended }()
	<-changed

	inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2)}).WithoutHost()
	id := coretest.GPU(1)
	var leaving []gpu.DeviceID
	b := allocationReader{client, func() *inventory.Allocatable { return inv }, func() []gpu.DeviceID { return leaving }}
	for range 20 {
		if h := b.read(); h.Complete || len(h.Holders) > 0 {
			t.Fatalf("nothing was confirmed: %+v", h)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if api.count() != 0 {
		t.Errorf("%d queries for a GPU that does not move", api.count())
	}

	leaving = []gpu.DeviceID{id}
	await := func(what string, ok func(r holders.Record, by []string) bool) {
		t.Helper()
		deadline := time.Now().Add(20 * time.Second)
		for h := b.read(); !ok(h, h.On(id)); h = b.read() {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, h)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	await("no holder", func(h holders.Record, by []string) bool { return h.Complete && len(by) == 0 && h.Age < answerAge })
	api.place(id)
	await("an allocation that was placed while the query waits", func(_ holders.Record, by []string) bool {
		return len(by) == 1 && strings.Contains(by[0], "job train")
	})
	if asked := api.count(); asked > 10 {
		t.Errorf("%d queries in some seconds", asked)
	}
}

// A token that sees one namespace does not show the work of another: a GPU that this agent gave out has a holder, also with --force, and of the
// others it is not known.
func TestGPUOfHiddenAllocation(t *testing.T) {
	server := httptest.NewServer(&slowAPI{policies: `{"RulesJSON":{"Namespaces":[{"Name":"batch","Capabilities":["read-job"]}]}}`})
	defer server.Close()
	client := agentapi.New(agentapi.Options{Address: server.URL, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	changed, ended := make(chan struct{}, 10), make(chan struct{})
	go func() { defer close(ended); client.Run(ctx, nil, func() { changed <- struct{}{} }) }()
	defer func() { cancel(); <-ended }()
	<-changed

	inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2)}).WithoutHost()
	given, other := coretest.GPU(1), coretest.GPU(0)
	plan, err := inv.Reserve(inventory.UnitID(given))
	if err != nil {
		t.Fatal(err)
	}
	client.Reserved(plan.Units)
	leaving := []gpu.DeviceID{given}
	r := allocationReader{client, func() *inventory.Allocatable { return inv }, func() []gpu.DeviceID { return leaving }}
	for deadline := time.Now().Add(20 * time.Second); client.Confirmed().At.IsZero(); time.Sleep(10 * time.Millisecond) {
		if h := r.read(); len(h.On(given)) != 1 || h.Complete || !strings.Contains(h.On(given)[0], "does not show") || time.Now().After(deadline) {
			t.Fatalf("given out: %+v", h)
		}
		client.Confirm()
	}
	if h := r.read(); h.Complete || len(h.On(other)) != 0 || !strings.Contains(h.Missing, `namespace "*"`) {
		t.Errorf("not given out: %+v", h)
	}
}

// A job that was seen has its GPU also when the API fails: a token that has expired, say. It has ended when an answer shows that.
func TestHolderOutlivesTheAPI(t *testing.T) {
	api := &slowAPI{holds: coretest.GPU(1)}
	var fails atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fails.Load() {
			http.Error(w, "ACL token expired", http.StatusForbidden)
			return
		}
		api.ServeHTTP(w, r)
	}))
	defer server.Close()
	client := agentapi.New(agentapi.Options{Address: server.URL, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	changed, ended := make(chan struct{}, 10), make(chan struct{})
	go func() { defer close(ended); client.Run(ctx, nil, func() { changed <- struct{}{} }) }()
	defer func() { cancel(); <-ended }()
	<-changed

	inv, id := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2)}).WithoutHost(), coretest.GPU(1)
	moving := []gpu.DeviceID{id}
	b := allocationReader{client, func() *inventory.Allocatable { return inv }, func() []gpu.DeviceID { return moving }}
	fails.Store(true)
	server.CloseClientConnections()
	<-changed // that it fails
	client.Confirm()
	await := func(what string, ok func(r holders.Record, by []string) bool) {
		t.Helper()
		deadline := time.Now().Add(30 * time.Second)
		for h := b.read(); !ok(h, h.On(id)); h = b.read() {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, h)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	await("a query has failed", func(holders.Record, []string) bool { return client.Confirmed().Err != nil })
	if h := b.read(); len(h.On(id)) != 1 || h.Complete || !strings.Contains(h.On(id)[0], "job train") || !strings.Contains(h.Missing, "expired") {
		t.Errorf("while the API fails: %+v", h)
	}
	api.place("")
	api.answerAgain()
	fails.Store(false)
	await("the servers have no allocation any more", func(h holders.Record, by []string) bool { return h.Complete && len(by) == 0 })
}

// The servers are also asked for a GPU that the policy does not offer any more: its claim ends by their answer.
func TestServersAreAskedForAGPUThatIsNotOffered(t *testing.T) {
	api := &slowAPI{}
	server := httptest.NewServer(api)
	defer server.Close()
	client := agentapi.New(agentapi.Options{Address: server.URL, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); client.Run(ctx, nil, func() {}) }()
	defer func() { cancel(); <-ended }()
	config := inventory.Config{Exclude: []gpu.DeviceID{coretest.GPU(1)}}
	inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2), Config: config}).WithoutHost()
	b := allocationReader{client, func() *inventory.Allocatable { return inv }, func() []gpu.DeviceID { return []gpu.DeviceID{coretest.GPU(1)} }}
	deadline := time.Now().Add(20 * time.Second)
	for h := b.read(); !h.Complete; h = b.read() {
		if time.Now().After(deadline) {
			t.Fatalf("%+v", h)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A unit that was given out while the API fails (its token has expired) has a holder that this process knows of, also with --force.
func TestGivenOutWhileTheAPIFails(t *testing.T) {
	client := agentapi.New(agentapi.Options{Address: "http://127.0.0.1:1", Log: slog.New(slog.DiscardHandler)})
	inv, id := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2)}).WithoutHost(), coretest.GPU(1)
	plan, err := inv.Reserve(inventory.UnitID(id))
	if err != nil {
		t.Fatal(err)
	}
	client.Reserved(plan.Units)
	r := allocationReader{client, func() *inventory.Allocatable { return inv }, func() []gpu.DeviceID { return nil }}
	if h := r.read(); len(h.On(id)) != 1 || h.Complete {
		t.Errorf("given out: %+v", h)
	}
	if h := r.read(); len(h.On(coretest.GPU(0))) != 0 {
		t.Errorf("not given out: %+v", h)
	}
}
