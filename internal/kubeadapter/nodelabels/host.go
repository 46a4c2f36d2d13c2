package nodelabels

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Host is what the labels show of the node apart from the driver: sysfs.
type Host struct {
	Machine string   // product name of the machine (DMI); "unknown" if there is none
	Classes []string // PCI class of each GPU: "0x030200"; "" = can't be read

	VGPUKnown              bool // the following is known
	VGPU                   bool // a GPU is a virtual one
	HostDriver, HostBranch string
}

// ReadHost reads what sysfs shows of GPUs. root is its mount point, "/sys". It never fails: what can't be read is unknown.
func ReadHost(root string, devices []gpu.Device) Host {
	root = cmp.Or(root, "/sys")
	h := Host{Machine: text(filepath.Join(root, "class/dmi/id/product_name")), VGPUKnown: true}
	if h.Machine == "" {
		h.Machine = "unknown"
	}
	for _, d := range devices {
		if d.At.GI != gpu.Whole {
			continue
		}
		folder := filepath.Join(root, "bus/pci/devices", string(d.PCI))
		h.Classes = append(h.Classes, text(filepath.Join(folder, "class")))
		h.addConfig(folder)
	}
	return h
}

// ReadVGPU reads what sysfs shows of virtual GPUs, for a node without a driver: all GPUs of NVIDIA count.
func ReadVGPU(root string) Host {
	root = cmp.Or(root, "/sys")
	var h Host
	folders, err := os.ReadDir(filepath.Join(root, "bus/pci/devices"))
	h.VGPUKnown = err == nil
	for _, f := range folders {
		folder := filepath.Join(root, "bus/pci/devices", f.Name())
		if text(filepath.Join(folder, "vendor")) == vendorNVIDIA && strings.HasPrefix(text(filepath.Join(folder, "class")), displayClass) {
			h.addConfig(folder)
		}
	}
	return h
}

// withVGPU returns h with NVML's virtualization mode where the configuration spaces can't be read. The driver on the host of virtual GPUs stays unknown.
func (h Host) withVGPU(s core.State) Host {
	if h.VGPUKnown {
		return h
	}
	h.VGPUKnown, h.VGPU = true, false
	for _, d := range s.Snapshot.Devices {
		if d.At.GI != gpu.Whole {
			continue
		}
		history, _ := s.Ledger.History(d.ID)
		h.VGPUKnown = h.VGPUKnown && history.Sample.VGPU != health.NotReported
		h.VGPU = h.VGPU || history.Sample.VGPU == health.Yes
	}
	return h
}

const (
	vendorNVIDIA = "0x10de"
	displayClass = "0x03" // PCI class of display controllers
)

// addConfig adds what the configuration space of a GPU shows.
func (h *Host) addConfig(folder string) {
	config, err := os.ReadFile(filepath.Join(folder, "config"))
	if err != nil || len(config) < configSize {
		h.VGPUKnown = false
		return
	}
	if record, ok := vgpuRecord(config); ok {
		h.VGPU = true
		h.HostDriver, h.HostBranch = hostDriver(record)
	}
}

func text(path string) string {
	content, _ := os.ReadFile(path) // unknown
	return strings.TrimSpace(string(content))
}

// mode returns what the GPUs are for, by their PCI class: "graphics", "compute", or "unknown" if they differ.
func (h Host) mode() string {
	mode := ""
	for _, class := range h.Classes {
		own := "unknown"
		switch {
		case strings.HasPrefix(class, "0x0300"): // VGA controller
			own = "graphics"
		case strings.HasPrefix(class, "0x0302"): // 3D controller
			own = "compute"
		}
		if mode != "" && own != mode {
			return "unknown"
		}
		mode = own
	}
	return cmp.Or(mode, "unknown")
}
