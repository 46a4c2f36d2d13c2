package core

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Device nodes of which each machine has one.
const (
	controlNode = "/dev/nvidiactl"
	uvmNode     = "/dev/nvidia-uvm" // unified memory, which CUDA needs; often created by the first CUDA program on the host
)

// optionalNodes are passed to a container if the host has them. CUDA works without them.
var optionalNodes = []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm-tools"}

// gpuNode is "/dev/nvidia0"; "" if the minor number is not known.
func (d Device) gpuNode() string {
	if d.Minor < 0 {
		return ""
	}
	return "/dev/nvidia" + strconv.Itoa(d.Minor)
}

// capabilityNode is "/dev/nvidia-caps/nvidia-cap12"; "" if the number is not known: a kernel module may control access to
// instances by files under /proc alone.
func capabilityNode(number int) string {
	if number <= 0 {
		return ""
	}
	return "/dev/nvidia-caps/nvidia-cap" + strconv.Itoa(number)
}

// requiredNodes are the device nodes without which no CUDA program can use the device, as far as they are known.
func (d Device) requiredNodes() []string {
	nodes := []string{controlNode, uvmNode, d.gpuNode()}
	if d.Profile != "" {
		nodes = append(nodes, capabilityNode(d.GICap), capabilityNode(d.CICap))
	}
	return slices.DeleteFunc(nodes, func(path string) bool { return path == "" })
}

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
	return slices.DeleteFunc(d.requiredNodes(), func(path string) bool {
		_, present := slices.BinarySearch(inv.nodes, path)
		return present
	}), true
}

// CreateNodes is the command that creates device nodes of the device: "nvidia-modprobe -c0 -u". It loads the kernel module
// that a node belongs to, if need be. The options are those of nvidia-modprobe(1): -u is about the nodes of unified memory
// instead of those of GPUs.
func (d Device) CreateNodes(nodes []string) string {
	var create string
	var commands []string
	capabilities := fmt.Sprintf(" -f /proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", d.Minor, d.At.GI)
	for _, path := range nodes {
		switch path {
		case uvmNode:
			commands = append(commands, "nvidia-modprobe -c0 -u")
		case controlNode:
			create += " -c255" // its minor number
		case d.gpuNode():
			create += fmt.Sprintf(" -c%d", d.Minor)
		case capabilityNode(d.GICap):
			create += capabilities + "/access"
		case capabilityNode(d.CICap):
			create += fmt.Sprintf("%s/ci%d/access", capabilities, d.At.CI)
		}
	}
	if create != "" {
		commands = append(commands, "nvidia-modprobe"+create)
	}
	return strings.Join(commands, " && ")
}

// WithNodes takes in which device nodes the host has now, in sorted order.
//
// Plans and MissingNodes change at once. The warning in a unit's health ends at once, but begins with a complete reading of
// the machine only: each change of a health line makes Nomad's servers write, and a node that comes and goes changes it
// not more often than the machine is read (once a minute).
func (s State) WithNodes(cfg Config, now time.Time, nodes []string) State {
	s.Snapshot.Nodes = nodes
	s.nodesSeen = slices.Compact(slices.Sorted(slices.Values(slices.Concat(s.nodesSeen, nodes))))
	return s.offer(cfg, now)
}

// warnOfNodes returns the inventory with what is missing in the health of its units. Nodes that were seen
// since the last complete reading are not warned of: see State.WithNodes.
func (inv *Inventory) warnOfNodes(seen []string) *Inventory {
	next := *inv
	next.units = slices.Clone(inv.units)
	var last string // warning of the unit before
	for i := range next.units {
		u := &next.units[i]
		if i == 0 || u.Device != next.units[i-1].Device {
			last = inv.nodeWarning(u.Device, seen)
		}
		u.Health.Nodes = last
	}
	return &next
}

func (inv *Inventory) nodeWarning(d Device, seen []string) string {
	missing, _ := inv.MissingNodes(d)
	missing = slices.DeleteFunc(missing, func(path string) bool { return slices.Contains(seen, path) })
	if len(missing) == 0 {
		return ""
	}
	return strings.Join(missing, ", ") + ": run " + d.CreateNodes(missing)
}
