package nvidia

import (
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// gpuReading is one reading of a GPU and its MIG instances, or the error of it.
type gpuReading struct {
	gpu, last   knownGPU // last: the reading before
	staticKnown bool     // gpu has all static properties
	limits      bool     // the driver has limits of device memory
	excluded    []gpu.Exclusion
	err         error
}

// readAll reads the enumerated GPUs, in their order.
func (s *Session) readAll(enumerated []identity) []gpuReading {
	all := make([]gpuReading, len(enumerated))
	var targets []target
	var queried []int // positions in all
	for i, found := range enumerated {
		all[i] = gpuReading{last: s.lastRead(found.id), err: found.err}
		if found.err != nil {
			continue
		}
		r := &all[i]
		r.gpu.handle, r.gpu.device = found.handle, gpu.Device{
			ID: found.id, At: gpu.WholeGPU(found.id), Index: found.index, PCI: found.pci,
			PCIeRoot: s.pcieRoot(found.pci), NUMANode: s.numaNode(found.pci),
		}
		r.staticKnown = s.worker(found.id).staticKnown && r.last.handle == found.handle
		targets, queried = append(targets, s.targetOf(r.gpu.device)), append(queried, i)
	}
	capabilities, limits := s.capabilities(), s.LimitsUnsupported() == ""
	readings, errs := queryAll(s, targets, func(i int, c *caller) gpuReading {
		r := all[queried[i]]
		r.limits = limits
		r.readGPU(c)
		if c.err == nil && r.gpu.device.MIG {
			m := migReader{parent: r.gpu.nvmlDevice, last: r.last.instances, capabilities: capabilities, cache: &targets[i].worker.profiles}
			r.gpu.instances, r.excluded = m.read(c)
		}
		return r
	})
	for i, place := range queried {
		if all[place].err = errs[i]; errs[i] == nil {
			all[place] = readings[i]
		}
	}
	for i, r := range all {
		if id := enumerated[i].id; id != "" {
			w := s.worker(id)
			w.staticKnown = r.err == nil && r.staticKnown && !w.record.lastFailed
		}
	}
	return all
}

// readGPU completes the device of a handle.
func (r *gpuReading) readGPU(c *caller) {
	h, d, last := r.gpu.handle, &r.gpu.device, r.last.device
	d.Model = supported(c, "nvmlDeviceGetName", textOf(h.GetName))
	readMIGMode(c, h, d)
	// One more than the minor number, so that zero is unknown.
	d.Minor = optional(c, "nvmlDeviceGetMinorNumber", 0, func() (int, nvml.Return) {
		minor, ret := h.GetMinorNumber()
		return minor + 1, ret
	}) - 1
	readSettings(c, h, d)
	if r.limits {
		readWholeMemory(c, h, d)
	}
	if r.staticKnown = r.staticKnown && d.MIG == last.MIG; r.staticKnown {
		copyStatic(d, last)
		return
	}
	r.staticKnown = readStatic(c, h, d)
}

// readMIGMode reads whether a GPU is partitioned: without that it can't be offered, as one that is must not be offered as a whole.
func readMIGMode(c *caller, h nvml.Device, d *gpu.Device) {
	mode := supported(c, "nvmlDeviceGetMigMode", func() (mode struct{ on, has bool }, ret nvml.Return) {
		current, _, ret := h.GetMigMode()
		mode.on, mode.has = current == nvml.DEVICE_MIG_ENABLE, ret == nvml.SUCCESS
		return mode, ret
	})
	d.MIG, d.CanMIG = mode.on, mode.has
}

// readSettings reads memory size, power limit and modes, which an administrator can change.
func readSettings(c *caller, h nvml.Device, d *gpu.Device) {
	d.Memory = optional(c, memoryInfo, 0, converted(h.GetMemoryInfo, memoryTotal))
	d.PowerLimit = optional(c, "nvmlDeviceGetPowerManagementLimit", 0, converted(h.GetPowerManagementLimit, widen))
	if d.PowerLimit == 0 {
		d.PowerLimit = optional(c, "nvmlDeviceGetEnforcedPowerLimit", 0, converted(h.GetEnforcedPowerLimit, widen))
	}
	d.DisplayState = optional(c, "nvmlDeviceGetDisplayMode", gpu.ToggleUnknown, converted(h.GetDisplayMode, toggle))
	d.PersistenceMode = optional(c, "nvmlDeviceGetPersistenceMode", gpu.ToggleUnknown, converted(h.GetPersistenceMode, toggle))
	d.ECC = optional(c, "nvmlDeviceGetEccMode", gpu.ToggleUnknown, func() (gpu.Toggle, nvml.Return) {
		current, _, ret := h.GetEccMode() // the pending mode takes effect at the next reset
		return toggle(current), ret
	})
}

// readWholeMemory reads the memory again by the newer call. In a control group with a limit NVML shows that limit as the total (nvml.h, nvmlSetMemoryLimits_v1_t,
// names nvmlDeviceGetMemoryInfo_v2 for it); where the two calls differ, the larger total is the GPU's. It is read where the driver has limits only.
func readWholeMemory(c *caller, h nvml.Device, d *gpu.Device) {
	shown := d.Memory
	total := optional(c, memoryInfoV2, shown, converted(h.GetMemoryInfo_v2, func(m nvml.Memory_v2) uint64 { return m.Total }))
	if d.Memory = max(shown, total); min(shown, total) != d.Memory {
		d.MemoryShown = min(shown, total)
	}
}

// readStatic reads the properties that do not change while a GPU stays in its slot and in its MIG mode. They are read
// when a GPU is new, has not answered in between, or has another handle. It reports whether all calls succeeded;
// otherwise the next reading makes them again.
func readStatic(c *caller, h nvml.Device, d *gpu.Device) (complete bool) {
	c.fellBack = false
	d.Serial = optional(c, "nvmlDeviceGetSerial", "", textOf(h.GetSerial))
	d.Architecture = optional(c, "nvmlDeviceGetArchitecture", "", converted(h.GetArchitecture, architecture))
	d.Brand = optional(c, "nvmlDeviceGetBrand", "", converted(h.GetBrand, brand))
	d.Compute = optional(c, "nvmlDeviceGetCudaComputeCapability", gpu.Compute{}, func() (gpu.Compute, nvml.Return) {
		major, minor, ret := h.GetCudaComputeCapability()
		return gpu.Compute{Major: major, Minor: minor}, ret
	})
	d.AddressingMode = optional(c, "nvmlDeviceGetAddressingMode", "", converted(h.GetAddressingMode, addressingMode))
	d.BAR1 = optional(c, "nvmlDeviceGetBAR1MemoryInfo", 0, converted(h.GetBAR1MemoryInfo, bar1Total))
	clock := func(kind nvml.ClockType) uint64 {
		c.subject = kind
		defer func() { c.subject = nil }()
		return optional(c, "nvmlDeviceGetMaxClockInfo", 0, converted(func() (uint32, nvml.Return) { return h.GetMaxClockInfo(kind) }, widen))
	}
	d.CoreClock = clock(nvml.CLOCK_GRAPHICS)
	d.MemoryClock = clock(nvml.CLOCK_MEM)
	// The maximum that GPU and slot have together.
	d.PCIeGen = optional(c, "nvmlDeviceGetMaxPcieLinkGeneration", 0, h.GetMaxPcieLinkGeneration)
	d.PCIeWidth = optional(c, "nvmlDeviceGetMaxPcieLinkWidth", 0, h.GetMaxPcieLinkWidth)
	d.Serial = strings.TrimSpace(d.Serial)
	return c.err == nil && !c.fellBack
}

// copyStatic sets what readStatic reads, from the reading before.
func copyStatic(d *gpu.Device, last gpu.Device) {
	d.Serial, d.Architecture, d.Brand, d.Compute, d.AddressingMode = last.Serial, last.Architecture, last.Brand, last.Compute, last.AddressingMode
	d.BAR1, d.CoreClock, d.MemoryClock, d.PCIeGen, d.PCIeWidth = last.BAR1, last.CoreClock, last.MemoryClock, last.PCIeGen, last.PCIeWidth
}
