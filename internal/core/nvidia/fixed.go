package nvidia

import (
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// readFixed reads what is as it is while a GPU stays in its slot and in its MIG mode. Each of these calls would
// give the same again, so they are made when a GPU is met, when it was away, and when its handle is another one.
// False if the driver failed to say something: they are made again then.
func readFixed(a *asker, h nvml.Device, d *core.Device, was core.Device) (complete bool) {
	a.kept = false
	d.Serial = optional(a, "nvmlDeviceGetSerial", was.Serial, h.GetSerial)
	d.Architecture = optional(a, "nvmlDeviceGetArchitecture", was.Architecture, func() (string, nvml.Return) {
		of, ret := h.GetArchitecture()
		return architecture(of), ret
	})
	d.Brand = optional(a, "nvmlDeviceGetBrand", was.Brand, func() (string, nvml.Return) {
		of, ret := h.GetBrand()
		return brand(of), ret
	})
	d.Compute = optional(a, "nvmlDeviceGetCudaComputeCapability", was.Compute, func() (core.Compute, nvml.Return) {
		major, minor, ret := h.GetCudaComputeCapability()
		return core.Compute{Major: major, Minor: minor}, ret
	})
	d.BAR1 = optional(a, "nvmlDeviceGetBAR1MemoryInfo", was.BAR1, func() (uint64, nvml.Return) {
		m, ret := h.GetBAR1MemoryInfo()
		return m.Bar1Total, ret
	})
	clock := func(kind nvml.ClockType, last uint64) uint64 {
		return optional(a, "nvmlDeviceGetMaxClockInfo", last, wide(func() (uint32, nvml.Return) {
			return h.GetMaxClockInfo(kind)
		}))
	}
	d.CoreClock, d.MemoryClock = clock(nvml.CLOCK_GRAPHICS, was.CoreClock), clock(nvml.CLOCK_MEM, was.MemoryClock)
	// The fastest link that GPU and slot can have together.
	d.PCIeGen = optional(a, "nvmlDeviceGetMaxPcieLinkGeneration", was.PCIeGen, h.GetMaxPcieLinkGeneration)
	d.PCIeWidth = optional(a, "nvmlDeviceGetMaxPcieLinkWidth", was.PCIeWidth, h.GetMaxPcieLinkWidth)
	d.Serial = strings.TrimSpace(d.Serial)
	return a.err == nil && !a.kept
}

// keepFixed is readFixed without asking.
func keepFixed(d *core.Device, was core.Device) {
	d.Serial, d.Architecture, d.Brand, d.Compute = was.Serial, was.Architecture, was.Brand, was.Compute
	d.BAR1, d.CoreClock, d.MemoryClock, d.PCIeGen, d.PCIeWidth = was.BAR1, was.CoreClock, was.MemoryClock, was.PCIeGen, was.PCIeWidth
}
