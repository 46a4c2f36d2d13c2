package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Device nodes of which a node has one each.
const (
	controlNodePath = "/dev/nvidiactl"
	uvmNodePath     = "/dev/nvidia-uvm" // unified memory, which CUDA requires; often created by the first CUDA program on the node
)

// IMEXChannelNode is the device node of IMEX channel 0, by which workloads of several nodes share memory over NVLink. Channel 0 is
// the only one that NVIDIA's k8s-device-plugin gives to containers.
const IMEXChannelNode = "/dev/nvidia-caps-imex-channels/channel0"

// gpuNode returns "/dev/nvidia0"; "" if the minor number is not known.
func (d Device) gpuNode() string {
	if d.Minor < 0 {
		return ""
	}
	return "/dev/nvidia" + strconv.Itoa(d.Minor)
}

// capabilityNode returns "/dev/nvidia-caps/nvidia-cap12"; "" if the number is not known. A kernel module may
// control access to instances by files under /proc alone.
func capabilityNode(number int) string {
	if number <= 0 {
		return ""
	}
	return "/dev/nvidia-caps/nvidia-cap" + strconv.Itoa(number)
}

// RequiredNodes returns the known device nodes without which no CUDA program can use the device.
func (d Device) RequiredNodes() []string {
	return append([]string{controlNodePath, uvmNodePath}, d.OwnNodes()...)
}

// OwnNodes returns those of RequiredNodes that not every device needs: the node of the GPU, and those of the capabilities of a
// MIG instance.
func (d Device) OwnNodes() []string {
	nodes := []string{d.gpuNode()}
	if d.Profile != "" {
		nodes = append(nodes, capabilityNode(d.GICap), capabilityNode(d.CICap))
	}
	return slices.DeleteFunc(nodes, func(path string) bool { return path == "" })
}

// CreateNodesCommand returns the command that creates the given device nodes of the device: "nvidia-modprobe -c0
// -u". The command also loads the kernel module of a node. Options are those of nvidia-modprobe(1): -u selects the
// nodes of unified memory instead of those of GPUs.
func (d Device) CreateNodesCommand(nodes []string) string {
	var create string
	var commands []string
	capabilities := fmt.Sprintf(" -f /proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", d.Minor, d.At.GI)
	for _, path := range nodes {
		switch path {
		case uvmNodePath:
			commands = append(commands, "nvidia-modprobe -c0 -u")
		case controlNodePath:
			create += " -c255" // minor number of /dev/nvidiactl
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
