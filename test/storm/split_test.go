package storm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The two agents, by the names of their files.
const (
	forNomad      = "nomad-gpu"
	forKubernetes = "k8s-gpu"
)

var agentNames = []string{forNomad, forKubernetes}

// removeLostAfter is how long a GPU may be out of its slot and keeps its binding.
const removeLostAfter = 6 * rescan

// split is a policy of both agents: the GPUs by index, each offered by one agent at most.
type split struct {
	Number int   // of the policy: names of pools begin with it, so that each inventory shows which policy it follows
	Nomad  []int // Nomad's, of which the last one is offered by no agent; the others are Kubernetes'
}

// kubernetes are the GPUs of the other agent.
func (s split) kubernetes() (others []int) {
	for n := range gpus {
		if !slices.Contains(s.Nomad, n) {
			others = append(others, n)
		}
	}
	return others
}

// reserved is the GPU that no agent offers.
func (s split) reserved() int { return s.Nomad[len(s.Nomad)-1] }

func (s split) pool(name string) string { return fmt.Sprintf("p%d-%s", s.Number, name) }

// policyOf is the number of the policy that names a pool; -1 if none does.
func policyOf(pool string) int {
	number, _, _ := strings.Cut(strings.TrimPrefix(pool, "p"), "-")
	n, err := strconv.Atoi(number)
	if err != nil {
		return -1
	}
	return n
}

// policy is that of one agent. Two of Nomad's GPUs are shared.
func (s split) policy(agent string) inventory.Policy {
	all := inventory.Naming{Pool: s.pool("gpu")}
	if agent == forKubernetes {
		others := s.kubernetes()
		return inventory.Policy{
			Include: []inventory.Selector{byIndex(others...)},
			Rules:   []inventory.Rule{{Select: byIndex(others[0]), Pool: s.pool("first")}},
			Names:   []inventory.Naming{all},
		}
	}
	return inventory.Policy{
		Rules: []inventory.Rule{
			{Select: byIndex(s.kubernetes()...), Reserve: "offered to Kubernetes"},
			{Select: byIndex(s.reserved()), Reserve: "reserved"},
		},
		Names: []inventory.Naming{all},
		Shares: []inventory.Share{{
			Pool: all.Pool, First: 2, Rename: s.pool("shared"),
			Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2},
		}},
	}
}

func byIndex(indices ...int) (s inventory.Selector) {
	s.At = "the test's policy"
	for _, n := range indices {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: n, Instance: -1})
	}
	return s
}

// owner is the agent that offers the GPU with a number; "" if none does.
func (s split) owner(number int) string {
	switch {
	case number == s.reserved():
		return ""
	case slices.Contains(s.Nomad, number):
		return forNomad
	}
	return forKubernetes
}
