package nvidia

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// field is a health signal that is read with the one nvmlDeviceGetFieldValues of each check. set gets an unset value if
// the GPU does not support the field.
type field struct {
	id  uint32
	set func(*health.Sample, gpu.OptionalUint64)
}

// The first field is the recovery action: if it can't be read, the check has failed.
var fields = [...]field{
	{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION, func(s *health.Sample, v gpu.OptionalUint64) { s.RecoveryAction = recoveryAction(v) }},
	{nvml.FI_DEV_REMAPPED_PENDING, func(s *health.Sample, v gpu.OptionalUint64) { s.RemapPending = tristateOf(v) }},
	{nvml.FI_DEV_REMAPPED_FAILURE, func(s *health.Sample, v gpu.OptionalUint64) { s.RemapFailed = tristateOf(v) }},
	{nvml.FI_DEV_RETIRED_PENDING, func(s *health.Sample, v gpu.OptionalUint64) { s.RetirementPending = tristateOf(v) }},
	{nvml.FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, func(s *health.Sample, v gpu.OptionalUint64) { s.ThermalSlowdown = v }},
	{nvml.FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, func(s *health.Sample, v gpu.OptionalUint64) { s.PowerBrake = v }},
	{nvml.FI_DEV_PCIE_REPLAY_COUNTER, func(s *health.Sample, v gpu.OptionalUint64) { s.Replays = v }},
	{nvml.FI_DEV_TOTAL_ENERGY_CONSUMPTION, func(s *health.Sample, v gpu.OptionalUint64) { s.Energy = v }},
}

func tristateOf(v gpu.OptionalUint64) health.Tristate {
	if !v.OK {
		return health.NotReported
	}
	return health.TristateOf(v.Value != 0)
}

// recoveryAction converts nvmlDeviceGpuRecoveryAction_t. A value of a later driver is health.RecoveryOther.
func recoveryAction(v gpu.OptionalUint64) health.RecoveryAction {
	known := [...]health.RecoveryAction{
		nvml.GPU_RECOVERY_ACTION_NONE:                health.RecoveryNone,
		nvml.GPU_RECOVERY_ACTION_GPU_RESET:           health.RecoveryReset,
		nvml.GPU_RECOVERY_ACTION_NODE_REBOOT:         health.RecoveryReboot,
		nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:           health.RecoveryDrainP2P,
		nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:     health.RecoveryDrainAndReset,
		nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: health.RecoveryIMEX,
		nvml.GPU_RECOVERY_ACTION_BUS_RESET:           health.RecoveryBusReset,
		nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:       health.RecoverySystemReboot,
	}
	switch {
	case !v.OK:
		return health.RecoveryUnknown
	case v.Value < uint64(len(known)):
		return known[v.Value]
	default:
		return health.RecoveryOther
	}
}

// fieldBatch is one nvmlDeviceGetFieldValues: the fields, and for each where its support and its value are stored.
type fieldBatch struct {
	values  []nvml.FieldValue
	support []*signalSupport
	set     []func(gpu.OptionalUint64)
}

func (b *fieldBatch) add(v nvml.FieldValue, y *signalSupport, set func(gpu.OptionalUint64)) {
	if !y.unsupported {
		b.values, b.support, b.set = append(b.values, v), append(b.support, y), append(b.set, set)
	}
}

// readFields reads all supported fields in one call, with the state of the GPU's NVLinks if that is due. It reports
// whether at least one field was read.
func (r *healthRecord) readFields(c *caller, h nvml.Device, links bool) (answered bool) {
	if c.err != nil || r.fieldsCall.unsupported {
		return false
	}
	var b fieldBatch
	for i, f := range fields {
		b.add(nvml.FieldValue{FieldId: f.id}, &r.fields[i], func(v gpu.OptionalUint64) { f.set(&r.sample, v) })
	}
	links = links || r.linksChanged || slices.ContainsFunc(r.links[:], func(y signalSupport) bool { return y.failed })
	links = links && !r.mig // MIG mode disables NVLinks to other GPUs
	var up gpu.OptionalUint64
	for link := range r.links {
		if links {
			b.add(nvml.FieldValue{FieldId: nvml.FI_DEV_NVLINK_GET_STATE, ScopeId: uint32(link)}, &r.links[link],
				func(v gpu.OptionalUint64) { up.Value, up.OK = up.Value+v.Value, up.OK || v.OK })
		}
	}
	if len(b.values) == 0 {
		return false
	}
	if answered = r.readBatch(c, h, b); c.err != nil || r.fieldsCall.failed {
		return false
	}
	if links && !slices.ContainsFunc(r.links[:], func(y signalSupport) bool { return y.failed }) {
		r.linksChanged = r.sample.LinksUp.OK && r.sample.LinksUp != up
		r.sample.LinksUp = up
	}
	return answered
}

// readBatch makes the call and stores the values. The error is the caller's if the whole call fails, or the recovery
// action, or if the code of a field concerns the whole GPU.
func (r *healthRecord) readBatch(c *caller, h nvml.Device, b fieldBatch) (answered bool) {
	const name = "nvmlDeviceGetFieldValues"
	callErr := do(c.slot, name, c.at, func() nvml.Return { return h.GetFieldValues(b.values) })
	if !r.fieldsCall.update(callErr) {
		if !isUnsupported(callErr) {
			c.err = callErr
		}
		return false
	}
	for i, y := range b.support {
		v, err := b.values[i], callErr
		if ret := nvml.Return(v.NvmlReturn); err == nil && ret != nvml.SUCCESS {
			err = &nvmlError{Call: name, Return: ret, text: c.slot.library.errorText(ret)}
		}
		counts := y.update(err)
		if endsCheck(err) || y.failed && !isUnsupported(err) && y == &r.fields[0] {
			c.err = err
			return false
		}
		if counts {
			b.set[i](gpu.OptionalUint64{Value: fieldValue(v), OK: err == nil})
		}
		answered = answered || err == nil
	}
	return answered
}

