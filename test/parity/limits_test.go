package parity

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// One file gives shares the same limits under both orchestrators: a container of the device plugin and a task of podman get the same CDI devices for NVIDIA's hook, and the
// same requests are refused for the same reason. On a GPU that can have no limit both withhold the shares that require one.
func TestLimits(t *testing.T) {
	machine := read(t, "h100x8", nil)
	limits := &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{}, Backend: "misc"}
	defined := &inventory.CDI{Kind: "k/gpu", LimitKind: "k/memory-limit", Usable: true}
	for _, d := range machine.Devices {
		limits.Withheld[d.ID] = inventory.LimitMissing{}
		defined.Defined = append(defined.Defined, d.ID)
	}
	slices.Sort(defined.Defined)
	for _, index := range []int{2, 6} {
		limits.Withheld[machine.Devices[index].ID] = inventory.LimitMissing{Reason: health.ReasonNoLimit, Detail: "no driver 615"}
	}

	offered := map[policy.Orchestrator]*inventory.Allocatable{}
	for _, to := range []policy.Orchestrator{policy.Kubernetes, policy.Nomad} {
		inv, _ := build(t, machine, "testdata/limits.yaml", to, inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired})
		c := *defined
		c.Limits = inv.WithoutHost().HookLimits()
		offered[to] = inv.WithHost(inventory.Host{Limits: limits, CDI: &c}, inventory.OverlapWarn)
	}
	v := view(t, offered[policy.Kubernetes], offered[policy.Nomad])
	v.meanTheSame(t)
	if full := v.refused["nomad"]; len(full) != 1 || full[0].Index != 5 {
		t.Errorf("not offered: %v, want GPU 5, on which the limits do not fit", full)
	}

	for _, c := range []struct{ request, limit, refusal string }{ // GPU, or GPU.share
		{"0.0", "18432", ""},
		{"0.0 0.3", "36864", ""},
		{"0.1 1.2", "18432", ""},
		{"0.0 0.1 1.0", "", "shares of gpu.shared with different limits"},
		{"2.0", "", "no driver 615"},
		{"3.3", "20133", ""},
		{"4.1", "30720", ""},
		{"6.0", "", ""}, // best effort
		{"7", "", ""},
	} {
		var ids, names []string
		for _, part := range strings.Fields(c.request) {
			var index int
			_, err := fmt.Sscan(part, &index)
			must(t, err)
			id := string(machine.Devices[index].ID)
			if name := "k/gpu=" + id; !slices.Contains(names, name) {
				names = append(names, name)
			}
			if _, share, ok := strings.Cut(part, "."); ok {
				id += "::" + share
			}
			ids = append(ids, id)
		}
		if c.limit != "" {
			names = append(names, "k/memory-limit="+c.limit)
		}
		kubelet, errKubelet := v.orchestrators.Allocate(ids...)
		nomad, errNomad := v.orchestrators.Nomad.Reserve(ids...)
		for side, got := range map[string][]string{"kubelet": kubelet.CDI, "Nomad": nomad.CDI} {
			err := map[string]error{"kubelet": errKubelet, "Nomad": errNomad}[side]
			switch {
			case c.refusal == "" && (err != nil || !slices.Equal(got, names)):
				t.Errorf("%s, %s: %q, %v; want %q", c.request, side, got, err, names)
			case c.refusal != "" && (err == nil || !strings.Contains(err.Error(), c.refusal)):
				t.Errorf("%s, %s: %q, %v; want the error %q", c.request, side, got, err, c.refusal)
			}
		}
	}
}
