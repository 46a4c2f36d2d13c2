package storm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The two agents, by the names of their files.
const (
	forNomad      = "nomad-gpu"
	forKubernetes = "k8s-gpu"
)

// split is a policy of both agents: the GPUs of a machine of eight, by index, each offered by one of them.
type split struct {
	Number int   // counts the policies: names of pools begin with it, so that each inventory says which policy it follows
	Nomad  []int // these are Nomad's, the last of them is offered to nobody; the others are Kubernetes'
}

const gpus = 8

// kubernetes are the other agent's.
func (s split) kubernetes() (others []int) {
	for n := range gpus {
		if !slices.Contains(s.Nomad, n) {
			others = append(others, n)
		}
	}
	return others
}

func (s split) pool(name string) string { return fmt.Sprintf("p%d-%s", s.Number, name) }

// numberOf is that of the policy which names a pool.
func numberOf(pool string) int {
	number, _, _ := strings.Cut(strings.TrimPrefix(pool, "p"), "-")
	n, err := strconv.Atoi(number)
	if err != nil {
		return -1
	}
	return n
}

// shareFirst is how many of Nomad's GPUs are shared.
const shareFirst = 2

// policy is what an agent is told.
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
	kept := s.Nomad[len(s.Nomad)-1]
	return inventory.Policy{
		Rules: []inventory.Rule{
			{Select: byIndex(s.kubernetes()...), Reserve: "offered to Kubernetes"},
			{Select: byIndex(kept), Reserve: "kept"},
		},
		Names: []inventory.Naming{all},
		Shares: []inventory.Share{{
			Pool: all.Pool, First: shareFirst, Rename: s.pool("shared"),
			Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2},
		}},
	}
}

func byIndex(indices ...int) (s inventory.Selector) {
	s.At = "the storm's policy"
	for _, n := range indices {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: n, Instance: -1})
	}
	return s
}

// owner is the agent that offers the GPU of a number; "" if none does.
func (s split) owner(number int) string {
	switch {
	case number == s.Nomad[len(s.Nomad)-1]:
		return ""
	case slices.Contains(s.Nomad, number):
		return forNomad
	}
	return forKubernetes
}

// forget is how long a GPU may be unplugged and keeps what it is bound to.
const forget = 6 * rescan

// pairConfig is an agent's configuration.
func pairConfig(o orders) core.Config {
	cfg := core.DefaultConfig()
	cfg.Probe, cfg.Rescan = probe, rescan/5
	cfg.Roots = core.Roots{Driver: o.Root, Dev: o.Root, Sys: o.Root + "/sys", Proc: o.Root + "/proc"}
	p := &cfg.Health
	p.CallDeadline, p.SettleTime, p.RecoveryDwell, p.MaxRecoveryDwell, p.QuietTime, p.RemoveLostAfter = deadline, settle, dwell, dwell, rescan, forget
	p.MaxRecoveries = 1 << 20
	cfg.Policy = o.Split.policy(o.Agent)
	return cfg
}
