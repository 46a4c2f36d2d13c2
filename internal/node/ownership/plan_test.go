package ownership_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// A row shows what keeps the GPU: what the agents wait for that have it or may still have work on it, first that of the owner; what another
// agent waits for only if there is nothing else.
func TestRowsShowTheWaitsOfTheSide(t *testing.T) {
	const k, n = ownership.KubernetesAgent, ownership.NomadAgent
	has := func(waits string) ownership.GPUFacts {
		return ownership.GPUFacts{GPU: one, Local: true, Offerable: true, Pending: "to x", Waits: waits}
	}
	comes := func(waits string) ownership.GPUFacts {
		return ownership.GPUFacts{GPU: one, Offerable: true, Waits: waits}
	}
	for name, tc := range map[string]struct {
		owner inventory.API
		facts map[string]ownership.GPUFacts
		want  string
	}{
		"the owner waits":            {inventory.DevicePlugin, map[string]ownership.GPUFacts{k: has("the end of pod a"), n: comes("k8s-gpu to give it up")}, "the end of pod a"},
		"the owner is the later one": {inventory.Nomad, map[string]ownership.GPUFacts{k: comes("nomad-gpu to give it up"), n: has("the end of job a")}, "the end of job a"},
		"both have work on it":       {inventory.Nomad, map[string]ownership.GPUFacts{k: has("the end of pod a"), n: has("the end of job a")}, "the end of job a; the end of pod a"},
		"both, the other order":      {inventory.DRA, map[string]ownership.GPUFacts{k: has("nomad-gpu to give it up"), n: has("the end of job a")}, "nomad-gpu to give it up; the end of job a"},
		"the same twice":             {"", map[string]ownership.GPUFacts{k: has("the agents"), n: has("the agents")}, "the agents"},
		"the owner is away":          {inventory.Nomad, map[string]ownership.GPUFacts{k: comes("nomad-gpu to give it up")}, "nomad-gpu to give it up"},
		"only for time":              {inventory.Nomad, map[string]ownership.GPUFacts{k: comes("nomad-gpu to give it up"), n: has("")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var all []ownership.Facts
			for _, agent := range []string{k, n} {
				if g, ok := tc.facts[agent]; ok {
					all = append(all, ownership.Facts{Agent: agent, GPUs: []ownership.GPUFacts{g}})
				}
			}
			f := ownership.File{GPUs: map[gpu.DeviceID]ownership.Entry{one: {Target: inventory.Nomad, Owner: tc.owner}}}
			for range 2 {
				if rows := ownership.Rows(f, all); len(rows) != 1 || rows[0].Waits != tc.want {
					t.Errorf("%+v, want %q", rows, tc.want)
				}
				slices.Reverse(all)
			}
		})
	}
}

// What an operator should know before a move: an API that its agent does not serve so far, and GPUs that can't leave an API.
func TestWarnings(t *testing.T) {
	const record = "the allocations: set nomad_address"
	all := []ownership.Facts{
		{Agent: ownership.KubernetesAgent, APIs: []inventory.API{inventory.DevicePlugin}},
		{Agent: ownership.NomadAgent, APIs: []inventory.API{inventory.Nomad}, Unread: map[inventory.API]string{inventory.Nomad: record}},
	}
	for name, tc := range map[string]struct {
		from string
		to   inventory.API
		want []string
	}{
		"not served, own GPU":     {"device-plugin", inventory.DRA, []string{"k8s-gpu does not serve dra", "token", "stay where they are"}},
		"not served, from Nomad":  {"nomad", inventory.DRA, []string{"k8s-gpu does not serve dra", "take no work", "GPUs don't leave nomad without " + record}},
		"to Nomad for ever":       {"device-plugin", inventory.Nomad, []string{"have come to nomad don't leave it without " + record}},
		"from both":               {"device-plugin,nomad", inventory.DevicePlugin, []string{"GPUs don't leave nomad"}},
		"where it is":             {"device-plugin", inventory.DevicePlugin, nil},
		"no target, as with plan": {"nomad", "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			lines := ownership.Warnings([]ownership.Row{{GPU: one, API: tc.from}}, tc.to, all)
			got := strings.Join(lines, "\n")
			if (len(tc.want) == 0) != (got == "") {
				t.Errorf("%q", got)
			}
			for _, part := range tc.want {
				if !strings.Contains(got, part) {
					t.Errorf("%q lacks %q", got, part)
				}
			}
		})
	}
}
