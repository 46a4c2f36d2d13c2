package doctor

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// pciGPU is a GPU on the PCI bus, whatever drives it.
type pciGPU struct {
	Address string // "0000:1b:00.0"
	Driver  string // kernel driver that is bound; "" = none, or not visible
	Off     bool   // its configuration space reads as ones: it does not answer on the bus
}

// kernelGPU is a GPU as NVIDIA's kernel module lists it (/proc/driver/nvidia/gpus/ADDRESS/information).
type kernelGPU struct {
	Minor    string // of its device node
	Excluded bool   // by the module option NVreg_ExcludedGpus
}

const vendorNVIDIA = "0x10de"

func readPCI(_ context.Context, o *Options) func(*Facts) {
	folder := o.sys("bus/pci/devices")
	entries, err := os.ReadDir(folder)
	var gpus []pciGPU
	for _, e := range entries {
		dir := filepath.Join(folder, e.Name())
		class := text(dir + "/class")
		if text(dir+"/vendor") != vendorNVIDIA || !strings.HasPrefix(class, "0x0300") && !strings.HasPrefix(class, "0x0302") {
			continue // audio, USB, NVSwitches
		}
		if exists(dir + "/physfn") {
			continue // a virtual function of a vGPU host
		}
		gpus = append(gpus, pciGPU{Address: e.Name(), Driver: linkBase(dir + "/driver"), Off: offBus(dir + "/config")})
	}
	known := map[string]kernelGPU{}
	folder = o.proc("driver/nvidia/gpus")
	listed, _ := os.ReadDir(folder) // missing without the module
	for _, e := range listed {
		known[e.Name()] = parseInformation(text(filepath.Join(folder, e.Name(), "information")))
	}
	return func(f *Facts) { f.PCI, f.GPUs, f.Known = err == nil, gpus, known }
}

// offBus reports whether the configuration space of a PCI device reads as ones.
func offBus(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	id := make([]byte, 4) // vendor and device
	_, err = f.Read(id)
	return err == nil && string(id) == "\xff\xff\xff\xff"
}

func parseInformation(text string) (g kernelGPU) {
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		switch value = strings.TrimSpace(value); strings.TrimSpace(key) {
		case "Device Minor":
			g.Minor = value
		case "GPU Excluded":
			g.Excluded = value == "Yes"
		}
	}
	return g
}

// decidePCI is the first link of the chain.
func decidePCI(c *chain) []Finding {
	f := c.Facts
	place := f.sys("bus/pci/devices")
	n := len(f.GPUs)
	switch {
	case f.Late["gpu"]:
		return nil
	case !f.PCI:
		return []Finding{{"gpu", Note, place, "the PCI bus is not visible from here", ""}}
	case n == 0 && len(f.Driver.Devices) > 0:
		return []Finding{{"gpu", Note, place, "no NVIDIA GPU on the PCI bus; the driver lists " + report.Noun(len(f.Driver.Devices), "device"), ""}}
	case n == 0:
		return c.broken(Finding{"gpu", Problem, place, "no NVIDIA GPU on the PCI bus",
			"if there should be one: check lspci -d 10de:, seat and power of the card, PCI passthrough of the virtual machine; otherwise nothing: the agent waits for one"})
	case !slices.ContainsFunc(f.GPUs, func(g pciGPU) bool { return g.Driver != "vfio-pci" }):
		return c.broken(Finding{"gpu", Problem, place, report.Noun(n, "GPU") + ", all bound to vfio-pci for virtual machines",
			"if containers should use one: remove its id from the vfio-pci.ids of the kernel command line or /etc/modprobe.d, and reboot"})
	}
	return []Finding{{"gpu", OK, place, report.Noun(n, "GPU") + " on the PCI bus", ""}}
}
