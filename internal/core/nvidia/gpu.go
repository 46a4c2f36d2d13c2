package nvidia

import (
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// reading is what is read of a GPU: it, its instances if MIG mode is on, those left out, and what was known of
// it before; or why it was not read.
type reading struct {
	gpu, last gpu
	settled   bool // what is fixed is known
	excluded  []core.Exclusion
	err       error
}

// readAll reads what those are that were found, in their order.
func (s *Session) readAll(there []identity) []reading {
	all := make([]reading, len(there))
	var targets []target
	var asked []int // places in the list
	for i, found := range there {
		all[i] = reading{last: s.remembered(found.id), err: found.err}
		if found.err != nil {
			continue
		}
		r := &all[i]
		r.gpu.handle, r.gpu.device = found.handle, core.Device{
			ID: found.id, At: core.WholeGPU(found.id), Index: found.index, PCI: found.pci, NUMANode: s.numaNode(found.pci),
		}
		r.settled = s.lane(found.id).settled && r.last.handle == found.handle
		targets, asked = append(targets, s.at(r.gpu.device)), append(asked, i)
	}
	caps := s.capabilities()
	readings, errs := visitAll(s, targets, func(i int, a *asker) reading {
		r := all[asked[i]]
		r.readGPU(a)
		if a.err == nil && r.gpu.device.MIG {
			m := migReader{parent: r.gpu.held, last: r.last.instances, caps: caps, menu: &targets[i].lane.menu}
			r.gpu.instances, r.excluded = m.read(a)
		}
		return r
	})
	for i, place := range asked {
		if all[place].err = errs[i]; errs[i] == nil {
			all[place] = readings[i]
		}
	}
	for i, r := range all {
		if id := there[i].id; id != "" {
			l := s.lane(id)
			l.settled = r.err == nil && r.settled && !l.record.away
		}
	}
	return all
}

// readGPU completes the device of a handle.
func (r *reading) readGPU(a *asker) {
	h, d, was := r.gpu.handle, &r.gpu.device, r.last.device
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
	readBoard(a, h, d, was)
	if r.settled = r.settled && d.MIG == was.MIG; r.settled {
		keepFixed(d, was)
		return
	}
	r.settled = readFixed(a, h, d, was)
}

// readBoard reads memory, the limit of power, and modes.
func readBoard(a *asker, h nvml.Device, d *core.Device, was core.Device) {
	d.Memory = optional(a, "nvmlDeviceGetMemoryInfo", was.Memory, func() (uint64, nvml.Return) {
		m, ret := h.GetMemoryInfo()
		return m.Total, ret
	})
	d.PowerLimit = optional(a, "nvmlDeviceGetPowerManagementLimit", was.PowerLimit, wide(h.GetPowerManagementLimit))
	if d.PowerLimit == 0 {
		d.PowerLimit = optional(a, "nvmlDeviceGetEnforcedPowerLimit", was.PowerLimit, wide(h.GetEnforcedPowerLimit))
	}
	mode := func(f func() (nvml.EnableState, nvml.Return)) func() (core.Toggle, nvml.Return) {
		return func() (core.Toggle, nvml.Return) {
			state, ret := f()
			return toggle(state), ret
		}
	}
	d.DisplayState = optional(a, "nvmlDeviceGetDisplayMode", was.DisplayState, mode(h.GetDisplayMode))
	d.PersistenceMode = optional(a, "nvmlDeviceGetPersistenceMode", was.PersistenceMode, mode(h.GetPersistenceMode))
	d.ECC = optional(a, "nvmlDeviceGetEccMode", was.ECC, mode(func() (nvml.EnableState, nvml.Return) {
		current, _, ret := h.GetEccMode() // what is pending takes a reset
		return current, ret
	}))
}

// wide makes a 32-bit answer a 64-bit one.
func wide(f func() (uint32, nvml.Return)) func() (uint64, nvml.Return) {
	return func() (uint64, nvml.Return) {
		v, ret := f()
		return uint64(v), ret
	}
}
