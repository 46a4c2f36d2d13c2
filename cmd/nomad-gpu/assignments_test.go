package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

// slowAPI is the API of a Nomad agent whose queries that wait are not answered after the first one.
type slowAPI struct {
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

func (s *slowAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/agent/self" {
		fmt.Fprint(w, `{"stats":{"client":{"node_id":"f7476465"}}}`)
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

	inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2)})
	id := coretest.GPU(1)
	var status []assignment.Status
	b := allocationReader{client, func() *inventory.Inventory { return inv }, func() []assignment.Status { return status }}
	for range 20 {
		if h := b.read()(id); h.Known || len(h.By) > 0 {
			t.Fatalf("nothing was confirmed: %+v", h)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if api.count() != 0 {
		t.Errorf("%d queries for a GPU that does not move", api.count())
	}

	status = []assignment.Status{{Assignment: inventory.Assignment{GPU: id, Here: true, Moving: "to dra"}}}
	await := func(what string, ok func(assignment.Holders) bool) {
		t.Helper()
		deadline := time.Now().Add(20 * time.Second)
		for h := b.read()(id); !ok(h); h = b.read()(id) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, h)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	await("no holder", func(h assignment.Holders) bool { return h.Known && len(h.By) == 0 && h.Age < answerAge })
	api.place(id)
	await("an allocation that was placed while the query waits", func(h assignment.Holders) bool {
		return len(h.By) == 1 && strings.Contains(h.By[0], "job train")
	})
	if asked := api.count(); asked > 10 {
		t.Errorf("%d queries in some seconds", asked)
	}
}
