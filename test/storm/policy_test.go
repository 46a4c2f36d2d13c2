package storm

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// slotPolicy is how the device in a slot, the GPU or its instances, is offered. Zero is as without a policy.
type slotPolicy struct {
	mode     inventory.SharingMode
	replicas int    // units of a shared device
	pool     string // one for each slot, so that no resource appears or disappears with a MIG layout
	reserved bool   // it is not offered
}

// slotPolicies are those of TestStormOnMIG. In slots 2, 4 and 6 are MIG instances.
var slotPolicies = map[int]slotPolicy{
	1: {mode: inventory.TimeSlicing, replicas: 4, pool: "s1"},
	2: {pool: "c2"},
	3: {mode: inventory.MPS, replicas: 3, pool: "m3"},
	4: {mode: inventory.TimeSlicing, replicas: 2, pool: "s4"},
	6: {mode: inventory.MPS, replicas: 2, pool: "m6"},
	7: {reserved: true},
}

// units are those of devices with this policy.
func (t slotPolicy) units(devices ...string) (units []string) {
	for _, id := range devices {
		switch {
		case t.reserved:
		case t.mode == inventory.Exclusive:
			units = append(units, id)
		default:
			for n := range t.replicas {
				units = append(units, fmt.Sprintf("%s::%d", id, n))
			}
		}
	}
	return units
}

// rule selects the slot by its address, as an index changes.
func (t slotPolicy) rule(slot gpu.PCIAddress) inventory.Rule {
	r := inventory.Rule{Select: inventory.Selector{PCI: []gpu.PCIAddress{slot}}, Pool: t.pool}
	switch {
	case t.reserved:
		r.NotOffered = "reserved"
	case t.mode != inventory.Exclusive:
		r.Sharing = &inventory.Sharing{Mode: t.mode, Replicas: t.replicas, OnePerRequest: t.mode == inventory.MPS}
	}
	return r
}

// other is another policy for the same pool: what is shared by MPS stays so.
func (t slotPolicy) other(n int) slotPolicy {
	switch {
	case t.mode == inventory.MPS:
		return slotPolicy{mode: inventory.MPS, replicas: 1 + n, pool: t.pool}
	case n <= 2:
		return slotPolicy{pool: t.pool, reserved: n == 1}
	}
	return slotPolicy{mode: inventory.TimeSlicing, replicas: n, pool: t.pool}
}

// changePolicy changes the policy of a slot. A slot without a pool keeps its own.
func (w *oneAgent) changePolicy(f *fault) error {
	p := w.policies[f.slot]
	if p.pool == "" {
		return nil
	}
	w.policies = maps.Clone(w.policies)
	w.policies[f.slot] = p.other(f.count)
	w.expected.change(f.slot, disturb)
	w.expected.changePolicy(f.slot, w.policies[f.slot].units)
	if err := w.readDevices(f.slot); err != nil { // before, as units disappear
		return err
	}
	return w.monitor.ApplyPolicy(w.ctx, core.Config{Config: inventory.Config{MIG: inventory.MIGMixed, Policy: w.policy()}})
}

func (w *oneAgent) policy() (p inventory.Policy) {
	for n, t := range w.policies {
		p.Rules = append(p.Rules, t.rule(w.addresses[n]))
	}
	return p
}

// daemons makes the MPS control daemons of all pools answer.
func (w *oneAgent) daemons(h *inventory.Host) {
	h.MPS = nil
	for _, t := range w.policies {
		if t.mode == inventory.MPS {
			h.MPS = append(h.MPS, t.pool)
		}
	}
}

// changeMPS changes the state of the slots that are shared by MPS.
func (w *oneAgent) changeMPS(how func(*slot)) {
	for n, t := range w.policies {
		if t.mode == inventory.MPS {
			w.expected.change(n, how)
		}
	}
}

func (w *oneAgent) stopDaemons(*fault) error {
	w.changeMPS(disturb)
	w.monitor.UpdateHost(func(h *inventory.Host) { h.MPS = nil })
	w.changeMPS(func(s *slot) { s.set(noDaemon) })
	return nil
}

func (w *oneAgent) startDaemons(*fault) error {
	w.changeMPS(func(s *slot) { s.clear(noDaemon) })
	w.monitor.UpdateHost(w.daemons)
	return nil
}

// changePolicy records another policy of a slot also for devices that no longer exist: an agent that can't have noticed yet offers
// them by the new policy.
func (t *expectedState) changePolicy(n int, units func(devices ...string) []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for device, f := range t.former {
		if f.slot != n {
			continue
		}
		for _, unit := range units(device) {
			if _, known := t.owner[unit]; !known {
				t.owner[unit], t.gone[unit] = n, f.left
			}
		}
	}
}

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
			{Select: byIndex(s.kubernetes()...), NotOffered: "offered to Kubernetes"},
			{Select: byIndex(s.reserved()), NotOffered: "reserved"},
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
