package nomad

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/test/check"
)

func asJSON(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	check.NoError(t, err)
	return string(text)
}

// full is an allocation as a single read has it.
func full(a *api.AllocationListStub, j *api.Job) *api.Allocation {
	return &api.Allocation{
		ID: a.ID, Name: a.Name, Namespace: a.Namespace, NodeID: a.NodeID, NodeName: a.NodeName, JobID: a.JobID, Job: j, TaskGroup: a.TaskGroup,
		AllocatedResources: a.AllocatedResources, DesiredStatus: a.DesiredStatus, ClientStatus: a.ClientStatus, NextAllocation: a.NextAllocation, CreateIndex: a.CreateIndex,
		AllocModifyIndex: a.CreateIndex,
	}
}

// What is read right before an act is of its node, and an allocation that was told to move is ending.
func TestLive(t *testing.T) {
	yes := true
	for _, tc := range []struct {
		name   string
		change func(*server, *api.Allocation)
		phase  rescue.Phase
		err    string
	}{
		{"runs", nil, rescue.Running, ""},
		{"is to migrate", func(_ *server, a *api.Allocation) { a.DesiredTransition.Migrate = &yes }, rescue.Ending, ""},
		{"was stopped", func(_ *server, a *api.Allocation) { a.DesiredStatus = "stop" }, rescue.Ending, ""},
		{"is unknown", func(_ *server, a *api.Allocation) { a.ClientStatus = "unknown" }, rescue.Unknown, ""},
		{"has ended", func(_ *server, a *api.Allocation) { a.ClientStatus = "complete" }, rescue.Ended, ""},
		{"is gone", func(s *server, _ *api.Allocation) { s.refuses["/allocation/web"] = http.StatusNotFound }, rescue.Ended, ""},
		{"is hidden", func(s *server, _ *api.Allocation) {
			s.refuses["/allocation/web"], s.bodies["/allocation/web"] = http.StatusInternalServerError, "Unknown allocation"
		}, 0, "allocations can't be read"},
		{"node is gone", func(s *server, _ *api.Allocation) { s.refuses["/node/"+nodeID(0)] = http.StatusNotFound }, 0, "read node node-0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newServer(2, 2)
			s.region.fail(0, 0, xid95)
			s.region.details[nodeID(0)].NodeResources.Devices[0].Instances[0].Healthy = false
			a := s.region.run("web", "service", 0, 0)
			one := full(a, job(a, 1))
			if tc.change != nil {
				tc.change(s, one)
			}
			s.bodies["/node/"+nodeID(0)+"/allocations"] = "[]" // a list that lacks it
			if s.bodies["/allocation/web"] == "" {
				s.bodies["/allocation/web"] = asJSON(t, one)
			}
			c := s.cluster(t)
			c.nodeIDs = map[string]string{"node-0": nodeID(0)}
			live, err := c.Live(t.Context(), rescue.Act{Subject: rescue.Subject{Node: "node-0"}, Work: []rescue.Target{{ID: "web", Namespace: "default"}}})
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("%v, want %q", err, tc.err)
				}
				return
			}
			check.NoError(t, err)
			phase := rescue.Ended
			if w := work(live, "web"); w != nil {
				phase = w.Phase
			}
			if phase != tc.phase || len(live.Nodes) != 1 || live.Nodes[0].Name != "node-0" || len(live.Nodes[0].Faults) != 1 {
				t.Errorf("%s, want %s: %+v", phase, tc.phase, live)
			}
		})
	}
	if _, err := newServer(1, 1).cluster(t).Live(t.Context(), rescue.Act{Subject: rescue.Subject{Node: "elsewhere"}}); err == nil {
		t.Error("a node that is not listed is read")
	}
}

