package agentapi

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// agent is the API of a Nomad agent: its answers have the shape of those of Nomad 1.11.
type agent struct {
	token string // that it requires; "" = none

	mu      sync.Mutex
	acl     *acl // nil = the servers have no ACLs
	index   uint64
	allocs  string // JSON of the list
	changed chan struct{}
	fail    bool
	hang    bool // queries that wait get no answer
	queries int
	waiting bool // the latest query
	asked   int  // for a confirmation
}

// acl is what the servers have of the token.
type acl struct {
	kind     string            // "management", "client"; "" = a workload identity
	policies map[string]string // namespaces of RulesJSON, by name
	broken   bool
}

func (a *agent) setACL(to *acl) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.acl = to
}

// serveACL answers as nomad/acl_endpoint.go does.
func (a *agent) serveACL(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	name, one := strings.CutPrefix(r.URL.Path, "/v1/acl/policy/")
	switch is := a.acl; {
	case is == nil && r.URL.Path == "/v1/acl/token/self":
		fmt.Fprint(w, `{"AccessorID":"acls-disabled","Type":"client","Policies":null}`)
	case is == nil:
		http.Error(w, "ACL support disabled", http.StatusBadRequest)
	case is.broken:
		http.Error(w, "Permission denied", http.StatusForbidden)
	case r.URL.Path == "/v1/acl/token/self" && is.kind == "":
		http.Error(w, "ACL token not found", http.StatusNotFound)
	case r.URL.Path == "/v1/acl/token/self":
		fmt.Fprintf(w, `{"AccessorID":"7a","Type":%q}`, is.kind)
	case one:
		fmt.Fprintf(w, `{"Name":%q,"RulesJSON":{"Agent":{"Policy":"read"},"Namespaces":%s}}`, name, is.policies[name])
	default:
		names := []string{}
		for name := range is.policies {
			names = append(names, fmt.Sprintf(`{"Name":%q}`, name))
		}
		fmt.Fprintf(w, "[%s]", strings.Join(names, ","))
	}
}

func newAgent() *agent { return &agent{index: 7, allocs: "[]", changed: make(chan struct{})} }

// set changes the allocations.
func (a *agent) set(allocs ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.index++
	a.allocs = "[" + strings.Join(allocs, ",") + "]"
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *agent) setFail(on bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fail = on
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *agent) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.queries
}

// awaitQuery waits until a query after that many waits for a change, and returns how many there were.
func (a *agent) awaitQuery(t *testing.T, after int) (n int) {
	t.Helper()
	check.Until(t, "a query that waits", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		n = a.queries
		return n > after && a.waiting
	})
	return n
}

func (a *agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("X-Nomad-Token") != a.token {
		http.Error(w, "Permission denied", http.StatusForbidden)
		return
	}
	if strings.HasPrefix(r.URL.Path, "/v1/acl/") {
		a.serveACL(w, r)
		return
	}
	switch r.URL.Path {
	case "/v1/agent/self":
		fmt.Fprint(w, `{"config":{"Region":"global","Datacenter":"dc1"},"member":{"Name":"one.global"},`+
			`"stats":{"runtime":{"kernel.name":"linux"},"client":{"node_id":"f7476465-4d6e-c0de-26d0-e383c49be941","known_servers":"127.0.0.1:4647","num_allocations":"1"}}}`)
	case "/v1/node/f7476465-4d6e-c0de-26d0-e383c49be941/allocations":
		if r.URL.RawQuery == "" { // a confirmation
			a.present(w)
			return
		}
		_, stale := r.URL.Query()["stale"]
		index, err := strconv.ParseUint(r.URL.Query().Get("index"), 10, 64)
		if wait, waitErr := time.ParseDuration(r.URL.Query().Get("wait")); !stale || err != nil || waitErr != nil || wait != waitTime {
			http.Error(w, "bad query "+r.URL.RawQuery, http.StatusBadRequest)
			return
		}
		a.answer(w, r, index)
	default:
		http.NotFound(w, r)
	}
}

func (a *agent) answer(w http.ResponseWriter, r *http.Request, index uint64) {
	a.mu.Lock()
	a.queries++
	for a.hang || a.index <= index && !a.fail {
		changed := a.changed
		a.waiting = true
		a.mu.Unlock()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
		a.mu.Lock()
		a.waiting = false
	}
	defer a.mu.Unlock()
	if a.fail {
		http.Error(w, "No cluster leader", http.StatusInternalServerError)
		return
	}
	w.Header().Set("X-Nomad-Index", strconv.FormatUint(a.index, 10))
	fmt.Fprint(w, a.allocs)
}

// present answers at once, as the leader of the servers does.
func (a *agent) present(w http.ResponseWriter) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked++
	if a.fail {
		http.Error(w, "No cluster leader", http.StatusInternalServerError)
		return
	}
	fmt.Fprint(w, a.allocs)
}

func alloc(id, job, status, devices string) string {
	return fmt.Sprintf(`{"ID":%q,"Namespace":"batch","JobID":%q,"Job":{"ID":%[2]q,"TaskGroups":[{"Name":"g"}]},"TaskGroup":"g","ClientStatus":%q,"CreateTime":1795767065000000000,"DesiredStatus":"run",`+
		`"AllocatedResources":{"Shared":{"DiskMB":300},"Tasks":{"main":{"Cpu":{"CpuShares":100},"Devices":%s},"side":{"Devices":null}}},"TaskStates":{"main":{"State":"running"}}}`,
		id, job, status, devices)
}

