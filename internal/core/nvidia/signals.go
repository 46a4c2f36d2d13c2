package nvidia

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// This file reads the health signals that need a call each (nvmlDeviceGetTotalEccErrors, ...), on the GPU's worker.

// signal is a health signal that is read by a call of its own.
type signal struct {
	call     string
	interval interval
	fallback bool // it is read only if the signal before it is unsupported
	read     func(nvml.Device, *health.Sample) nvml.Return
}

// signals are read in this order: the utilisation is read next to the PCIe link width, which is less while a GPU is idle.
var signals = [...]signal{
	{call: "nvmlDeviceGetTotalEccErrors", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		n, ret := h.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
		s.Uncorrectable = gpu.OptionalUint64{Value: n, OK: ret == nvml.SUCCESS}
		return ret
	}},
	{call: "nvmlDeviceGetRepairStatus", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		r, ret := h.GetRepairStatus()
		s.RepairPending = tristate(ret, r.BChannelRepairPending != 0 || r.BTpcRepairPending != 0)
		return ret
	}},
	{call: "nvmlDeviceGetUnrepairableMemoryFlag_v1", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		f, ret := h.GetUnrepairableMemoryFlag_v1()
		s.Unrepairable = tristate(ret, f.BUnrepairableMemory != 0)
		return ret
	}},
	{call: "nvmlDeviceGetSramEccErrorStatus", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		e, ret := h.GetSramEccErrorStatus()
		s.SRAMThreshold = tristate(ret, e.BThresholdExceeded != 0)
		return ret
	}},
	{call: "nvmlDeviceGetMaxPcieLinkWidth", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) (ret nvml.Return) {
		s.PCIeMaxWidth, ret = h.GetMaxPcieLinkWidth()
		return ret
	}},
	{call: "nvmlDeviceGetCurrPcieLinkGeneration", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) (ret nvml.Return) {
		s.PCIeGen, ret = h.GetCurrPcieLinkGeneration()
		return ret
	}},
	{call: "nvmlDeviceGetCurrPcieLinkWidth", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) (ret nvml.Return) {
		s.PCIeWidth, ret = h.GetCurrPcieLinkWidth()
		return ret
	}},
	{call: "nvmlDeviceGetUtilizationRates", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		rates, ret := h.GetUtilizationRates()
		s.Busy = ret == nvml.SUCCESS && rates.Gpu >= busyPercent
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfoV", interval: intervalFabric, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		i, ret := h.GetGpuFabricInfoV().V3()
		s.Fabric = fabricState(ret, i)
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfoV", interval: intervalFabric, fallback: true, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		i, ret := h.GetGpuFabricInfoV().V2()
		s.Fabric = fabricState(ret, nvml.GpuFabricInfo_v3{State: i.State, Status: i.Status, HealthMask: i.HealthMask})
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfo", interval: intervalFabric, fallback: true, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		i, ret := h.GetGpuFabricInfo()
		s.Fabric = fabricState(ret, nvml.GpuFabricInfo_v3{State: i.State, Status: i.Status})
		return ret
	}},
	{call: "nvmlDeviceValidateInforom", interval: intervalOnce, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		ret := h.ValidateInforom()
		corrupt := ret == nvml.ERROR_CORRUPTED_INFOROM
		if corrupt {
			ret = nvml.SUCCESS
		}
		s.InfoROMCorrupt = tristate(ret, corrupt)
		return ret
	}},
}

// busyPercent is the GPU utilisation from which a GPU counts as busy. At less it may be idle long enough to reduce its link.
const busyPercent = 50

func tristate(ret nvml.Return, yes bool) health.Tristate {
	if ret != nvml.SUCCESS {
		return health.NotReported
	}
	return health.TristateOf(yes)
}

// readSignals reads the signals that are due, and those whose last reading failed or changed the value: a value counts in
// every check until the next reading, so a single wrong one would count several times.
func (r *healthRecord) readSignals(c *caller, h nvml.Device, p checkPlan) {
	for i, sig := range signals {
		y := &r.signals[i]
		if c.err != nil {
			return
		}
		if y.unsupported || !p.due[sig.interval] && !y.failed && !y.changed || sig.fallback && !r.signals[i-1].unsupported {
			continue
		}
		sample := r.sample
		err := do(c.slot, sig.call, c.at, func() nvml.Return { return sig.read(h, &sample) })
		if endsCheck(err) {
			c.err = err
		} else if y.update(err) {
			y.changed = !p.all && sample != r.sample
			r.sample = sample
		}
	}
}

// fabricState converts nvmlGpuFabricInfo_t: the state of a GPU in an NVSwitch fabric. The status is valid when the state is
// COMPLETED (nvml.h). The health mask and summary are zero (NOT_SUPPORTED) in older versions of the struct; an H100 reports no
// summary.
func fabricState(ret nvml.Return, i nvml.GpuFabricInfo_v3) health.Fabric {
	bits := func(shift, width uint32) uint32 { return i.HealthMask >> shift & width }
	switch {
	case ret != nvml.SUCCESS:
		return health.FabricNotReported
	case i.State == nvml.GPU_FABRIC_STATE_NOT_STARTED, i.State == nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return health.FabricStarting
	case i.State != nvml.GPU_FABRIC_STATE_COMPLETED:
		return health.FabricNotReported
	case nvml.Return(i.Status) != nvml.SUCCESS:
		return health.FabricUnhealthy
	case bits(nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION) >
		nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE:
		return health.FabricMisconfigured
	case i.HealthSummary == nvml.GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY:
		return health.FabricUnhealthy
	case i.HealthSummary == nvml.GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY,
		bits(nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW) ==
			nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE:
		return health.FabricLimited
	default:
		return health.FabricHealthy
	}
}
