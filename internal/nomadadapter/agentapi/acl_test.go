package agentapi

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func units(ids ...inventory.UnitID) (all []inventory.Unit) {
	for _, id := range ids {
		of, _ := id.Split()
		all = append(all, inventory.Unit{ID: id, Device: gpu.Device{ID: of}})
	}
	return all
}

// ended is an allocation that had devices until a time.
func ended(id, devices string, at time.Time) string {
	return strings.Replace(alloc(id, "old", "complete", devices), `"State":"running"`, fmt.Sprintf(`"State":"dead","FinishedAt":%q`, at.Format(time.RFC3339Nano)), 1)
}

// unnamed are the units of holds without an allocation.
func unnamed(r holders.Record) (ids []inventory.UnitID) {
	for _, h := range r.Holders {
		if h.Work == (holders.Work{Orchestrator: holders.Nomad}) {
			ids = append(ids, h.Unit)
		}
	}
	return ids
}

const (
	read     = `[{"Name":"*","Capabilities":["list-jobs","read-job"]}]`
	oneSpace = `[{"Name":"batch","Capabilities":["list-jobs","read-job"]}]`
)

// With a token that does not show every allocation the record is not complete, and what this agent has given out and the record does not show
// is held, until a task with it has ended, or a token that shows all has confirmed that nothing has it.
func TestAllocationsThatTheTokenDoesNotShow(t *testing.T) {
	a := newAgent()
	a.setACL(&acl{kind: "client", policies: map[string]string{"one": oneSpace}})
	server := httptest.NewServer(a)
	defer server.Close()
	c, changed, log, stop := started(t, Options{Address: server.URL})
	await(t, changed)
	expect := func(when string, complete bool, want ...inventory.UnitID) {
		t.Helper()
		r, err := c.Read(t.Context(), nil)
		if got := unnamed(r); err != nil || r.Complete != complete || (r.Missing == "") != complete || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, complete %t (%s), held %v, want %v", when, err, r.Complete, r.Missing, got, want)
		}
	}
	expect("nothing was given out", false)
	c.Reserved(units("GPU-1::3", "GPU-2", "GPU-3"))
	expect("given out", false, "GPU-1::3", "GPU-2", "GPU-3")
	if is := confirmed(t, c); is.Record.Complete || fmt.Sprint(unnamed(is.Record)) != "[GPU-1::3 GPU-2 GPU-3]" {
		t.Errorf("confirmed: %+v", is)
	}
	a.set(alloc("a1", "train", "running", gpus), ended("a0", `[{"Vendor":"nvidia","Type":"gpu","DeviceIDs":["GPU-3"]}]`, time.Now().Add(-time.Minute)))
	await(t, changed)
	expect("two are shown, and the one before on the third", false, "GPU-3")
	a.set(ended("a1", gpus, time.Now()))
	await(t, changed)
	expect("two have ended", false, "GPU-3")
	c.Reserved(units("GPU-1::3"))
	expect("one is given out again", false, "GPU-1::3", "GPU-3")

	a.setACL(&acl{kind: "client", policies: map[string]string{"one": oneSpace, "all": read}})
	if is := confirmed(t, c); !is.Record.Complete || is.Record.Missing != "" || len(is.Record.Holders) != 0 {
		t.Errorf("with another token: %+v", is)
	}
	queries := a.awaitQuery(t, 0)
	a.set() // the query may have begun with the former token: its answer may lack something
	a.awaitQuery(t, queries)
	a.set()
	await(t, changed)
	expect("with another token", true)
	a.setACL(&acl{kind: "client"})
	a.set(alloc("a9", "web", "running", "[]"))
	await(t, changed)
	expect("with the former one, nothing is held since", false)
	stop()
	if text := log.String(); strings.Count(text, "allocations may be hidden") != 2 || strings.Count(text, "all allocations are shown") != 1 {
		t.Errorf("log:\n%s", text)
	}
}

// What a token may see decides whether a record is complete. If that can't be read, the record has what it has.
func TestCompleteByTheToken(t *testing.T) {
	for name, tc := range map[string]struct {
		acl      *acl
		complete bool
		reason   string
	}{
		"no ACLs":                     {nil, true, ""},
		"management":                  {&acl{kind: "management"}, true, ""},
		"every namespace":             {&acl{kind: "client", policies: map[string]string{"a": read, "b": "null"}}, true, ""},
		"a workload identity":         {&acl{policies: map[string]string{"a": read}}, true, ""},
		"a workload without a policy": {&acl{}, false, "every namespace"},
		"one namespace":               {&acl{kind: "client", policies: map[string]string{"a": oneSpace}}, false, "every namespace"},
		"not known":                   {&acl{broken: true}, false, "403 Forbidden"},
	} {
		a := newAgent()
		a.setACL(tc.acl)
		a.set(alloc("a1", "train", "running", gpus))
		server := httptest.NewServer(a)
		c, changed, _, stop := started(t, Options{Address: server.URL})
		await(t, changed)
		r, err := c.Read(t.Context(), nil)
		if err != nil || r.Complete != tc.complete || !strings.Contains(r.Missing, tc.reason) || (r.Missing == "") != tc.complete || len(r.Holders) != 2 {
			t.Errorf("%s: %v, %+v", name, err, r)
		}
		stop()
		server.Close()
	}
}

// The rules of all policies count together, the closest one for each namespace, and deny before all.
func TestReadsEveryNamespace(t *testing.T) {
	for _, tc := range []struct {
		want     bool
		policies []string
	}{
		{false, nil},
		{false, []string{`[]`, `null`}},
		{true, []string{read}},
		{true, []string{`null`, read, oneSpace}},
		{true, []string{`[{"Name":"*","Capabilities":["list-jobs"]}]`, `[{"Name":"*","Capabilities":["read-job"]}]`}},
		{false, []string{oneSpace}},
		{false, []string{`[{"Name":"b*","Capabilities":["read-job"]}]`}},
		{false, []string{read, `[{"Name":"secret","Capabilities":["list-jobs"]}]`}},
		{true, []string{read, `[{"Name":"secret","Capabilities":["list-jobs"]}]`, `[{"Name":"secret","Capabilities":["read-job"]}]`}},
		{false, []string{read, `[{"Name":"sec*","Capabilities":["deny"]}]`}},
		{false, []string{read, `[{"Name":"*","Capabilities":["deny"]}]`}},
	} {
		var all []policy
		for _, text := range tc.policies {
			var p policy
			check.NoError(t, json.Unmarshal([]byte(`{"RulesJSON":{"Namespaces":`+text+`}}`), &p))
			all = append(all, p)
		}
		if got := readsEveryNamespace(all); got != tc.want {
			t.Errorf("%v: %t", tc.policies, got)
		}
	}
}
