package status

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// Every device has a series from the start, so that an alert has one before the first node is missing; agents that pass no
// nodes, and machines without any that is visible, have none.
func TestMissingDeviceNodesInMetrics(t *testing.T) {
	cfg := replicated(4, 0)
	lacking := coretest.GPUs(2)
	lacking.Nodes = slices.DeleteFunc(lacking.Nodes, func(n string) bool { return n == "/dev/nvidia-uvm" || n == "/dev/nvidia1" })
	series := func(lines []string) (n int) {
		for _, l := range lines {
			if strings.HasPrefix(l, "tandem_device_nodes_missing") {
				n++
			}
		}
		return n
	}
	if n := series(scraped(t, cfg, read(cfg, lacking))); n != 0 {
		t.Errorf("%d series though no nodes are passed", n)
	}
	cfg.DeviceNodes = true
	lines := scraped(t, cfg, read(cfg, lacking))
	has(t, lines,
		`tandem_device_nodes_missing{device="`+string(coretest.GPU(0))+`"} 1`,
		`tandem_device_nodes_missing{device="`+string(coretest.GPU(1))+`"} 2`,
		`tandem_devices{health="healthy",resource="nvidia.com/gpu.shared"} 4`,
	)
	if n := series(lines); n != 2 {
		t.Errorf("%d series for two devices", n)
	}
	has(t, scraped(t, cfg, read(cfg, coretest.GPUs(1))), `tandem_device_nodes_missing{device="`+string(coretest.GPU(0))+`"} 0`)
	lacking.Nodes = nil
	if n := series(scraped(t, cfg, read(cfg, lacking))); n != 0 {
		t.Errorf("%d series though no node is visible", n)
	}
}
