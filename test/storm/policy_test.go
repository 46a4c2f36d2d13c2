package storm

import (
	"fmt"
	"maps"

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
		r.Reserve = "reserved"
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

// daemons is the host while the MPS control daemons of all pools answer.
func (w *oneAgent) daemons() (h inventory.Host) {
	for _, t := range w.policies {
		if t.mode == inventory.MPS {
			h.MPS = append(h.MPS, t.pool)
		}
	}
	return h
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
	w.monitor.SetHost(inventory.Host{})
	w.changeMPS(func(s *slot) { s.set(noDaemon) })
	return nil
}

func (w *oneAgent) startDaemons(*fault) error {
	w.changeMPS(func(s *slot) { s.clear(noDaemon) })
	w.monitor.SetHost(w.daemons())
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
