package assignment_test

import (
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A row shows what keeps the GPU: what the agents wait for that have it or may still have work on it, first that of the side; what another
// agent waits for only if there is nothing else.
func TestRowsShowTheWaitsOfTheSide(t *testing.T) {
	const k, n = assignment.KubernetesAgent, assignment.NomadAgent
	has := func(waits string) assignment.GPUFacts {
		return assignment.GPUFacts{GPU: one, Here: true, Can: true, Moving: "to x", Waits: waits}
	}
	comes := func(waits string) assignment.GPUFacts { return assignment.GPUFacts{GPU: one, Can: true, Waits: waits} }
	for name, tc := range map[string]struct {
		side  inventory.API
		facts map[string]assignment.GPUFacts
		want  string
	}{
		"the side waits":            {inventory.DevicePlugin, map[string]assignment.GPUFacts{k: has("the end of pod a"), n: comes("k8s-gpu to give it up")}, "the end of pod a"},
		"the side is the later one": {inventory.Nomad, map[string]assignment.GPUFacts{k: comes("nomad-gpu to give it up"), n: has("the end of job a")}, "the end of job a"},
		"both have work on it":      {inventory.Nomad, map[string]assignment.GPUFacts{k: has("the end of pod a"), n: has("the end of job a")}, "the end of job a; the end of pod a"},
		"both, the other order":     {inventory.DRA, map[string]assignment.GPUFacts{k: has("nomad-gpu to give it up"), n: has("the end of job a")}, "nomad-gpu to give it up; the end of job a"},
		"the same twice":            {"", map[string]assignment.GPUFacts{k: has("the agents"), n: has("the agents")}, "the agents"},
		"the side is away":          {inventory.Nomad, map[string]assignment.GPUFacts{k: comes("nomad-gpu to give it up")}, "nomad-gpu to give it up"},
		"only for time":             {inventory.Nomad, map[string]assignment.GPUFacts{k: comes("nomad-gpu to give it up"), n: has("")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var all []assignment.Facts
			for _, agent := range []string{k, n} {
				if g, ok := tc.facts[agent]; ok {
					all = append(all, assignment.Facts{Agent: agent, GPUs: []assignment.GPUFacts{g}})
				}
			}
			f := assignment.File{GPUs: map[gpu.DeviceID]assignment.Entry{one: {Target: inventory.Nomad, Side: tc.side}}}
			for range 2 {
				if rows := assignment.Rows(f, all); len(rows) != 1 || rows[0].Waits != tc.want {
					t.Errorf("%+v, want %q", rows, tc.want)
				}
				slices.Reverse(all)
			}
		})
	}
}
