package nvidia

import (
	"io/fs"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Usage reads the utilisation, power, temperature, clocks, memory and counters of every device of the latest Snapshot, on the GPUs'
// workers, and, with Options.UsedBy, its processes. What the latest health check has read (PCIe link, NVLinks) is not read again. A
// value that a device does not report is unset; for a lost or hung GPU, all values are. Only an error of the whole driver is
// returned. It belongs to the reader.
func (s *Session) Usage() ([]gpu.Usage, error) {
	gpus := s.gpus // an abandoned query may read it after the next Snapshot
	targets := s.targetsOf(gpus)
	var proc fs.FS
	if s.usedBy {
		proc = s.proc
	}
	all, errs := queryAll(s, targets, func(i int, c *caller) []gpu.Usage {
		began := s.now()
		all := []gpu.Usage{usageOf(c, gpus[i].nvmlDevice, targets[i].worker.slowUsage(c, gpus[i].handle, began))}
		all[0].Processes = targets[i].worker.readUsedBy(c, gpus[i].handle, proc)
		for _, d := range gpus[i].instances {
			one := usageOfInstance(c, d, all[0])
			one.Processes = processesAt(all[0].Processes, d.device.At)
			all = append(all, one)
		}
		for j := range all {
			all[j].At = began
		}
		return all
	})
	var usage []gpu.Usage
	for i, err := range errs {
		switch {
		case isDriverLost(err):
			return nil, s.driverLost(err)
		case err != nil:
			all[i] = []gpu.Usage{{Device: gpus[i].device.ID}}
			for _, d := range gpus[i].instances {
				all[i] = append(all[i], gpu.Usage{Device: d.device.ID})
			}
		}
		if err == nil {
			addSample(&all[i][0], targets[i].worker.record.sample)
		}
		usage = append(usage, all[i]...)
	}
	return usage, nil
}

// usageOfInstance reads the values of a MIG instance. The temperature is that of its GPU. The GPU's power is not reported for
// instances: a sum over them would count it several times.
//
// NVML accepts the handle of an instance for few calls (nvml.h, the notes of each): nvmlDeviceGetUUID, Name, Index,
// PciInfo, Attributes, GpuInstanceId and ComputeInstanceId, MemoryInfo, BAR1MemoryInfo, ComputeMode, the lists of
// processes, and nvmlDeviceGetMemoryErrorCounter for uncorrectable volatile errors outside of DRAM. All others, as power,
// temperature, clocks and ECC totals, return NOT_SUPPORTED or INVALID_ARGUMENT; while MIG mode is on, so do
// nvmlDeviceGetUtilizationRates, EncoderUtilization and DecoderUtilization of the GPU.
//
// From Hopper on, nvmlGpmMigSampleGet can measure the utilisation of an instance. It needs two samples, which stay allocated
// in the driver while an agent runs, and the counters that profilers use: that is the task of a monitoring agent.
func usageOfInstance(c *caller, d nvmlDevice, parent gpu.Usage) gpu.Usage {
	u := gpu.Usage{Device: d.device.ID, Temperature: parent.Temperature}
	readMemory(c, d.handle, &u)
	return u
}

// slowUsageEvery is the interval of the calls for values that Nomad's statistics, which are read each second, do not have (clocks,
// most counters), or that do not change from second to second (power limit, ECC counters): seven calls of fourteen.
const slowUsageEvery = 10 * time.Second

// slowUsage are the values that were read last, and the time of that.
type slowUsage struct {
	usage gpu.Usage
	at    time.Time
}

// slowUsage reads the values that change slowly, unless it read them less than slowUsageEvery ago. It belongs to the running query.
func (w *gpuWorker) slowUsage(c *caller, h nvml.Device, now time.Time) gpu.Usage {
	if !w.slow.at.IsZero() && now.Sub(w.slow.at) < slowUsageEvery {
		return w.slow.usage
	}
	var u gpu.Usage
	u.PowerLimit = optionalNumber(c, "nvmlDeviceGetPowerManagementLimit", h.GetPowerManagementLimit)
	if !u.PowerLimit.OK {
		u.PowerLimit = optionalNumber(c, "nvmlDeviceGetEnforcedPowerLimit", h.GetEnforcedPowerLimit)
	}
	ecc := func(where nvml.MemoryLocation) gpu.OptionalUint64 {
		return optionalNumber(c, "nvmlDeviceGetMemoryErrorCounter", func() (uint64, nvml.Return) {
			return h.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC, where)
		})
	}
	u.ECCL1 = ecc(nvml.MEMORY_LOCATION_L1_CACHE)
	u.ECCL2 = ecc(nvml.MEMORY_LOCATION_L2_CACHE)
	u.ECCMemory = ecc(nvml.MEMORY_LOCATION_DEVICE_MEMORY)
	u.ClockSM = clock(c, h, nvml.CLOCK_SM)
	u.ClockMemory = clock(c, h, nvml.CLOCK_MEM)
	readCounters(c, h, &u)
	w.usedByUnsupported = false
	if c.err == nil && !c.fellBack {
		w.slow = slowUsage{u, now}
	}
	return u
}