// fieldValue is the number in nvmlValue_t, for the types of counters and flags.
func fieldValue(v nvml.FieldValue) uint64 {
	switch nvml.ValueType(v.ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT, nvml.VALUE_TYPE_SIGNED_INT:
		return uint64(binary.NativeEndian.Uint32(v.Value[:]))
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return uint64(binary.NativeEndian.Uint16(v.Value[:]))
	default:
		return binary.NativeEndian.Uint64(v.Value[:])
	}
}

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
	{call: "nvmlDeviceGetBankRemapperStatus_v1", interval: intervalSlow, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		r, ret := h.GetBankRemapperStatus_v1()
		s.BankRemapPending = tristate(ret, r.BPending != 0)
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
	{call: "nvmlDeviceGetGpuFabricInfo_v4", interval: intervalFabric, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		i, ret := h.GetGpuFabricInfo_v4()
		s.Fabric, s.Clique = fabricState(ret, fabricV3(i)), fabricClique4(ret, i)
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfoV", interval: intervalFabric, fallback: true, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		i, ret := h.GetGpuFabricInfoV().V3()
		s.Fabric, s.Clique = fabricState(ret, i), fabricClique(ret, i)
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfoV", interval: intervalFabric, fallback: true, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		i, ret := h.GetGpuFabricInfoV().V2()
		v3 := nvml.GpuFabricInfo_v3{ClusterUuid: i.ClusterUuid, CliqueId: i.CliqueId, State: i.State, Status: i.Status, HealthMask: i.HealthMask}
		s.Fabric, s.Clique = fabricState(ret, v3), fabricClique(ret, v3)
		return ret
	}},
	{call: "nvmlDeviceGetGpuFabricInfo", interval: intervalFabric, fallback: true, read: func(h nvml.Device, s *health.Sample) nvml.Return {
		i, ret := h.GetGpuFabricInfo()
		v3 := nvml.GpuFabricInfo_v3{ClusterUuid: i.ClusterUuid, CliqueId: i.CliqueId, State: i.State, Status: i.Status}
		s.Fabric, s.Clique = fabricState(ret, v3), fabricClique(ret, v3)
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
		due := p.due[sig.interval] || y.failed || y.changed
		if y.unsupported {
			due = p.due[intervalSlow]
		}
		if !due || sig.fallback && !r.signals[i-1].unsupported {
			continue
		}
		sample := r.sample
		err := do(c.slot, sig.call, c.at, func() nvml.Return { return sig.read(h, &sample) })
		if endsCheck(err) {
			c.err = err
		} else if lacked := y.unsupported; y.update(err) && (!lacked || !y.unsupported) { // else the value may be a fallback's
			y.changed = !p.all && sample != r.sample
			r.sample = sample
		}
	}
}

// fabricState converts nvmlGpuFabricInfo_t: the state of a GPU in an NVSwitch fabric. The status is valid when the state is
// COMPLETED (nvml.h). The health mask and summary are zero (NOT_SUPPORTED) in older versions of the struct; an H100 reports no
// summary. Of the bits that nvml.h 13.4 adds, neither means that a GPU can't be used: whether it is in a partition, which may be none on
// purpose, and whether the global fabric manager is connected, without which the links go on.
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

// fabricV3 is nvmlGpuFabricInfo_v4_t as version 3, without the clique.
func fabricV3(i nvml.GpuFabricInfo_v4) nvml.GpuFabricInfo_v3 {
	return nvml.GpuFabricInfo_v3{ClusterUuid: i.ClusterUuid, State: i.State, Status: i.Status, HealthMask: i.HealthMask, HealthSummary: i.HealthSummary}
}

// fabricClique4 is fabricClique for version 4, whose first clique of unicast pointers is the one of older versions (nvml.h). Without such a
// clique no GPU can use the memory of this one by a pointer.
func fabricClique4(ret nvml.Return, i nvml.GpuFabricInfo_v4) string {
	for _, c := range i.Cliques[:min(i.NumCliques, uint32(len(i.Cliques)))] {
		if c.Type == nvml.GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER {
			v3 := fabricV3(i)
			v3.CliqueId = c.Id
			return fabricClique(ret, v3)
		}
	}
	return ""
}

// fabricClique returns the cluster and the clique of nvmlGpuFabricInfo_t, in the notation of NVIDIA's gpu-feature-discovery. GPUs of one
// clique can use each other's memory over NVLink, also between nodes. A GPU whose NVLinks end in its node has no cluster (zero).
func fabricClique(ret nvml.Return, i nvml.GpuFabricInfo_v3) string {
	if ret != nvml.SUCCESS || i.State != nvml.GPU_FABRIC_STATE_COMPLETED || nvml.Return(i.Status) != nvml.SUCCESS || i.ClusterUuid == [16]uint8{} {
		return ""
	}
	u := i.ClusterUuid
	return fmt.Sprintf("%x-%x-%x-%x-%x.%d", u[:4], u[4:6], u[6:8], u[8:10], u[10:], i.CliqueId)
}
