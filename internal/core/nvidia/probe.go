package nvidia

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Probe asks every GPU of the last reading, and those it remembers, for a sign of life. One GPU's
// silence is its observation and never stops the others; an error is of the driver as a whole.
func (s *Session) Probe() ([]core.Observation, error) {
	var obs []core.Observation
	for _, g := range s.gpus {
		if g.device.ID == "" {
			continue
		}
		err := s.probe(g.held)
		if isGone(err) {
			return nil, gone(err)
		}
		o := core.Observation{At: g.device.At, Kind: core.Checked}
		if err != nil {
			o.Kind, o.Detail = silence(err), err.Error()
		}
		obs = append(obs, o)
	}
	if len(s.gpus) == 0 {
		if _, err := call(&s.reader, "nvmlDeviceGetCount", core.Node, s.lib.DeviceGetCount); err != nil {
			return nil, gone(err)
		}
	}
	s.listenAgain()
	return obs, nil
}

// probe asks for the UUID, which the library may know by heart, and for the recovery action (field 230,
// R565 and newer), for which it has to ask the GPU; where there is no such field, for the memory.
func (s *Session) probe(g held) error {
	a := &asker{line: &s.reader, at: g.device.At}
	required(a, "nvmlDeviceGetUUID", g.handle.GetUUID)
	answered := supported(a, "nvmlDeviceGetFieldValues", func() (bool, nvml.Return) {
		field := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
		if ret := g.handle.GetFieldValues(field); ret != nvml.SUCCESS {
			return false, ret
		}
		return true, nvml.Return(field[0].NvmlReturn)
	})
	if !answered {
		supported(a, "nvmlDeviceGetMemoryInfo", g.handle.GetMemoryInfo)
	}
	return a.err
}
