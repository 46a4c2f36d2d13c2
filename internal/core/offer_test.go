package core_test

import (
	"fmt"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// pools counts units by pool and sharing.
func pools(inv *core.Inventory) map[string]int {
	count := map[string]int{}
	for u := range inv.Units() {
		count[u.Pool+" "+u.Sharing.String()]++
	}
	return count
}

// A node with two GPUs for one workload each, three shared by four, two with MPS by two, and one reserved.
func TestRulesOnEightGPUs(t *testing.T) {
	gpus := func(indices ...int) (s core.Selector) {
		for _, i := range indices {
			s.Indices = append(s.Indices, core.DeviceIndex{GPU: i, Instance: -1})
		}
		return s
	}
	cfg := core.DefaultConfig()
	cfg.Policy.Rules = []core.Rule{
		{Select: gpus(7), Reserve: "reserved by policy.yaml:3"},
		{Select: gpus(2, 3, 4), Sharing: &core.Sharing{Mode: core.TimeSlicing, Replicas: 4}},
		{Select: gpus(5, 6), Sharing: &core.Sharing{Mode: core.MPS, Replicas: 2, OnePerRequest: true}},
	}
	inv := core.Build(coretest.GPUs(8), core.Ledger{}, cfg)
	want := "map[gpu exclusive:2 gpu.mps mps by 2:4 gpu.shared time-slicing by 4:12]"
	if got := fmt.Sprint(pools(inv)); got != want {
		t.Errorf("%s; want %s", got, want)
	}
	if f := inv.PolicyWarnings(); len(f) != 0 {
		t.Errorf("findings: %q", f)
	}
	if ex := inv.Excluded(); len(ex) != 1 || ex[0].Index != 7 || ex[0].Reason != "reserved by policy.yaml:3" {
		t.Errorf("excluded: %+v", ex)
	}
}

func TestMIGPool(t *testing.T) {
	for profile, want := range map[string]string{
		"1g.5gb": "mig-1g.5gb", "1g.10gb+me": "mig-1g.10gb.me", "1g.24gb+gfx": "mig-1g.24gb.gfx",
		"1g.24gb+me.all": "mig-1g.24gb.me.all", "1g.24gb-me": "mig-1g.24gb-me",
	} {
		if got := core.MIGPool(profile); got != want {
			t.Errorf("%q: %s, want %s", profile, got, want)
		}
	}
}
