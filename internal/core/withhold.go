package core

import (
	"slices"
	"strings"
)

// Split takes a unit's ID apart: its device, and whether the unit is one of several that share the device.
func (id UnitID) Split() (device DeviceID, shared bool) {
	text, _, shared := strings.Cut(string(id), "::")
	return DeviceID(text), shared
}

// Withhold returns inv with the units of why as unhealthy, NewHealth a workload holds their device under another name:
// why says which, in a few words. A fault of the device comes first, as a unit has one reason.
func (inv *Inventory) Withhold(why map[UnitID]string) *Inventory {
	if inv == nil || len(why) == 0 {
		return inv
	}
	next := *inv
	next.units = slices.Clone(inv.units)
	for i := range next.units {
		u := &next.units[i]
		if detail, ok := why[u.ID]; ok && u.Health.Schedulable() {
			u.Health = NewHealth(ReasonHeld, detail)
		}
	}
	return &next
}
