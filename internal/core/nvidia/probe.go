package nvidia

import (
	"errors"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Probe asks every GPU of the last reading, and those it remembers, for a sign of life. One GPU's
// silence is its observation and never stops the others; an error is of the driver as a whole.
func (s *Session) Probe() ([]core.Observation, error) {
	s.listenAgain()
	var obs []core.Observation
	for index, g := range s.gpus {
		if g.device.ID == "" {
			continue
		}
		o, err := s.check(index, g)
		if isGone(err) {
			return nil, gone(err)
		}
		obs = append(obs, o)
	}
	if len(s.gpus) == 0 {
		if _, err := call(&s.reader, "nvmlDeviceGetCount", core.Node, s.lib.DeviceGetCount); err != nil {
			return nil, gone(err)
		}
	}
	return obs, nil
}

// check asks one GPU. Only an error of the driver as a whole is an error.
func (s *Session) check(index int, g gpu) (core.Observation, error) {
	o := core.Observation{At: g.device.At, Kind: core.Checked}
	_, err := visit(s, index, g.device.At, func(a *asker) struct{} { probe(a, g.handle); return struct{}{} })
	if stuck, ok := errors.AsType[*StuckError](err); ok {
		o.Kind, o.Detail = core.Waiting, stuck.Call
		return o, nil
	}
	if err != nil {
		o.Kind, o.Detail = silence(err), err.Error()
	}
	return o, err
}

// probe asks for the UUID, which the library may know by heart, and for the recovery action (field 230,
// R565 and newer), for which it has to ask the GPU; where there is no such field, for the memory.
func probe(a *asker, h nvml.Device) {
	required(a, "nvmlDeviceGetUUID", h.GetUUID)
	answered := supported(a, "nvmlDeviceGetFieldValues", func() (bool, nvml.Return) {
		field := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
		if ret := h.GetFieldValues(field); ret != nvml.SUCCESS {
			return false, ret
		}
		return true, nvml.Return(field[0].NvmlReturn)
	})
	if !answered {
		supported(a, "nvmlDeviceGetMemoryInfo", h.GetMemoryInfo)
	}
}
