package inventory

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// healthOf returns the health of a device, and records its conditions: the node may cause another one, which hides them.
func (inv *Inventory) healthOf(l health.Ledger, mode health.Mode, d *gpu.Device) health.Health {
	all := l.All(d.At)
	for i := range all {
		all[i] = applyMode(mode, all[i])
	}
	if len(all) == 0 {
		return l.Health(d.At)
	}
	if inv.conditions == nil {
		inv.conditions = map[gpu.DeviceID][]health.Health{}
	}
	inv.conditions[d.ID] = all
	return all[0]
}

// Conditions returns the health of a unit by each of its conditions alone, the worst first: Unit.Health, and the others that it
// hides. It is nil for a healthy unit. Of the conditions that the node causes, such as an overlap with another agent, it has the first.
func (inv *Inventory) Conditions(u Unit) []health.Health {
	if u.Health.State == health.Healthy {
		return nil
	}
	all := []health.Health{u.Health}
	for _, h := range inv.orEmpty().conditions[u.Device.ID] {
		if u.Health.Reason == health.ReasonResetting && h.Reason == health.ReasonMaintenance {
			continue // of a reset that takes long, not of an operator: see released
		}
		if !slices.ContainsFunc(all, h.SameCause) {
			all = append(all, h)
		}
	}
	return all
}
