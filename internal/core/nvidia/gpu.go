package nvidia

import (
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// reading is what is read of a GPU: it, its instances if MIG mode is on, those left out, and what was known of
// it before; or why it was not read.
type reading struct {
	gpu, last gpu
	excluded  []core.Exclusion
	err       error
}

// readAll reads what those are that were found, in their order.
func (s *Session) readAll(there []identity) []reading {
	all := make([]reading, len(there))
	var targets []target
	var asked []int // places in the list
	for i, found := range there {
		all[i] = reading{last: s.remembered(found.id), err: found.err}
		if found.err != nil {
			continue
		}
		all[i].gpu.device = core.Device{
			ID: found.id, At: core.WholeGPU(found.id), Index: found.index, PCI: found.pci, NUMANode: s.numaNode(found.pci),
		}
		targets, asked = append(targets, s.at(all[i].gpu.device)), append(asked, i)
	}
	caps := s.capabilities()
	readings, errs := visitAll(s, targets, func(i int, a *asker) reading {
		r := all[asked[i]]
		r.gpu.held = readGPU(a, there[asked[i]].handle, r.gpu.device, r.last.device)
		if a.err == nil && r.gpu.device.MIG {
			m := migReader{parent: r.gpu.held, last: r.last.instances, caps: caps, profiles: targets[i].lane.profiles}
			r.gpu.instances, r.excluded = m.read(a)
		}
		return r
	})
	for i, place := range asked {
		if all[place].err = errs[i]; errs[i] == nil {
			all[place] = readings[i]
		}
	}
	return all
}

// readGPU completes the device of a handle.
func readGPU(a *asker, h nvml.Device, d, was core.Device) held {
	if was.ID == "" {
		was = core.Device{Minor: -1, NUMANode: -1}
	}
	d.Model = strings.TrimSpace(supported(a, "nvmlDeviceGetName", h.GetName))
	// Whether MIG is on must be known: a GPU that is cut up is not offered whole.
	d.MIG = supported(a, "nvmlDeviceGetMigMode", func() (bool, nvml.Return) {
		current, _, ret := h.GetMigMode()
		return current == nvml.DEVICE_MIG_ENABLE, ret
	})
	// One more than the minor, so that zero is unknown here as everywhere else.
	d.Minor = optional(a, "nvmlDeviceGetMinorNumber", was.Minor+1, func() (int, nvml.Return) {
		minor, ret := h.GetMinorNumber()
		return minor + 1, ret
	}) - 1
	readBoard(a, h, &d, was)
	readPCIe(a, h, &d, was)
	return held{handle: h, device: d}
}

// readBoard reads memory, power, clocks and modes.
func readBoard(a *asker, h nvml.Device, d *core.Device, was core.Device) {
	d.Memory = optional(a, "nvmlDeviceGetMemoryInfo", was.Memory, func() (uint64, nvml.Return) {
		m, ret := h.GetMemoryInfo()
		return m.Total, ret
	})
	d.BAR1 = optional(a, "nvmlDeviceGetBAR1MemoryInfo", was.BAR1, func() (uint64, nvml.Return) {
		m, ret := h.GetBAR1MemoryInfo()
		return m.Bar1Total, ret
	})
	d.PowerLimit = optional(a, "nvmlDeviceGetPowerManagementLimit", was.PowerLimit, wide(h.GetPowerManagementLimit))
	if d.PowerLimit == 0 {
		d.PowerLimit = optional(a, "nvmlDeviceGetEnforcedPowerLimit", was.PowerLimit, wide(h.GetEnforcedPowerLimit))
	}
	clock := func(kind nvml.ClockType, last uint64) uint64 {
		return optional(a, "nvmlDeviceGetMaxClockInfo", last, wide(func() (uint32, nvml.Return) {
			return h.GetMaxClockInfo(kind)
		}))
	}
	d.CoreClock, d.MemoryClock = clock(nvml.CLOCK_GRAPHICS, was.CoreClock), clock(nvml.CLOCK_MEM, was.MemoryClock)
	d.Compute = optional(a, "nvmlDeviceGetCudaComputeCapability", was.Compute, func() (core.Compute, nvml.Return) {
		major, minor, ret := h.GetCudaComputeCapability()
		return core.Compute{Major: major, Minor: minor}, ret
	})
	mode := func(f func() (nvml.EnableState, nvml.Return)) func() (core.Toggle, nvml.Return) {
		return func() (core.Toggle, nvml.Return) {
			state, ret := f()
			return toggle(state), ret
		}
	}
	d.DisplayState = optional(a, "nvmlDeviceGetDisplayMode", was.DisplayState, mode(h.GetDisplayMode))
	d.PersistenceMode = optional(a, "nvmlDeviceGetPersistenceMode", was.PersistenceMode, mode(h.GetPersistenceMode))
}

// readPCIe reads the fastest link that GPU and slot can have together.
func readPCIe(a *asker, h nvml.Device, d *core.Device, was core.Device) {
	d.PCIeGen = optional(a, "nvmlDeviceGetMaxPcieLinkGeneration", was.PCIeGen, h.GetMaxPcieLinkGeneration)
	d.PCIeWidth = optional(a, "nvmlDeviceGetMaxPcieLinkWidth", was.PCIeWidth, h.GetMaxPcieLinkWidth)
}

// wide makes a 32-bit answer a 64-bit one.
func wide(f func() (uint32, nvml.Return)) func() (uint64, nvml.Return) {
	return func() (uint64, nvml.Return) {
		v, ret := f()
		return uint64(v), ret
	}
}
