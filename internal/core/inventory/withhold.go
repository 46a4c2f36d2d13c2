package inventory

import (
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Split returns the device of a unit's ID, and whether the ID is that of a replica of a shared device.
func (id UnitID) Split() (device gpu.DeviceID, shared bool) {
	text, _, shared := strings.Cut(string(id), "::")
	return gpu.DeviceID(text), shared
}

// Withhold returns inv with the given units unhealthy (ReasonHeld), because a workload holds their device under
// another name. The argument maps each unit to a description of the holder. A unit that is unhealthy already keeps
// its reason.
func (inv *Inventory) Withhold(why map[UnitID]string) *Inventory {
	if inv == nil || len(why) == 0 {
		return inv
	}
	return inv.withUnits(func(u *Unit, _ bool) {
		if detail, ok := why[u.ID]; ok && u.Health.Schedulable() {
			u.Health = health.New(health.ReasonHeld, detail)
		}
	})
}
