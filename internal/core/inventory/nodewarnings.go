package inventory

import (
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// optionalNodes are given to a container if the node has them. CUDA works without them.
var optionalNodes = []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm-tools"}

// MissingNodes returns the required device nodes of a device that the node does not have. The device still takes
// work, but a container that is created without a node never gets it.
//
// It returns false where no warning is due:
//
//   - Containers get no device nodes from this agent (the default of k8s-gpu). NVIDIA's container runtime provides them then,
//     and creates those that are missing.
//   - The driver is not ready.
//   - No device node of NVIDIA's is visible, although the driver works: this process runs in a container in which the host's
//     /dev is not mounted under Roots.Dev, or the platform has no device nodes (WSL).
func (inv *Inventory) MissingNodes(d gpu.Device) (missing []string, known bool) {
	inv = inv.orEmpty()
	if !inv.injectsNodes || inv.driver.State != gpu.DriverReady || len(inv.nodes) == 0 {
		return nil, false
	}
	return slices.DeleteFunc(d.RequiredNodes(), func(path string) bool {
		_, present := slices.BinarySearch(inv.nodes, path)
		return present
	}), true
}

// WithNodeWarnings returns the inventory with missing device nodes in the health of its units. There is no warning
// about nodes in seen, which were there at some time since the latest complete snapshot: see State.WithNodes.
func (inv *Inventory) WithNodeWarnings(seen []string) *Inventory {
	var warning string
	next := *inv
	next.unitList = inv.withHealth(func(u *Unit, first bool) health.Health {
		if first {
			missing, _ := inv.MissingNodes(u.Device)
			missing = slices.DeleteFunc(missing, func(path string) bool { return slices.Contains(seen, path) })
			if warning = ""; len(missing) > 0 {
				warning = strings.Join(missing, ", ") + ": run " + u.Device.CreateNodesCommand(missing)
			}
		}
		h := u.Health
		h.MissingNodes = warning
		return h
	})
	return &next
}
