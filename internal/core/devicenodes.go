package core

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Device nodes of which each machine has one.
const (
	controlNodePath = "/dev/nvidiactl"
	uvmNodePath     = "/dev/nvidia-uvm" // unified memory, which CUDA needs; often created by the first CUDA program on the host
)

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

// RequiredNodes are the device nodes without which no CUDA program can use the device, as far as they are known.
func (d Device) RequiredNodes() []string {
	nodes := []string{controlNodePath, uvmNodePath, d.gpuNode()}
	if d.Profile != "" {
		nodes = append(nodes, capabilityNode(d.GICap), capabilityNode(d.CICap))
	}
	return slices.DeleteFunc(nodes, func(path string) bool { return path == "" })
}

// CreateNodesCommand is the command that creates device nodes of the device: "nvidia-modprobe -c0 -u". It loads the kernel module
// that a node belongs to, if need be. The options are those of nvidia-modprobe(1): -u is about the nodes of unified memory
// instead of those of GPUs.
func (d Device) CreateNodesCommand(nodes []string) string {
	var create string
	var commands []string
	capabilities := fmt.Sprintf(" -f /proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", d.Minor, d.At.GI)
	for _, path := range nodes {
		switch path {
		case uvmNodePath:
			commands = append(commands, "nvidia-modprobe -c0 -u")
		case controlNodePath:
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
