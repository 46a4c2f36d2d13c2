package nvidia

import (
	"cmp"
	"errors"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// shape is everything that decides the profile of a MIG instance. The driver may give a UUID again to
// another instance in the same place, so the UUID alone does not.
type shape struct {
	id         core.DeviceID
	at         core.Placement
	name       string
	attributes nvml.DeviceAttributes
}

// migReader reads the instances of one GPU. It runs in the GPU's lane.
type migReader struct {
	parent   held
	last     []held // the instances of the last reading
	caps     capabilities
	profiles map[shape]string // those known already; the lane's
}

// read reads the MIG instances. One that can't be read is an exclusion, at its own placement if that is
// known and else at the GPU's; an error that concerns the whole GPU or driver is the asker's.
func (m migReader) read(a *asker) (found []held, excluded []core.Exclusion) {
	slots := supported(a, "nvmlDeviceGetMaxMigDeviceCount", m.parent.handle.GetMaxMigDeviceCount)
	if a.err != nil {
		return nil, nil
	}
	for i := range slots {
		instance, at, err := m.instance(a.about(a.at), i)
		switch {
		case returned(err) == nvml.ERROR_NOT_FOUND && instance.handle == nil: // no instance in this slot
		case isLost(err), isGone(err), errors.Is(err, errLate):
			a.err = err
			return nil, nil
		case err != nil:
			excluded = append(excluded, core.Exclusion{
				Index: m.parent.device.Index, At: at, PCI: m.parent.device.PCI, Kind: silence(err), Reason: err.Error(),
			})
		default:
			d := &instance.device
			d.GICap, d.CICap = m.caps.of(d.Minor, d.At)
			found = append(found, instance)
		}
	}
	return found, excluded
}

// instance reads the i-th instance of a GPU: who and where it is, then what it is. at is its placement as
// far as it became known.
func (m migReader) instance(a *asker, i int) (found held, at core.Placement, err error) {
	gpu := m.parent.device
	at = gpu.At
	h := required(a, "nvmlDeviceGetMigDeviceHandleByIndex", func() (nvml.Device, nvml.Return) {
		return m.parent.handle.GetMigDeviceHandleByIndex(i)
	})
	if a.err != nil {
		return held{}, at, a.err
	}
	found.handle = h
	gi := required(a, "nvmlDeviceGetGpuInstanceId", h.GetGpuInstanceId)
	ci := required(a, "nvmlDeviceGetComputeInstanceId", h.GetComputeInstanceId)
	if a.err == nil {
		at.GI, at.CI = uint32(gi), uint32(ci)
	}
	id := core.DeviceID(required(a, "nvmlDeviceGetUUID", h.GetUUID))
	var was core.Device
	for _, l := range m.last {
		if l.device.ID == id {
			was = l.device
		}
	}
	found.device = core.Device{
		ID: id, At: at, Index: gpu.Index, PCI: gpu.PCI, NUMANode: gpu.NUMANode, Minor: gpu.Minor, Compute: gpu.Compute,
	}
	d := &found.device
	d.Memory = optional(a, "nvmlDeviceGetMemoryInfo", was.Memory, func() (uint64, nvml.Return) {
		m, ret := h.GetMemoryInfo()
		return m.Total, ret
	})
	name := strings.TrimSpace(optional(a, "nvmlDeviceGetName", was.Model, h.GetName))
	attributes := optional(a, "nvmlDeviceGetAttributes", nvml.DeviceAttributes{}, h.GetAttributes)
	d.Profile = m.profile(a, shape{id, at, name, attributes})
	d.Model = name
	if profileInName(name) == "" {
		d.Model = gpu.Model + " MIG " + d.Profile
	}
	return found, at, a.err
}

// profile names the profile of an instance in NVIDIA's spelling. The name ends with it; where it does
// not, the attributes give it. Neither need tell "+me", so the profile of the GPU instance is asked.
func (m migReader) profile(a *asker, of shape) string {
	if p, ok := m.profiles[of]; ok || a.err != nil {
		return p
	}
	p := cmp.Or(profileInName(of.name), profileOf(of.attributes, m.parent.device.Memory))
	if p != "" && !strings.ContainsAny(p, "+-") {
		p += readMedia(a, m.parent.handle, int(of.at.GI))
	}
	if a.err == nil {
		m.profiles[of] = p
	}
	return p
}

// readMedia is what the profile of a GPU instance says about media engines; "" if nothing or unknown.
func readMedia(a *asker, parent nvml.Device, gi int) string {
	instance := optional(a, "nvmlDeviceGetGpuInstanceById", nil, func() (nvml.GpuInstance, nvml.Return) {
		return parent.GetGpuInstanceById(gi)
	})
	if instance == nil {
		return ""
	}
	info := optional(a, "nvmlGpuInstanceGetInfo", nvml.GpuInstanceInfo{Id: core.Whole}, instance.GetInfo)
	if info.Id != uint32(gi) {
		return ""
	}
	for number := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		if media[number] == "" {
			continue
		}
		none := nvml.GpuInstanceProfileInfo{Id: core.Whole}
		profile := optional(a, "nvmlDeviceGetGpuInstanceProfileInfo", none, func() (nvml.GpuInstanceProfileInfo, nvml.Return) {
			return parent.GetGpuInstanceProfileInfo(number)
		})
		if profile.SliceCount > 0 && profile.Id == info.ProfileId {
			return media[number]
		}
	}
	return ""
}
