package core

import (
	"slices"
	"strings"
)

// optionalNodes are passed to a container if the host has them. CUDA works without them.
var optionalNodes = []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm-tools"}

// MissingNodes are the required device nodes of a device that the host does not have. It is a warning: the device takes
// work, but a container gets no node that is not there when it is created, for its whole life.
//
// It reports false where nothing can be said, and no warning is due:
//
//   - Plans carry no device nodes (Config.DeviceNodes is off, the default of k8s-gpu). NVIDIA's container runtime or CDI
//     provides them then, and the runtime creates those that are missing.
//   - The driver is not in use.
//   - No node of NVIDIA's is visible. The driver works, so there are nodes somewhere, but not under Roots.Dev: this
//     process is in a container in which the host's /dev is not mounted, or the platform has none (WSL).
func (inv *Inventory) MissingNodes(d Device) (missing []string, known bool) {
	if inv == nil || !inv.deviceNodes || inv.driver.State != DriverReady || len(inv.nodes) == 0 {
		return nil, false
	}
	return slices.DeleteFunc(d.RequiredNodes(), func(path string) bool {
		_, present := slices.BinarySearch(inv.nodes, path)
		return present
	}), true
}

// WithNodeWarnings returns the inventory with what is missing in the health of its units. Nodes that were seen
// since the last complete reading are not warned of: see State.WithNodes.
func (inv *Inventory) WithNodeWarnings(seen []string) *Inventory {
	next := *inv
	next.units = slices.Clone(inv.units)
	var last string // warning of the unit before
	for i := range next.units {
		u := &next.units[i]
		if i == 0 || u.Device != next.units[i-1].Device {
			last = inv.nodeWarning(u.Device, seen)
		}
		u.Health.MissingNodes = last
	}
	return &next
}

func (inv *Inventory) nodeWarning(d Device, seen []string) string {
	missing, _ := inv.MissingNodes(d)
	missing = slices.DeleteFunc(missing, func(path string) bool { return slices.Contains(seen, path) })
	if len(missing) == 0 {
		return ""
	}
	return strings.Join(missing, ", ") + ": run " + d.CreateNodesCommand(missing)
}
