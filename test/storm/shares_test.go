package storm

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// terms are how whatever sits in a slot is offered, the GPU or its instances. Zero is as without a policy.
type terms struct {
	mode     inventory.SharingMode
	replicas int    // units of a device that is shared
	pool     string // one for each slot, so that no resource comes or goes with a layout
	kept     bool   // it is not offered
}

// terms of the storm with a policy, by slot. Those of slots 2, 4 and 6 are of MIG instances.
var shares = map[int]terms{
	1: {mode: inventory.TimeSlicing, replicas: 4, pool: "s1"},
	2: {pool: "c2"},
	3: {mode: inventory.MPS, replicas: 3, pool: "m3"},
	4: {mode: inventory.TimeSlicing, replicas: 2, pool: "s4"},
	6: {mode: inventory.MPS, replicas: 2, pool: "m6"},
	7: {kept: true},
}

// units are those of devices on these terms.
func (t terms) units(devices ...string) (units []string) {
	for _, id := range devices {
		switch {
		case t.kept:
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

// rule says the terms to the agent, by the slot's address: an index moves.
func (t terms) rule(slot gpu.PCIAddress) inventory.Rule {
	r := inventory.Rule{Select: inventory.Selector{PCI: []gpu.PCIAddress{slot}}, Pool: t.pool}
	switch {
	case t.kept:
		r.Reserve = "kept"
	case t.mode != inventory.Exclusive:
		r.Sharing = &inventory.Sharing{Mode: t.mode, Replicas: t.replicas, OnePerRequest: t.mode == inventory.MPS}
	}
	return r
}

// other are terms for the same pool: what is shared by MPS stays so.
func (t terms) other(r int) terms {
	switch {
	case t.mode == inventory.MPS:
		return terms{mode: inventory.MPS, replicas: 1 + r, pool: t.pool}
	case r == 1:
		return terms{pool: t.pool, kept: true}
	case r == 2:
		return terms{pool: t.pool}
	}
	return terms{mode: inventory.TimeSlicing, replicas: r, pool: t.pool}
}

func drawTerms(r *rand.Rand, f *fault) { f.count = 1 + r.IntN(4) }

// changePolicy has the agent offer what is in a slot on other terms. A GPU that has none keeps to that.
func changePolicy(w *storm, f *fault) error {
	t, ok := w.terms[f.slot]
	if !ok || t.pool == "" {
		return nil
	}
	w.terms = maps.Clone(w.terms)
	w.terms[f.slot] = t.other(f.count)
	w.truth.change(f.slot, blame)
	w.truth.rename(f.slot, w.terms[f.slot].units)
	if err := w.own(f.slot); err != nil { // before, as of units that go the truth must know first
		return err
	}
	return w.monitor.ApplyPolicy(w.ctx, core.Config{Config: inventory.Config{MIG: inventory.MIGMixed, Policy: w.policy()}})
}

// policy is what the agent is told of all terms.
func (w *storm) policy() (p inventory.Policy) {
	for n, t := range w.terms {
		p.Rules = append(p.Rules, t.rule(w.addresses[n]))
	}
	return p
}

// daemons is the host while the MPS control daemons of all pools answer.
func (w *storm) daemons() (h inventory.Host) {
	for _, t := range w.terms {
		if t.mode == inventory.MPS {
			h.MPS = append(h.MPS, t.pool)
		}
	}
	return h
}

// clients changes what is true of the slots that are shared by MPS.
func (w *storm) clients(how func(*slot)) {
	for n, t := range w.terms {
		if t.mode == inventory.MPS {
			w.truth.change(n, how)
		}
	}
}

// stopDaemons ends all MPS control daemons.
func stopDaemons(w *storm, _ *fault) error {
	w.clients(blame)
	w.monitor.SetHost(inventory.Host{})
	w.clients(func(s *slot) { s.begin(daemon) })
	return nil
}

func startDaemons(w *storm, _ *fault) error {
	w.clients(func(s *slot) { s.end(daemon) })
	w.monitor.SetHost(w.daemons())
	return nil
}

// rename enters the units of devices that are no more: an agent that can't know that yet offers them as the policy
// says now.
func (t *truth) rename(n int, units func(devices ...string) []string) {
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

// going reports whether a unit is no more, though it may be listed for a while; or was no more a moment ago, as what
// an orchestrator has may be of then.
func (t *truth) going(id string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	back, again := t.back[id]
	return !t.gone[id].IsZero() || again && now.Sub(back) <= t.bound
}

// whole ends the storm if an orchestrator has shares of a device of which one is well and another is not.
func (w *storm) whole(who string, view map[string]unit, now time.Time) {
	said := map[string]bool{}
	for id, u := range view {
		device, _, shared := strings.Cut(id, "::")
		if w.truth.going(id, now) {
			continue
		}
		if well, ok := said[device]; shared && ok && well != u.healthy {
			w.wrong("%s: shares of %s differ", who, device)
		}
		said[device] = u.healthy
	}
}