// A node becomes ineligible after its mark, and eligible before the mark goes. A mark is not written again while the servers do not show it yet, nor over one
// that they show.
func TestMark(t *testing.T) {
	s := newServer(1, 1)
	s.bodies["/client/metadata"], s.bodies["/node/"+nodeID(0)+"/eligibility"] = "{}", "{}"
	c := s.cluster(t)
	c.nodeIDs = map[string]string{"node-0": nodeID(0)}
	calls := func(m rescue.Mark) string {
		s.calls = nil
		m.Node = "node-0"
		index, err := c.Mark(t.Context(), m)
		check.NoError(t, err)
		if (index == 700) != (m.Eligible != rescue.Unchanged) {
			t.Errorf("index %d", index)
		}
		return strings.ReplaceAll(strings.Join(s.calls, "; "), nodeID(0), "N")
	}
	set := `/client/metadata {"NodeID":"N","Meta":{"gpu_repair":"reset","gpu_repair_by":"gpu-fleet"}}`
	removed := `/client/metadata {"NodeID":"N","Meta":{"gpu_repair":null,"gpu_repair_by":null}}`
	toggled := `/node/N/eligibility {"NodeID":"N","Eligibility":"%s"}`
	for i, tc := range []struct {
		mark rescue.Mark
		want string
	}{
		{rescue.Mark{Repair: health.Reset}, set},
		{rescue.Mark{Repair: health.Reset}, ""},
		{rescue.Mark{Repair: health.Reset, Eligible: rescue.MakeIneligible}, fmt.Sprintf(toggled, "ineligible")},
		{rescue.Mark{Repair: health.NoRepair, Eligible: rescue.MakeEligible}, fmt.Sprintf(toggled, "eligible") + "; " + removed},
		{rescue.Mark{Repair: health.Reset, Eligible: rescue.MakeIneligible}, set + "; " + fmt.Sprintf(toggled, "ineligible")},
	} {
		if got := calls(tc.mark); got != tc.want {
			t.Errorf("%d: %s, want %s", i, got, tc.want)
		}
	}
	c = s.cluster(t)
	c.nodeIDs = map[string]string{"node-0": nodeID(0)}
	shown := c.shown.Load()
	shown.Nodes = []rescue.Node{{Name: "node-0", Mark: health.Reboot}}
	c.shown.Store(shown)
	if got := calls(rescue.Mark{Repair: health.Reboot, Eligible: rescue.MakeIneligible}); got != fmt.Sprintf(toggled, "ineligible") {
		t.Errorf("a mark that is not ours: %s", got)
	}
	s.refuse("/client/metadata", http.StatusForbidden, "Permission denied")
	if _, err := c.Mark(t.Context(), rescue.Mark{Node: "node-0", Repair: health.Reset}); err == nil || len(c.Problems()) != 1 {
		t.Errorf("without the right: %v, %v", err, c.Problems())
	}
}

// A ledger that is missing or can't be used is not an empty one, and nothing is written over what another process has written.
func TestStore(t *testing.T) {
	const path = "/var/gpu-fleet/ledger"
	ledger := rescue.NewLedger()
	variable := func(items api.VariableItems) string {
		return asJSON(t, &api.Variable{Path: "gpu-fleet/ledger", ModifyIndex: 42, Items: items})
	}
	damaged := func(err error) bool { var d *fleet.DamagedError; return errors.As(err, &d) }
	for _, tc := range []struct {
		name   string
		status int
		body   string
		want   func(error) bool
	}{
		{"good", 0, variable(api.VariableItems{"ledger": asJSON(t, ledger)}), func(err error) bool { return err == nil }},
		{"missing", http.StatusNotFound, "variable not found", func(err error) bool { return errors.Is(err, fleet.ErrNoLedger) }},
		{"no item", 0, variable(api.VariableItems{"other": "x"}), damaged},
		{"no JSON", 0, variable(api.VariableItems{"ledger": "{"}), damaged},
		{"empty", 0, variable(api.VariableItems{"ledger": ""}), damaged},
		{"of another version", 0, variable(api.VariableItems{"ledger": `{"version":99}`}), damaged},
		{"denied", http.StatusForbidden, "Permission denied", func(err error) bool { var r *RightsError; return errors.As(err, &r) }},
		{"no leader", http.StatusInternalServerError, "No cluster leader", func(err error) bool { return err != nil && !damaged(err) }},
	} {
		s := newServer(0, 0)
		s.refuse(path, tc.status, tc.body)
		_, version, err := s.cluster(t).Store("", "gpu-fleet").Read(t.Context())
		if !tc.want(err) || (version == "42") != (err == nil) {
			t.Errorf("%s: version %q, %v", tc.name, version, err)
		}
	}
	s := newServer(0, 0)
	store := s.cluster(t).Store("team", "gpu-fleet")
	s.refuse(path, http.StatusConflict, variable(nil))
	if _, err := store.Write(t.Context(), ledger, "41"); !errors.Is(err, fleet.ErrConflict) {
		t.Errorf("conflict: %v", err)
	}
	if err := store.Create(t.Context()); !errors.Is(err, fleet.ErrExists) {
		t.Errorf("it is there: %v", err)
	}
	for _, version := range []fleet.Version{"", "0", "x"} {
		if _, err := store.Write(t.Context(), ledger, version); err == nil || len(s.calls) != 2 {
			t.Errorf("version %q: %v, calls %v", version, err, s.calls)
		}
	}
	if got := store.String(); got != "variable gpu-fleet/ledger in namespace team of Nomad region dc1" {
		t.Error(got)
	}
}

