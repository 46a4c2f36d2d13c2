package policy_test

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

const withLimits = `memoryLimits: {experimental: true, reserve: 2GiB}
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 3, memory: 20GiB, limit: required, name: notebooks}
    - {select: {model: "*"}, use: time-slicing, replicas: 4, limit: best-effort}
`

// One file has the same limits for both orchestrators. A rule with a limit does not select MIG instances.
func TestLimits(t *testing.T) {
	for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
		f, err := read(withLimits, to)
		check.NoError(t, err)
		if want := (inventory.LimitPolicy{On: true, Reserve: 2 << 30}); f.Policy.Limits != want {
			t.Errorf("%s: %+v", to, f.Policy.Limits)
		}
		want := []inventory.Sharing{
			{Mode: inventory.TimeSlicing, Replicas: 3, Memory: 20 << 30, Limit: inventory.LimitRequired},
			{Mode: inventory.TimeSlicing, Replicas: 4, Limit: inventory.LimitBestEffort},
		}
		for i, r := range f.Policy.Rules {
			if *r.Sharing != want[i] || !r.Select.Full {
				t.Errorf("%s: %+v of %+v", to, *r.Sharing, r.Select)
			}
		}
	}
	f, err := read("memoryLimits: {experimental: true, overcommit: true}\n", policy.Nomad)
	if want := (inventory.LimitPolicy{On: true, Reserve: 1 << 30, Overcommit: true}); err != nil || f.Policy.Limits != want {
		t.Errorf("%+v, %v", f.Policy.Limits, err)
	}
	for _, text := range []string{"memoryLimits: {}\n", "memoryLimits: {experimental: false}\n", "policy: {}\n"} {
		if f, err := read(text, policy.Nomad); err != nil || f.Policy.Limits != (inventory.LimitPolicy{}) || len(f.Summary()) > 0 {
			t.Errorf("%s%+v, %v, %v", text, f.Policy.Limits, f.Summary(), err)
		}
	}
}

// The summary of validate has what each share gets, and on which ways its limit can hold under both orchestrators.
func TestLimitsSummary(t *testing.T) {
	f, err := read(withLimits, policy.Nomad)
	check.NoError(t, err)
	want := `c.yaml:4: policy.rules[0].select: time-slicing by 3, 20480 MiB each, limit required, named notebooks
c.yaml:5: policy.rules[1].select: time-slicing by 4, an equal part of the memory each, limit best-effort
memory limits (experimental): 2048 MiB of each GPU are in no share; the shares have at most the rest together
memory limits on Nomad: by the task's control group (exec, java, raw_exec), or by NVIDIA's hook (docker and podman with CDI)
memory limits on Kubernetes: by the pod's control group (api: dra), or by NVIDIA's hook (device plugins with CDI)`
	if got := strings.Join(f.Summary(), "\n"); got != want {
		t.Errorf("%s", got)
	}
}
