package imported

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/incumbent"
)

// originals are what the examples configure, as NVIDIA's documents describe it, written down by hand: the importer has no part in it. By file
// and, if it has several, name of the configuration. One that is missing here has defaults.
var originals = map[string]incumbent.Config{
	"readme-config1.yaml":                {MIG: "mixed"},
	"readme-time-slicing.yaml":           {Shares: map[string]int{"gpu": 10}},
	"readme-time-slicing-renamed.yaml":   {Shares: map[string]int{"gpu": 10}, Renamed: true},
	"readme-mps.yaml":                    {Shares: map[string]int{"gpu": 10}, MPS: true},
	"readme-mps-renamed.yaml":            {Shares: map[string]int{"gpu": 10}, MPS: true, Renamed: true},
	"readme-imex.yaml":                   {IMEX: true},
	"readme-imex-required.yaml":          {IMEX: true, NeedsIMEX: true},
	"values-config-files.yaml config1":   {MIG: "mixed"},
	"values-cpumanager.yaml":             {Nodes: true},
	"values-cpumanager-mixed.yaml":       {Nodes: true, MIG: "mixed"},
	"values-cdi.yaml":                    {Strategies: []string{"cdi-annotations"}},
	"static-flags.yaml":                  {Nodes: true},
	"values-map.yaml mig-single":         {MIG: "single"},
	"values-map.yaml mig-mixed":          {MIG: "mixed"},
	"static-cpumanager.yaml":             {Nodes: true},
	"static-service-account.yaml":        {Nodes: true},
	"operator-time-slicing-all.yaml any": {Shares: map[string]int{"gpu": 4}},
	"operator-time-slicing-fine.yaml a100-40gb": {
		MIG: "mixed", Shares: map[string]int{"gpu": 8, "mig-1g.5gb": 2, "mig-2g.10gb": 2, "mig-3g.20gb": 3, "mig-7g.40gb": 7},
	},
	"operator-time-slicing-fine.yaml tesla-t4": {Shares: map[string]int{"gpu": 4}},
	"operator-patch.yaml":                      {MIG: "single", Nodes: true},
	"operator-values-name.yaml":                {MIG: "single", Nodes: true},
	"operator-values.yaml ts":                  {MIG: "mixed", Nodes: true, Shares: map[string]int{"gpu": 2}, Renamed: true},
	"operator-values.yaml all-disabled":        {MIG: "mixed", Nodes: true},
}

// answer has a line for each part of the answer of NVIDIA's plugin; "error" if it refuses.
func answer(p *incumbent.Plugin, s gpu.Snapshot, resource string, units []string) (lines []string) {
	a, err := p.Allocate(resource, units...)
	if err != nil {
		return []string{"error"}
	}
	for name, value := range a.Env {
		lines = append(lines, "env "+name+"="+sorted(value))
	}
	for _, m := range a.Mounts {
		lines = append(lines, "mount "+m)
	}
	for _, name := range a.CDI {
		lines = append(lines, "CDI "+name)
	}
	nodes := a.Nodes
	if p.Nodes {
		nodes = slices.Concat(nodes, incumbent.CommonNodes)
	}
	for _, path := range nodes {
		if slices.Contains(s.Nodes, path) {
			lines = append(lines, "node "+path+" rw")
		}
	}
	slices.Sort(lines)
	return lines
}
