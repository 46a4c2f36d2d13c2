package explain

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// methodListed is how an orchestrator chooses that takes the first devices that fit, in the order in which they are listed.
const methodListed inventory.Method = "first listed"

// listed returns the choice of an orchestrator that takes what is listed first: n units with those required among them, one of each
// device, as a request never gets two shares of one device.
func (x explainer) listed(available, required []inventory.UnitID, n int) inventory.Preference {
	p := inventory.Preference{Units: slices.Clone(required), Method: methodListed}
	taken := map[gpu.DeviceID]bool{}
	for _, id := range required {
		device, _ := id.Split()
		taken[device] = true
	}
	for _, id := range available {
		device, _ := id.Split()
		switch {
		case taken[device]:
		case len(p.Units) < n:
			taken[device] = true
			p.Units = append(p.Units, id)
		default:
			taken[device] = true
			p.Others = append(p.Others, inventory.NotPreferred{Device: device, Why: "listed after those that are enough"})
		}
	}
	p.Pairs = x.inv.ExplainPreference(p.Units, p.Units, len(p.Units)).Pairs
	return p
}

// otherAPI returns why a unit can't be given through the API of the adapter; "" if it can.
func (x explainer) otherAPI(u inventory.Unit) string {
	if x.Adapter.API == "" || u.API == x.Adapter.API {
		return ""
	}
	return fmt.Sprintf("it is offered through %s", u.API)
}

// claimed reports whether claims, which hold shares without a number, hold the unit: the first claim holds the first share.
func claimed(holds int, u inventory.Unit) bool {
	return holds > 0 && (u.Sharing.Mode == inventory.Exclusive || u.Replica < holds)
}
