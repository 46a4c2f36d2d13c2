package nvidia

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// signal is a sign of health that takes a call of its own.
type signal struct {
	call    string
	pace    pace
	instead bool // asked only where the signal before it is lacking
	read    func(nvml.Device, *core.HealthSample) nvml.Return
}

// signals are in the order in which they are asked for: whether a GPU computes must be known next to the
// width of its link, which is less while it does not.
var signals = [...]signal{
	{call: "nvmlDeviceGetTotalEccErrors", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		n, ret := h.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
		v.Uncorrectable = core.OptionalUint64{Value: n, OK: ret == nvml.SUCCESS}
		return ret
	}},
	{call: "nvmlDeviceGetRepairStatus", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		s, ret := h.GetRepairStatus()
		v.RepairPending = said(ret, s.BChannelRepairPending != 0 || s.BTpcRepairPending != 0)
		return ret
	}},
	{call: "nvmlDeviceGetUnrepairableMemoryFlag_v1", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		s, ret := h.GetUnrepairableMemoryFlag_v1()
		v.Unrepairable = said(ret, s.BUnrepairableMemory != 0)
		return ret
	}},
	{call: "nvmlDeviceGetSramEccErrorStatus", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		s, ret := h.GetSramEccErrorStatus()
		v.SRAMThreshold = said(ret, s.BThresholdExceeded != 0)
		return ret
	}},
	{call: "nvmlDeviceGetMaxPcieLinkWidth", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) (ret nvml.Return) {
		v.PCIeMaxWidth, ret = h.GetMaxPcieLinkWidth()
		return ret
	}},
	{call: "nvmlDeviceGetCurrPcieLinkGeneration", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) (ret nvml.Return) {
		v.PCIeGen, ret = h.GetCurrPcieLinkGeneration()
		return ret
	}},
	{call: "nvmlDeviceGetCurrPcieLinkWidth", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) (ret nvml.Return) {
		v.PCIeWidth, ret = h.GetCurrPcieLinkWidth()
		return ret
	}},
	{call: "nvmlDeviceGetUtilizationRates", pace: slowly, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		rates, ret := h.GetUtilizationRates()
		v.Busy = ret == nvml.SUCCESS && rates.Gpu >= busy
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfoV", pace: ofFabric, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		i, ret := h.GetGpuFabricInfoV().V3()
		v.Fabric = fabricOf(ret, i.State, i.Status, i.HealthMask, i.HealthSummary)
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfoV", pace: ofFabric, instead: true, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		i, ret := h.GetGpuFabricInfoV().V2()
		v.Fabric = fabricOf(ret, i.State, i.Status, i.HealthMask, nvml.GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED)
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfo", pace: ofFabric, instead: true, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		i, ret := h.GetGpuFabricInfo()
		v.Fabric = fabricOf(ret, i.State, i.Status, 0, nvml.GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED)
		return ret
	}},
	{call: "nvmlDeviceValidateInforom", pace: once, read: func(h nvml.Device, v *core.HealthSample) nvml.Return {
		ret := h.ValidateInforom()
		corrupt := ret == nvml.ERROR_CORRUPTED_INFOROM
		if corrupt {
			ret = nvml.SUCCESS
		}
		v.InfoROMCorrupt = said(ret, corrupt)
		return ret
	}},
}

// busy is the percentage of time from which a GPU counts as computing. With less it may be idle for long
// enough to narrow its link.
const busy = 50

func said(ret nvml.Return, yes bool) core.Tristate {
	if ret != nvml.SUCCESS {
		return core.NotReported
	}
	return core.TristateOf(yes)
}

// readSignals asks for what is due, and for what could not be read the last time or said something new. What
// is carried counts as said again, so without that a single wrong answer would count several times.
func (r *record) readSignals(a *asker, h nvml.Device, p plan) {
	for i, sig := range signals {
		y := &r.calls[i]
		if a.err != nil {
			return
		}
		if y.lacking || !p.due[sig.pace] && !y.failed && !y.changed || sig.instead && !r.calls[i-1].lacking {
			continue
		}
		v := r.vitals
		err := do(a.line, sig.call, a.at, func() nvml.Return { return sig.read(h, &v) })
		if fatal(err) {
			a.err = err
		} else if y.took(err) {
			y.changed = !p.anew && v != r.vitals
			r.vitals = v
		}
	}
}

// fabricOf is what the driver says about a GPU's place in an NVSwitch fabric. The status says something
// once probing is completed (nvml.h); an H100 gives no summary.
func fabricOf(ret nvml.Return, state uint8, status, mask uint32, summary uint8) core.Fabric {
	bits := func(shift, width uint32) uint32 { return mask >> shift & width }
	switch {
	case ret != nvml.SUCCESS:
		return core.FabricNotReported
	case state == nvml.GPU_FABRIC_STATE_NOT_STARTED, state == nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return core.FabricStarting
	case state != nvml.GPU_FABRIC_STATE_COMPLETED:
		return core.FabricNotReported
	case nvml.Return(status) != nvml.SUCCESS:
		return core.FabricUnhealthy
	case bits(nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION) >
		nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE:
		return core.FabricMisconfigured
	case summary == nvml.GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY:
		return core.FabricUnhealthy
	case summary == nvml.GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY,
		bits(nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW) ==
			nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE:
		return core.FabricLimited
	default:
		return core.FabricHealthy
	}
}