const gpus = `[{"Vendor":"nvidia","Type":"gpu","Name":"H100","DeviceIDs":["GPU-1::3","GPU-2"]},{"Vendor":"intel","Type":"gpu","Name":"x","DeviceIDs":["GPU-9"]}]`

// started runs a client until the test ends. What it logs is in the buffer after stop.
func started(t *testing.T, o Options) (c *Client, changed chan struct{}, log *bytes.Buffer, stop func()) {
	t.Helper()
	log, changed = &bytes.Buffer{}, make(chan struct{}, 1000)
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	c = New(o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx, nil, func() { changed <- struct{}{} }) }()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return c, changed, log, stop
}

func await(t *testing.T, changed <-chan struct{}) {
	t.Helper()
	select {
	case <-changed:
	case <-time.After(20 * time.Second):
		t.Fatal("no change")
	}
}

// awaitError waits until the record can't be read.
func awaitError(t *testing.T, c *Client) (err error) {
	t.Helper()
	check.Until(t, "an error", func() bool { _, err = c.Read(t.Context(), nil); return err != nil })
	return err
}

func owner(job, id string) holders.Work {
	return holders.Work{Orchestrator: holders.Nomad, Namespace: "batch", Name: job, ID: id}
}

// Changes come at once, an idle node costs no query, and what has ended holds nothing.
func TestFollows(t *testing.T) {
	a := newAgent()
	a.token = "secret"
	server := httptest.NewServer(a)
	defer server.Close()
	token := filepath.Join(t.TempDir(), "token")
	write(t, token, "old\n")
	c, changed, log, stop := started(t, Options{Address: server.URL + "/", TokenFile: token})
	if err := awaitError(t, c); !strings.Contains(err.Error(), "403") || !strings.Contains(err.Error(), "agent:read") {
		t.Errorf("with a bad token: %v", err)
	}
	write(t, token, "secret\n")
	await(t, changed)
	a.set(alloc("a1", "train", "running", gpus), alloc("a2", "old", "complete", gpus), alloc("a3", "new", "pending", "[]"))
	began := time.Now()
	await(t, changed)
	if took := time.Since(began); took > waitTime/6 {
		t.Errorf("took %v", took)
	}
	got, err := c.Read(t.Context(), nil)
	check.NoError(t, err)
	main := owner("train", "a1")
	main.Container = "main"
	placed := time.Unix(1795767065, 0)
	want := holders.Record{
		Tasks: map[holders.Work]holders.Task{main: {Running: true}}, Complete: true, HeldSince: map[gpu.DeviceID]time.Time{"GPU-1": placed, "GPU-2": placed}, Work: map[string]holders.Work{"a1": owner("train", "a1"), "a2": owner("old", "a2"), "a3": owner("new", "a3")},
		Holders: []holders.Holder{{Work: main, API: inventory.Nomad, Resource: "nvidia/gpu", Unit: "GPU-1::3", Device: "GPU-1"}, {Work: main, API: inventory.Nomad, Resource: "nvidia/gpu", Unit: "GPU-2", Device: "GPU-2"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	queries := a.awaitQuery(t, 0)
	a.set(alloc("a1", "train", "running", gpus), alloc("a4", "web", "running", "[]"))
	queries = a.awaitQuery(t, queries) // after the answer that has it
	if got, _ := c.Read(t.Context(), nil); len(changed) > 0 || len(got.Work) != 2 {
		t.Errorf("work without devices: %d changes, %v", len(changed), got.Work)
	}
	if time.Sleep(2 * time.Second); a.count() != queries {
		t.Errorf("%d queries while nothing changed", a.count()-queries)
	}

	a.setFail(true)
	await(t, changed)
	if _, err := c.Read(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "No cluster leader") {
		t.Errorf("failing: %v", err)
	}
	time.Sleep(2 * time.Second)
	a.setFail(false)
	await(t, changed)
	stop()
	text := log.String()
	if strings.Count(text, "API unavailable") != 1 || strings.Count(text, "API available") != 2 || strings.Contains(text, "secret") {
		t.Errorf("log:\n%s", text)
	}
}

// A client that ends leaves no goroutine and no connection, whatever it waits for.
func TestLeavesNothing(t *testing.T) {
	a := newAgent()
	socket := filepath.Join(t.TempDir(), "api.sock")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	check.NoError(t, err)
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: a}} //nolint:gosec // of a test
	server.Start()
	defer server.Close()
	before := runtime.NumGoroutine()
	for range 50 {
		_, changed, _, stop := started(t, Options{Address: "unix://" + socket})
		await(t, changed)
		stop()
	}
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before+2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

// An agent with a certificate is verified by the CA in NOMAD_CACERT, and not trusted without.
func TestTLS(t *testing.T) {
	a := newAgent()
	server := httptest.NewTLSServer(a)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	defer server.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	write(t, ca, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	env := map[string]string{"NOMAD_CACERT": ca}
	_, changed, _, _ := started(t, Options{Address: server.URL, LookupEnv: func(k string) (string, bool) { v, ok := env[k]; return v, ok }})
	await(t, changed)
	c, _, _, _ := started(t, Options{Address: server.URL})
	if err := awaitError(t, c); !strings.Contains(err.Error(), "certificate") {
		t.Errorf("without the CA: %v", err)
	}
	for key, path := range map[string]string{"NOMAD_CACERT": filepath.Join(t.TempDir(), "none"), "NOMAD_CLIENT_CERT": ca} {
		env := map[string]string{key: path, "NOMAD_CLIENT_KEY": ca}
		c := New(Options{Address: server.URL, LookupEnv: func(k string) (string, bool) { v, ok := env[k]; return v, ok }})
		if _, err := c.Read(t.Context(), nil); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", key, err)
		}
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	check.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}