// Allocations may be hidden by a rule for one namespace, and by the lack of one for all: each is an error before anything is concluded.
func TestRights(t *testing.T) {
	policy := asJSON(t, &api.ACLPolicy{Name: "p", Rules: "namespace \"*\" {}\n  namespace \"secret-*\" { policy = \"deny\" }\n"})
	for _, tc := range []struct {
		name   string
		hidden string
		change func(*server)
		want   string
	}{
		{"all is permitted", "", nil, ""},
		{"not all namespaces", anyNamespace, nil, "can't read all namespaces"},
		{"one namespace", "team", nil, "can't read namespace team"},
		{"a rule that denies", "secret-" + anyNamespace, nil, "can't read namespace secret-*"},
		{"a management token", "team", func(s *server) { s.bodies["/acl/token/self"] = `{"Type":"management"}` }, ""},
		{"no ACLs", "team", func(s *server) {
			s.refuses["/acl/token/self"], s.bodies["/acl/token/self"] = http.StatusBadRequest, "ACL support disabled"
		}, ""},
		{"a role whose policy denies", "secret-" + anyNamespace, func(s *server) {
			s.bodies["/acl/token/self"], s.bodies["/acl/role/r1"] = `{"Type":"client","Roles":[{"ID":"r1"}]}`, `{"Policies":[{"Name":"p"}]}`
		}, "can't read namespace secret-*"},
		{"preemption can't be read", "", func(s *server) { s.refuses["/operator/scheduler/configuration"] = http.StatusForbidden }, ""},
		{"an expired token", "", func(s *server) {
			s.refuses["/acl/token/self"], s.bodies["/acl/token/self"] = http.StatusForbidden, "ACL token expired"
		}, "the token is not valid"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(1, 1)
			s.hidden = map[string]bool{tc.hidden: tc.hidden != ""}
			s.bodies["/acl/token/self"], s.bodies["/acl/policy/p"] = `{"Type":"client","Policies":["p"]}`, policy
			s.bodies["/namespaces"] = `[{"Name":"default"},{"Name":"team"}]`
			if tc.change != nil {
				tc.change(s)
			}
			got := s.run(t).Shown().Load()
			if (tc.want == "") != (got.Problem == "") || !strings.Contains(got.Problem, tc.want) {
				t.Errorf("%s: %q, want %q", tc.name, got.Problem, tc.want)
			}
		})
	}
}

