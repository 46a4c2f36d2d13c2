package nvidia

import (
	"encoding/binary"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// field is a sign of health that comes with the one nvmlDeviceGetFieldValues of each check. An unset gauge
// is for a GPU that does not have it.
type field struct {
	id  uint32
	set func(*core.HealthSample, core.OptionalUint64)
}

// The first field is the driver's verdict, without which there is no check.
var fields = [...]field{
	{nvml.FI_DEV_GET_GPU_RECOVERY_ACTION, func(v *core.HealthSample, g core.OptionalUint64) { v.RecoveryAction = verdict(g) }},
	{nvml.FI_DEV_REMAPPED_PENDING, func(v *core.HealthSample, g core.OptionalUint64) { v.RemapPending = answer(g) }},
	{nvml.FI_DEV_REMAPPED_FAILURE, func(v *core.HealthSample, g core.OptionalUint64) { v.RemapFailed = answer(g) }},
	{nvml.FI_DEV_RETIRED_PENDING, func(v *core.HealthSample, g core.OptionalUint64) { v.RetirementPending = answer(g) }},
	{nvml.FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, func(v *core.HealthSample, g core.OptionalUint64) { v.ThermalSlowdown = g }},
	{nvml.FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, func(v *core.HealthSample, g core.OptionalUint64) { v.PowerBrake = g }},
	{nvml.FI_DEV_PCIE_REPLAY_COUNTER, func(v *core.HealthSample, g core.OptionalUint64) { v.Replays = g }},
	{nvml.FI_DEV_TOTAL_ENERGY_CONSUMPTION, func(v *core.HealthSample, g core.OptionalUint64) { v.Energy = g }},
}

func answer(g core.OptionalUint64) core.Tristate {
	if !g.OK {
		return core.NotReported
	}
	return core.TristateOf(g.Value != 0)
}

// verdict maps nvmlDeviceGpuRecoveryAction_t. What a later driver may want is something.
func verdict(g core.OptionalUint64) core.RecoveryAction {
	known := [...]core.RecoveryAction{
		nvml.GPU_RECOVERY_ACTION_NONE:                core.RecoveryNone,
		nvml.GPU_RECOVERY_ACTION_GPU_RESET:           core.RecoveryReset,
		nvml.GPU_RECOVERY_ACTION_NODE_REBOOT:         core.RecoveryReboot,
		nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:           core.RecoveryDrainP2P,
		nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:     core.RecoveryDrainAndReset,
		nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: core.RecoveryIMEX,
	}
	switch {
	case !g.OK:
		return core.RecoveryUnknown
	case g.Value < uint64(len(known)):
		return known[g.Value]
	default:
		return core.RecoveryOther
	}
}

// batch is one nvmlDeviceGetFieldValues: what is asked for, and whose ability and value that is.
type batch struct {
	values []nvml.FieldValue
	into   []*ability
	set    []func(core.OptionalUint64)
}

func (b *batch) add(v nvml.FieldValue, y *ability, set func(core.OptionalUint64)) {
	if !y.lacking {
		b.values, b.into, b.set = append(b.values, v), append(b.into, y), append(b.set, set)
	}
}

// readFields asks for all fields that the GPU has in one call, and for the state of its NVLinks if they
// are due. False if there is nothing that the GPU has.
func (r *record) readFields(a *asker, h nvml.Device, links bool) (answered bool) {
	if a.err != nil || r.batch.lacking {
		return false
	}
	var b batch
	for i, f := range fields {
		b.add(nvml.FieldValue{FieldId: f.id}, &r.fields[i], func(g core.OptionalUint64) { f.set(&r.vitals, g) })
	}
	links = links || slices.ContainsFunc(r.links[:], func(y ability) bool { return y.failed })
	links = links && !r.mig // which turns links to other GPUs off by design
	var up core.OptionalUint64
	for link := range r.links {
		if links {
			b.add(nvml.FieldValue{FieldId: nvml.FI_DEV_NVLINK_GET_STATE, ScopeId: uint32(link)}, &r.links[link],
				func(g core.OptionalUint64) { up.Value, up.OK = up.Value+g.Value, up.OK || g.OK })
		}
	}
	if len(b.values) == 0 {
		return false
	}
	if answered = r.ask(a, h, b); a.err != nil {
		return false
	}
	if links && !slices.ContainsFunc(r.links[:], func(y ability) bool { return y.failed }) {
		r.vitals.LinksUp = up
	}
	return answered
}

// ask makes the call and takes its answers. It fails as a whole if the call does, or the verdict, or if a
// field says what concerns all: then it is the asker's error.
func (r *record) ask(a *asker, h nvml.Device, b batch) (answered bool) {
	const name = "nvmlDeviceGetFieldValues"
	whole := do(a.line, name, a.at, func() nvml.Return { return h.GetFieldValues(b.values) })
	if !r.batch.took(whole) {
		a.err = whole
		return false
	}
	for i, y := range b.into {
		v, err := b.values[i], whole
		if ret := nvml.Return(v.NvmlReturn); err == nil && ret != nvml.SUCCESS {
			err = a.line.failure(name, a.at, ret)
		}
		counts := y.took(err)
		if fatal(err) || y.failed && y == &r.fields[0] {
			a.err = err
			return false
		}
		if counts {
			b.set[i](core.OptionalUint64{Value: fieldValue(v), OK: err == nil})
		}
		answered = answered || err == nil
	}
	return answered
}

// fieldValue is the number in a field's union, for the types that counters and flags have.
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
