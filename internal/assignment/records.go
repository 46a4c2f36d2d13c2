package assignment

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// inner returns which API of this agent has, or had, a GPU; false while that can't be known.
func (n *next) inner(id gpu.DeviceID) (inventory.API, bool) {
	if a := n.file.Inner[n.Agent][id]; a != "" {
		return a, true
	}
	if len(n.APIs) < 2 {
		return n.Default, true
	}
	for _, a := range n.APIs {
		if record := n.Records[a]; record != nil && len(record(id).By) > 0 {
			return a, true
		}
	}
	if n.Past(id) { // and did not record the API: it had one
		return inventory.DevicePlugin, true
	}
	if record := n.Records[inventory.DevicePlugin]; n.Default != inventory.DevicePlugin && record != nil {
		h := record(id)
		return n.Default, h.Known || h.First || n.Now-n.is.started >= initialWait
	}
	return n.Default, true
}