// A workload identity is no token that the servers know. It has the policies of its job, which servers before 1.10 do not tell; without ACLs it has all rights.
func TestRightsOfWorkloadIdentity(t *testing.T) {
	for _, tc := range []struct {
		name   string
		status int
		body   string
		want   string
	}{
		{"a policy that denies", 0, `[{"Name":"p"}]`, "can't read namespace secret"},
		{"servers before 1.10", http.StatusForbidden, "Permission denied", ""},
		{"no ACLs", http.StatusBadRequest, "ACL support disabled", ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(1, 1)
			s.refuse("/acl/policy/self", tc.status, tc.body)
			s.bodies["/acl/policy/p"] = asJSON(t, &api.ACLPolicy{Name: "p", Rules: `namespace "secret" { policy = "deny" }`})
			s.bodies["/namespaces"], s.hidden = `[]`, map[string]bool{"secret": true}
			c := s.cluster(t)
			c.o.TokenFile = filepath.Join(t.TempDir(), "token")
			check.NoError(t, os.WriteFile(c.o.TokenFile, []byte("head.claims.signature"), 0o600))
			_, err := newReader(c).read(t.Context())
			if (err != nil) != (tc.want != "") || err != nil && !strings.Contains(err.Error(), tc.want) || s.times("/acl/token/self") > 0 {
				t.Errorf("%s: %v", tc.name, err)
			}
			if asked := s.times("/namespaces") > 0; asked != (tc.status != http.StatusBadRequest) {
				t.Errorf("%s: looks for namespaces that are hidden: %t", tc.name, asked)
			}
		})
	}
}

// In mode act a token whose policies permit no stop is a problem before the first act.
func TestRightToStop(t *testing.T) {
	for rules, want := range map[string]bool{
		`namespace "*" { capabilities = ["list-jobs", "read-job"] }`:                    true,
		`namespace "*" { capabilities = ["list-jobs", "read-job", "alloc-lifecycle"] }`: false,
		`namespace "*" { policy = "write" }`:                                            false,
		`{"namespace": {"*": {"policy": "write"}}}`:                                     false,
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(1, 1)
			s.bodies["/acl/token/self"], s.bodies["/namespaces"] = `{"Type":"client","Policies":["p"]}`, `[]`
			s.bodies["/acl/policy/p"] = asJSON(t, &api.ACLPolicy{Name: "p", Rules: rules})
			all := s.run(t).Problems()
			if got := len(all) == 1 && strings.Contains(all[0].Remedy, "alloc-lifecycle"); got != want {
				t.Errorf("%s: %v", rules, all)
			}
		})
	}
}

// If it can't be read whether the servers preempt, they are taken to: that is a problem with its remedy.
func TestPreemptionUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(1, 1)
		s.region.run("web", "batch", 0, 0)
		s.refuse("/operator/scheduler/configuration", http.StatusForbidden, "Permission denied")
		c := s.run(t)
		if all := c.Problems(); len(all) != 1 || !strings.Contains(all[0].Remedy, "operator:read") || !c.Shown().Load().Work[0].Preempts {
			t.Errorf("%v, %+v", all, c.Shown().Load().Work)
		}
		s.refuse("/operator/scheduler/configuration", 0, "")
		time.Sleep(rightsPeriod + listPeriod)
		synctest.Wait()
		if len(c.Problems()) != 0 || c.Shown().Load().Work[0].Preempts {
			t.Errorf("%v, %+v", c.Problems(), c.Shown().Load().Work)
		}
	})
}

// When all allocations of a namespace go at once, the rights are looked at before it is taken to be empty.
func TestRightIsTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(1, 2)
		s.bodies["/acl/token/self"], s.bodies["/namespaces"] = `{"Type":"client"}`, `[{"Name":"default"}]`
		s.region.run("web", "service", 0, 0)
		c := s.run(t)
		if got := c.Shown().Load(); got.Problem != "" || len(got.Work) != 1 {
			t.Fatalf("%+v", got)
		}
		s.mu.Lock()
		s.region.allocs = nil
		s.hidden = map[string]bool{"default": true}
		s.mu.Unlock()
		time.Sleep(listPeriod + time.Second)
		synctest.Wait()
		if got := c.Shown().Load(); !strings.Contains(got.Problem, "can't read namespace default") || len(got.Work) != 1 {
			t.Errorf("%q, %d allocations", got.Problem, len(got.Work))
		}
	})
}

// The token is read at each use.
func TestToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	s := newServer(1, 1)
	c := s.cluster(t)
	c.o.TokenFile = file
	act := rescue.Act{Work: []rescue.Target{{ID: "a1"}}}
	if answer := c.Do(t.Context(), act); answer.Kind != rescue.NotMade || len(s.tokens) > 0 {
		t.Errorf("without a file: %+v", answer)
	}
	for _, token := range []string{"one", "two", ""} {
		check.NoError(t, os.WriteFile(file, []byte(token+"\n"), 0o600))
		c.Do(t.Context(), act)
	}
	if got := strings.Join(s.tokens, " "); got != "one two" {
		t.Errorf("tokens %q", got)
	}
}