// usageOf reads the values of a GPU; u has those that change slowly.
func usageOf(c *caller, d nvmlDevice, u gpu.Usage) gpu.Usage {
	u.Device = d.device.ID
	h := d.handle
	u.Power = optionalNumber(c, "nvmlDeviceGetPowerUsage", h.GetPowerUsage)
	u.Temperature = optionalNumber(c, "nvmlDeviceGetTemperature", func() (uint32, nvml.Return) { return h.GetTemperature(nvml.TEMPERATURE_GPU) })
	u.GPU, u.Memory = optionalNumbers(c, "nvmlDeviceGetUtilizationRates", func() (uint64, uint64, nvml.Return) {
		rates, ret := h.GetUtilizationRates()
		return uint64(rates.Gpu), uint64(rates.Memory), ret
	})
	u.Encoder = optionalNumber(c, "nvmlDeviceGetEncoderUtilization", withoutPeriod(h.GetEncoderUtilization))
	u.Decoder = optionalNumber(c, "nvmlDeviceGetDecoderUtilization", withoutPeriod(h.GetDecoderUtilization))
	readMemory(c, h, &u)
	return u
}

// clock reads a present clock rate. There is no field value of it.
func clock(c *caller, h nvml.Device, of nvml.ClockType) gpu.OptionalUint64 {
	return optionalNumber(c, "nvmlDeviceGetClockInfo", func() (uint32, nvml.Return) { return h.GetClockInfo(of) })
}

// readMemory reads what a GPU and a MIG instance both have.
func readMemory(c *caller, h nvml.Device, u *gpu.Usage) {
	u.MemoryUsed, u.MemoryTotal = optionalNumbers(c, "nvmlDeviceGetMemoryInfo", func() (uint64, uint64, nvml.Return) {
		m, ret := h.GetMemoryInfo()
		return m.Used, m.Total, ret
	})
	u.BAR1Used, u.BAR1Total = optionalNumbers(c, "nvmlDeviceGetBAR1MemoryInfo", func() (uint64, uint64, nvml.Return) {
		m, ret := h.GetBAR1MemoryInfo()
		return m.Bar1Used, m.Bar1Total, ret
	})
}

// optionalNumber is unset if the call fails.
func optionalNumber[T uint32 | uint64](c *caller, name string, f func() (T, nvml.Return)) gpu.OptionalUint64 {
	return measured(c, name, converted(f, func(v T) gpu.OptionalUint64 { return gpu.OptionalUint64Of(uint64(v)) }))
}

// optionalNumbers are two numbers that one call returns.
func optionalNumbers(c *caller, name string, f func() (v, w uint64, ret nvml.Return)) (gpu.OptionalUint64, gpu.OptionalUint64) {
	both := measured(c, name, func() ([2]gpu.OptionalUint64, nvml.Return) {
		v, w, ret := f()
		return [2]gpu.OptionalUint64{gpu.OptionalUint64Of(v), gpu.OptionalUint64Of(w)}, ret
	})
	return both[0], both[1]
}

// withoutPeriod drops the sample period of a result.
func withoutPeriod(f func() (percent, period uint32, ret nvml.Return)) func() (uint32, nvml.Return) {
	return func() (uint32, nvml.Return) {
		percent, _, ret := f()
		return percent, ret
	}
}
