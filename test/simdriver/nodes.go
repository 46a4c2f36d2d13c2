package simdriver

import (
	"fmt"
	"strings"
)

// Nodes returns the device nodes of each GPU and MIG device, by its UUID: their paths ("/dev/nvidia0") and numbers
// ("195:0"). A MIG device has its GPU's and those of its two capabilities. The control nodes belong to no device.
func (m *Machine) Nodes() (map[string]map[string]string, error) {
	all := map[string]map[string]string{}
	err := m.read(func(c *conf) {
		for _, slot := range c.slots() {
			minor := minorOf(c, slot)
			gpu := fmt.Sprintf("/dev/nvidia%d", minor)
			all[c.gpuGet(slot, "uuid")] = map[string]string{gpu: fmt.Sprintf("%d:%d", majorGPU, minor)}
			for _, line := range c.all(gpuHead(slot), "instance") {
				gi, ci := instanceIDs(line)
				_, uuid, _ := strings.Cut(line, "uuid=")
				uuid, _, _ = strings.Cut(uuid, " ")
				nodes := map[string]string{gpu: all[c.gpuGet(slot, "uuid")][gpu]}
				for _, n := range []int{capMinor(minor, gi, -1), capMinor(minor, gi, ci)} {
					nodes[fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", n)] = fmt.Sprintf("%d:%d", majorCaps, n)
				}
				all[uuid] = nodes
			}
		}
	})
	return all, err
}