// An allocation that is followed has the specs of the job as it is and as it was, and its replacement is found when it has gone.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(2, 2)
		a := s.region.run("web", "service", 0, 0)
		j := job(a, 1)
		three := uint64(3)
		j.Version = &three
		j.Constraints = constraint("${node.unique.name}", "!=", "node-0")
		s.bodies["/job/web"] = asJSON(t, j)
		s.bodies["/allocation/web"] = asJSON(t, full(a, job(a, 1)))
		c := s.run(t)
		c.Follow([]string{"web", "never seen"})
		time.Sleep(2 * time.Second)
		synctest.Wait()
		got := c.Shown().Load()
		w := work(got, "web")
		if fmt.Sprint(got.Pools[w.Pool]) != "[node-1]" || !strings.Contains(w.Pool, "version 3") || !strings.Contains(w.Pool, "version 0") {
			t.Errorf("pool %q: %v", w.Pool, got.Pools)
		}
		s.mu.Lock()
		stopped := full(a, j)
		stopped.DesiredStatus, stopped.ClientStatus, stopped.AllocModifyIndex = "stop", "complete", 2000
		next := *a
		next.ID, next.CreateIndex, next.ClientStatus = "next", 2000, "complete"
		s.region.allocs = nil
		s.bodies["/allocation/web"] = asJSON(t, stopped)
		s.bodies["/job/web/allocations"] = asJSON(t, []*api.AllocationListStub{allocStubOf(stopped), &next})
		s.mu.Unlock()
		time.Sleep(listPeriod)
		synctest.Wait()
		if w := work(c.Shown().Load(), "next"); w == nil || w.Replaces != "web" || w.Phase != rescue.Ended {
			t.Errorf("the replacement: %+v", c.Shown().Load().Work)
		}
		c.Follow(nil)
		time.Sleep(2 * listPeriod)
		synctest.Wait()
		if n := len(c.Shown().Load().Work); n != 0 {
			t.Errorf("%d allocations after it is not followed any more", n)
		}
	})
}

// An address or file that can't be used is an error at once.
func TestNew(t *testing.T) {
	for _, o := range []Options{
		{}, {Address: "nomad:4646"}, {Address: "ftp://nomad"}, {Address: "https://nomad:4646", CAFile: "/none"}, {Address: "https://nomad:4646", CertFile: "/none"},
		{Address: "https://nomad:4646", CertFile: "/none", KeyFile: "/none"}, {Address: "https://nomad:4646", CAFile: "/dev/null"},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v", o)
		}
	}
	for _, address := range []string{"http://nomad:4646", "unix:///run/nomad.sock"} {
		_, err := New(Options{Name: "dc1", Address: address})
		check.NoError(t, err)
	}
}

// The time of a read of 1,000 nodes of which none has changed, and what is kept of them.
func BenchmarkRead(b *testing.B) {
	s := newServer(0, 0)
	s.region = fleet1000()
	s.bodies["/nodes"], s.bodies["/allocations"] = mustJSON(s.region.nodes), mustJSON(s.region.allocs)
	for id, n := range s.region.details {
		s.bodies["/node/"+id] = mustJSON(n)
	}
	s.region.details = nil
	client, err := api.NewClient(&api.Config{Address: "http://nomad:4646", HttpClient: &http.Client{Transport: s}})
	check.NoError(b, err)
	c, err := New(Options{Name: "dc1", Address: "http://nomad:4646"})
	check.NoError(b, err)
	c.client = client
	before := heap()
	r := newReader(c)
	c.show(r.read(b.Context()))
	kept := heap() - before
	b.ReportAllocs()
	for b.Loop() {
		c.show(r.read(b.Context()))
	}
	b.ReportMetric(kept, "MB-kept")
	if n := len(c.Shown().Load().Work); n != 8000 {
		b.Fatal(n, c.Shown().Load().Problem)
	}
}

func mustJSON(v any) string { text, _ := json.Marshal(v); return string(text) }
