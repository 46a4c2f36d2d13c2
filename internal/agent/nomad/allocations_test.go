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

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
	"github.com/tandem-gpu/tandem/test/check"
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

// allocationsOf is the record of two GPUs by a Nomad agent's API, which has answered once. Its client ends with the test. moving are the GPUs that move.
func allocationsOf(t *testing.T, api http.Handler, config inventory.Config, moving ...gpu.DeviceID) (r *allocationReader, server *httptest.Server, changed <-chan struct{}) {
	t.Helper()
	server = httptest.NewServer(api)
	t.Cleanup(server.Close)
	r = readerOf(server.URL, config, moving...)
	changes, ended := make(chan struct{}, 10), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { defer close(ended); r.client.Run(ctx, nil, func() { changes <- struct{}{} }) }()
	t.Cleanup(func() { cancel(); <-ended })
	<-changes
	return r, server, changes
}

func readerOf(address string, config inventory.Config, moving ...gpu.DeviceID) *allocationReader {
	inv := inventory.Build(inventory.Input{Snapshot: coretest.GPUs(2), Config: config}).WithoutHost()
	client := agentapi.New(agentapi.Options{Address: address, Log: slog.New(slog.DiscardHandler)})
	return &allocationReader{
		client: client, current: func() *inventory.Allocatable { return inv }, leaving: func() []gpu.DeviceID { return moving },
	}
}

// give has the agent give a GPU out.
func give(t *testing.T, r *allocationReader, id gpu.DeviceID) {
	t.Helper()
	plan, err := r.current().Reserve(inventory.UnitID(id))
	check.NoError(t, err)
	r.client.Reserved(plan.Units)
}

// awaitRecord reads until ok holds for a record, and for the work that has a GPU by it.
func awaitRecord(t *testing.T, r *allocationReader, id gpu.DeviceID, what string, ok func(r holders.Record, by []string) bool) {
	t.Helper()
	check.Until(t, what, func() bool {
		h := r.read()
		return ok(h, h.On(id))
	})
}

// That nothing has a GPU is known only by an answer of just now, which the record asks for while the GPU moves, and only then.
func TestAllocationsOfGPUs(t *testing.T) {
	api, id := &slowAPI{}, coretest.GPU(1)
	b, _, _ := allocationsOf(t, api, inventory.Config{})
	for range 20 {
		if h := b.read(); h.Complete || len(h.Holders) > 0 {
			t.Fatalf("nothing was confirmed: %+v", h)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if api.count() != 0 {
		t.Errorf("%d queries for a GPU that does not move", api.count())
	}

	b.leaving = func() []gpu.DeviceID { return []gpu.DeviceID{id} }
	awaitRecord(t, b, id, "no holder", func(h holders.Record, by []string) bool {
		return h.Complete && len(by) == 0 && time.Since(h.At) < answerAge
	})
	// Between two queries the record is the same one: read again it is not older, else no settle time would pass beside work on another GPU.
	if first, again := b.read(), b.read(); first.At.IsZero() || again.At.Before(first.At) {
		t.Errorf("read again it is of %v, was of %v", again.At, first.At)
	}
	api.place(id)
	awaitRecord(t, b, id, "an allocation that was placed while the query waits", func(_ holders.Record, by []string) bool {
		return len(by) == 1 && strings.Contains(by[0], "job train")
	})
	if asked := api.count(); asked > 10 {
		t.Errorf("%d queries in some seconds", asked)
	}
}

// A token that sees one namespace does not show the work of another: a GPU that this agent gave out has a holder, also with --force, and of the
// others it is not known.
func TestGPUOfHiddenAllocation(t *testing.T) {
	given, other := coretest.GPU(1), coretest.GPU(0)
	api := &slowAPI{policies: `{"RulesJSON":{"Namespaces":[{"Name":"batch","Capabilities":["read-job"]}]}}`}
	r, _, _ := allocationsOf(t, api, inventory.Config{}, given)
	give(t, r, given)
	for deadline := time.Now().Add(20 * time.Second); r.client.Confirmed().At.IsZero(); time.Sleep(10 * time.Millisecond) {
		if h := r.read(); len(h.On(given)) != 1 || h.Complete || !strings.Contains(h.On(given)[0], "does not show") || time.Now().After(deadline) {
			t.Fatalf("given out: %+v", h)
		}
		r.client.Confirm()
	}
	if h := r.read(); h.Complete || len(h.On(other)) != 0 || !strings.Contains(h.Missing, `namespace "*"`) {
		t.Errorf("not given out: %+v", h)
	}
}

// A job that was seen has its GPU also when the API fails, for example because a token has expired. It has ended when an answer shows that.
func TestHolderOutlivesTheAPI(t *testing.T) {
	api := &slowAPI{holds: coretest.GPU(1)}
	var fails atomic.Bool
	id := coretest.GPU(1)
	b, server, changed := allocationsOf(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fails.Load() {
			http.Error(w, "ACL token expired", http.StatusForbidden)
			return
		}
		api.ServeHTTP(w, r)
	}), inventory.Config{}, id)
	fails.Store(true)
	server.CloseClientConnections()
	<-changed // that it fails
	b.client.Confirm()
	awaitRecord(t, b, id, "a query has failed", func(holders.Record, []string) bool { return b.client.Confirmed().Err != nil })
	if h := b.read(); len(h.On(id)) != 1 || h.Complete || !strings.Contains(h.On(id)[0], "job train") || !strings.Contains(h.Missing, "expired") {
		t.Errorf("while the API fails: %+v", h)
	}
	api.place("")
	api.answerAgain()
	fails.Store(false)
	awaitRecord(t, b, id, "the servers have no allocation any more", func(h holders.Record, by []string) bool { return h.Complete && len(by) == 0 })
}

