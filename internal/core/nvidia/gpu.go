package nvidia

import (
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// visitGPU reads what the GPU is, and its instances if MIG mode is on. Exclusions are of instances.
func (s *Session) visitGPU(index int, found identity, last gpu) (gpu, []core.Exclusion, error) {
	if found.err != nil {
		return gpu{}, nil, found.err
	}
	type reading struct {
		gpu      gpu
		excluded []core.Exclusion
	}
	d := core.Device{ID: found.id, At: core.WholeGPU(found.id), Index: index, PCI: found.pci, NUMANode: s.numaNode(found.pci)}
	caps, profiles := s.capabilities(), s.lane(index).profiles
	r, err := visit(s, index, d.At, func(a *asker) (r reading) {
		r.gpu.held = readGPU(a, found.handle, d, last.device)
		if a.err == nil && r.gpu.device.MIG {
			m := migReader{parent: r.gpu.held, last: last.instances, caps: caps, profiles: profiles}
			r.gpu.instances, r.excluded = m.read(a)
		}
		return r
	})
	if err != nil {
		return gpu{}, nil, err
	}
	return r.gpu, r.excluded, nil
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
