package nvidia

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Usage reads the live numbers of every device of the last reading. What a device does not report is
// unset, and of a lost or stuck GPU everything is; an error is of the driver as a whole.
func (s *Session) Usage() ([]core.Usage, error) {
	var targets []target
	var devices [][]held
	for _, g := range s.gpus {
		targets = append(targets, s.at(g.device))
		devices = append(devices, append([]held{g.held}, g.instances...))
	}
	all, errs := visitAll(s, targets, func(i int, a *asker) []core.Usage {
		began := s.now()
		all := []core.Usage{usageOf(a, devices[i][0])}
		for _, d := range devices[i][1:] {
			all = append(all, usageOfInstance(a, d, all[0]))
		}
		for j := range all {
			all[j].At = began
		}
		return all
	})
	var usage []core.Usage
	for i, err := range errs {
		switch {
		case isGone(err):
			return nil, s.gone(err)
		case err != nil:
			all[i] = make([]core.Usage, len(devices[i]))
			for j, d := range devices[i] {
				all[i][j].Device = d.device.ID
			}
		}
		usage = append(usage, all[i]...)
	}
	return usage, nil
}

// usageOfInstance asks for what a MIG instance has of its own. It is as hot as its GPU; the GPU's power is nobody's
// part, and would count once an instance if it were told of each.
//
// NVML takes the handle of an instance for few calls (nvml.h, the notes of each): nvmlDeviceGetUUID, Name, Index,
// PciInfo, Attributes, GpuInstanceId and ComputeInstanceId, MemoryInfo, BAR1MemoryInfo, ComputeMode, the lists of
// processes, and nvmlDeviceGetMemoryErrorCounter for uncorrectable volatile errors outside of DRAM. The rest answers
// NOT_SUPPORTED or INVALID_ARGUMENT, power, temperature, clocks and ECC totals among it; while MIG mode is on, also
// nvmlDeviceGetUtilizationRates, EncoderUtilization and DecoderUtilization of the GPU.
//
// From Hopper on nvmlGpmMigSampleGet could tell how busy an instance is. It takes two samples, which are kept in the
// driver for as long as an agent runs, and the counters that profilers want: that is for who monitors, not for who
// hands devices out.
func usageOfInstance(a *asker, d held, gpu core.Usage) core.Usage {
	u := core.Usage{Device: d.device.ID, Temperature: gpu.Temperature}
	readMemory(a, d.handle, &u)
	return u
}

// usageOf asks a GPU for everything.
func usageOf(a *asker, d held) core.Usage {
	u := core.Usage{Device: d.device.ID}
	h := d.handle
	u.Power = gauge(a, "nvmlDeviceGetPowerUsage", wide(h.GetPowerUsage))
	u.PowerLimit = gauge(a, "nvmlDeviceGetPowerManagementLimit", wide(h.GetPowerManagementLimit))
	if !u.PowerLimit.OK {
		u.PowerLimit = gauge(a, "nvmlDeviceGetEnforcedPowerLimit", wide(h.GetEnforcedPowerLimit))
	}
	u.Temperature = gauge(a, "nvmlDeviceGetTemperature", wide(func() (uint32, nvml.Return) {
		return h.GetTemperature(nvml.TEMPERATURE_GPU)
	}))
	u.GPU, u.Memory = gauges(a, "nvmlDeviceGetUtilizationRates", func() (uint64, uint64, nvml.Return) {
		rates, ret := h.GetUtilizationRates()
		return uint64(rates.Gpu), uint64(rates.Memory), ret
	})
	u.Encoder = gauge(a, "nvmlDeviceGetEncoderUtilization", sampled(h.GetEncoderUtilization))
	u.Decoder = gauge(a, "nvmlDeviceGetDecoderUtilization", sampled(h.GetDecoderUtilization))
	readMemory(a, h, &u)
	ecc := func(where nvml.MemoryLocation) core.OptionalUint64 {
		return gauge(a, "nvmlDeviceGetMemoryErrorCounter", func() (uint64, nvml.Return) {
			return h.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC, where)
		})
	}
	u.ECCL1 = ecc(nvml.MEMORY_LOCATION_L1_CACHE)
	u.ECCL2 = ecc(nvml.MEMORY_LOCATION_L2_CACHE)
	u.ECCMemory = ecc(nvml.MEMORY_LOCATION_DEVICE_MEMORY)
	return u
}

// readMemory asks for what a GPU and an instance both have of their own.
func readMemory(a *asker, h nvml.Device, u *core.Usage) {
	u.MemoryUsed, u.MemoryTotal = gauges(a, "nvmlDeviceGetMemoryInfo", func() (uint64, uint64, nvml.Return) {
		m, ret := h.GetMemoryInfo()
		return m.Used, m.Total, ret
	})
	u.BAR1Used, u.BAR1Total = gauges(a, "nvmlDeviceGetBAR1MemoryInfo", func() (uint64, uint64, nvml.Return) {
		m, ret := h.GetBAR1MemoryInfo()
		return m.Bar1Used, m.Bar1Total, ret
	})
}

// gauge is unset if the driver does not give the number.
func gauge(a *asker, name string, f func() (uint64, nvml.Return)) core.OptionalUint64 {
	return optional(a, name, core.OptionalUint64{}, func() (core.OptionalUint64, nvml.Return) {
		v, ret := f()
		return core.OptionalUint64Of(v), ret
	})
}

// gauges are two numbers that one call gives.
func gauges(a *asker, name string, f func() (v, w uint64, ret nvml.Return)) (core.OptionalUint64, core.OptionalUint64) {
	both := optional(a, name, [2]core.OptionalUint64{}, func() ([2]core.OptionalUint64, nvml.Return) {
		v, w, ret := f()
		return [2]core.OptionalUint64{core.OptionalUint64Of(v), core.OptionalUint64Of(w)}, ret
	})
	return both[0], both[1]
}

// sampled drops the sample period from an answer.
func sampled(f func() (percent, period uint32, ret nvml.Return)) func() (uint64, nvml.Return) {
	return func() (uint64, nvml.Return) {
		percent, _, ret := f()
		return uint64(percent), ret
	}
}