// The servers are also asked for a GPU that the policy does not offer any more: it stays recorded until their answer.
func TestServersAreAskedForAGPUThatIsNotOffered(t *testing.T) {
	id := coretest.GPU(1)
	b, _, _ := allocationsOf(t, &slowAPI{}, inventory.Config{Exclude: []gpu.DeviceID{id}}, id)
	awaitRecord(t, b, id, "a complete record", func(h holders.Record, _ []string) bool { return h.Complete })
}

// A unit that was given out while the API fails (its token has expired) has a holder that this process knows of, also with --force.
func TestGivenOutWhileTheAPIFails(t *testing.T) {
	r, id := readerOf("http://127.0.0.1:1", inventory.Config{}), coretest.GPU(1)
	give(t, r, id)
	if h := r.read(); len(h.On(id)) != 1 || h.Complete {
		t.Errorf("given out: %+v", h)
	}
	if h := r.read(); len(h.On(coretest.GPU(0))) != 0 {
		t.Errorf("not given out: %+v", h)
	}
}

// Allocations that are not read by the settings have the remedy for the setting that is the cause.
func TestUnreadBySettings(t *testing.T) {
	for address, remedy := range map[string]string{"": "set nomad_address", "http://127.0.0.1:4646": "set occupancy to report or withhold"} {
		var s config.Nomad
		s.Operations.NomadAddress, s.Core.Occupancy = address, inventory.OccupancyOff
		r, err := unread(s)(t.Context(), nil)
		if err != nil || !r.Never || r.Missing == "" || r.Remedy != remedy {
			t.Errorf("address %q: %+v, %v", address, r, err)
		}
	}
}

// A GPU whose instance an allocation has is held while the allocation runs, also when the instance is gone.
func TestGPUOfAHeldInstanceThatIsGone(t *testing.T) {
	mixed := inventory.Config{MIG: inventory.MIGMixed}
	build := func(s gpu.Snapshot) *inventory.Allocatable {
		return inventory.Build(inventory.Input{Snapshot: s, Config: mixed}).WithoutHost()
	}
	r, _, _ := allocationsOf(t, &slowAPI{}, mixed)
	cut := build(coretest.WithMIG(coretest.GPUs(2), 1, "3g.40gb", "3g.40gb"))
	r.current = func() *inventory.Allocatable { return cut }
	give(t, r, coretest.Instance(1, 0))
	if by := r.read().On(coretest.GPU(1)); len(by) != 1 {
		t.Fatalf("holders: %q", by)
	}
	uncut := build(coretest.GPUs(2))
	r.current = func() *inventory.Allocatable { return uncut }
	for range 2 {
		if by := r.read().On(coretest.GPU(1)); len(by) != 1 {
			t.Errorf("without the instance: holders %q", by)
		}
	}
}
