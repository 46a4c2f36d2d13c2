package coretest

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// WithMIG is s with GPU n in MIG mode and partitioned into instances of these profiles, one compute instance in each GPU
// instance. WithMIG(s, n) is a GPU in MIG mode without instances.
func WithMIG(s gpu.Snapshot, n int, profiles ...string) gpu.Snapshot {
	s.Devices, s.Nodes = slices.Clone(s.Devices), slices.Clone(s.Nodes)
	at := slices.IndexFunc(s.Devices, func(d gpu.Device) bool { return d.ID == GPU(n) })
	s.Devices[at].MIG = true
	for i, profile := range profiles {
		d := s.Devices[at]
		d.ID, d.At = Instance(n, i), gpu.Placement{GPU: d.ID, GI: uint32(i + 1), CI: 0} //nolint:gosec // a GPU has seven
		d.Instance, d.Profile, d.MIG = i, profile, false
		d.Model += " MIG " + profile
		d.Memory /= 8
		d.GICap, d.CICap = 100*(n+1)+10*i, 100*(n+1)+10*i+1
		s.Devices = append(s.Devices, d)
		s.Nodes = append(s.Nodes, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.GICap), fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.CICap))
	}
	return gpu.NewSnapshot(s)
}

// Instance is the UUID of the i-th MIG instance of GPU n in WithMIG.
func Instance(n, i int) gpu.DeviceID {
	return gpu.DeviceID(fmt.Sprintf("MIG-00000000-0000-4000-8000-%09d%03d", n, i))
}
