package nvidia

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// shape is everything that decides what a MIG instance is. The driver may give a UUID again to another
// instance in the same place, so the UUID alone does not.
type shape struct {
	id         core.DeviceID
	at         core.Placement
	name       string
	attributes nvml.DeviceAttributes
}

// form is what an instance of a shape is.
type form struct {
	profile      string
	memory, bar1 uint64 // bytes
}

// menu is what a GPU has said about MIG profiles and need not say again.
type menu struct {
	forms map[shape]form
	media map[uint32]string // what each profile says about media engines, by its number in this GPU; nil = not read
}

// migReader reads the instances of one GPU. It runs in the GPU's lane.
type migReader struct {
	parent held
	last   []held // the instances of the last reading
	caps   capabilities
	menu   *menu // the lane's
}

// errNoProfile says that an instance can't be offered, as nobody could ask for it.
var errNoProfile = errors.New("the driver tells no profile of this MIG instance")

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
				Index: m.parent.device.Index, At: at, PCI: m.parent.device.PCI, Failure: failureOf(err), Reason: err.Error(),
			})
		default:
			d := &instance.device
			d.GICap, d.CICap = m.caps.of(d.Minor, d.At)
			found = append(found, instance)
		}
	}
	maps.DeleteFunc(m.menu.forms, func(of shape, _ form) bool { // those of former layouts
		return !slices.ContainsFunc(found, func(f held) bool { return f.device.ID == of.id })
	})
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
	found.device = partOf(gpu)
	d := &found.device
	d.ID, d.At, d.Instance = id, at, i
	m.describe(a, h, d)
	if a.err == nil && d.Profile == "" {
		a.err = errNoProfile
	}
	return found, at, a.err
}

// partOf is a MIG instance with what it has in common with its GPU. It has no NVLinks, and no limit of power, as
// that of the GPU is for all instances together.
func partOf(gpu core.Device) core.Device {
	return core.Device{
		Index: gpu.Index, PCI: gpu.PCI, NUMANode: gpu.NUMANode, Minor: gpu.Minor, Serial: gpu.Serial,
		Compute: gpu.Compute, Architecture: gpu.Architecture, Brand: gpu.Brand, ECC: gpu.ECC,
		CoreClock: gpu.CoreClock, MemoryClock: gpu.MemoryClock, PCIeGen: gpu.PCIeGen, PCIeWidth: gpu.PCIeWidth,
		DisplayState: gpu.DisplayState, PersistenceMode: gpu.PersistenceMode,
	}
}

// describe completes an instance that is known by UUID and place: profile, memory, slices.
func (m migReader) describe(a *asker, h nvml.Device, d *core.Device) {
	a.kept = false
	of := shape{id: d.ID, at: d.At}
	of.name = strings.TrimSpace(optional(a, "nvmlDeviceGetName", "", h.GetName))
	of.attributes = optional(a, "nvmlDeviceGetAttributes", nvml.DeviceAttributes{}, h.GetAttributes)
	for _, l := range m.last {
		if was := l.device; a.kept && was.ID == d.ID && was.At == d.At {
			d.Model, d.Profile, d.Memory, d.BAR1, d.Slices = was.Model, was.Profile, was.Memory, was.BAR1, was.Slices
			return
		}
	}
	f := m.form(a, h, of)
	d.Profile, d.Memory, d.BAR1, d.Slices = f.profile, f.memory, f.bar1, slicesOf(of.attributes)
	d.Model = of.name
	if profileInName(of.name) == "" {
		d.Model = m.parent.device.Model + " MIG " + d.Profile
	}
}

// form finds out what an instance of a shape is. The name of an instance ends with its profile, in NVIDIA's
// spelling; where it does not, the attributes give it. Neither need tell "+me", so the profile of the GPU instance
// is asked.
func (m migReader) form(a *asker, h nvml.Device, of shape) form {
	if f, ok := m.menu.forms[of]; ok || a.err != nil {
		return f
	}
	f := form{profile: cmp.Or(profileInName(of.name), profileOf(of.attributes, m.parent.device.Memory))}
	if f.profile != "" && !strings.ContainsAny(f.profile, "+-") {
		f.profile += m.readMedia(a, of.at.GI)
	}
	f.memory = optional(a, "nvmlDeviceGetMemoryInfo", of.attributes.MemorySizeMB<<20, func() (uint64, nvml.Return) {
		m, ret := h.GetMemoryInfo()
		return m.Total, ret
	})
	f.bar1 = optional(a, "nvmlDeviceGetBAR1MemoryInfo", 0, func() (uint64, nvml.Return) {
		m, ret := h.GetBAR1MemoryInfo()
		return m.Bar1Total, ret
	})
	if a.err == nil && !a.kept {
		if m.menu.forms == nil {
			m.menu.forms = map[shape]form{}
		}
		m.menu.forms[of] = f
	}
	return f
}

// readMedia is what the profile of a GPU instance says about media engines; "" if nothing or unknown.
func (m migReader) readMedia(a *asker, gi uint32) string {
	instance := optional(a, "nvmlDeviceGetGpuInstanceById", nil, func() (nvml.GpuInstance, nvml.Return) {
		return m.parent.handle.GetGpuInstanceById(int(gi))
	})
	if instance == nil {
		return ""
	}
	info := optional(a, "nvmlGpuInstanceGetInfo", nvml.GpuInstanceInfo{Id: core.Whole}, instance.GetInfo)
	if info.Id != gi {
		return ""
	}
	return m.mediaOfProfiles(a)[info.ProfileId]
}

// mediaOfProfiles is what each profile of the GPU says about media engines. NVML has a number for each kind of
// profile, and each GPU numbers those that it has in its own way.
func (m migReader) mediaOfProfiles(a *asker) map[uint32]string {
	if m.menu.media != nil {
		return m.menu.media
	}
	all := map[uint32]string{}
	before := a.kept
	a.kept = false
	for _, number := range slices.Sorted(maps.Keys(media)) {
		none := nvml.GpuInstanceProfileInfo{Id: core.Whole}
		profile := optional(a, "nvmlDeviceGetGpuInstanceProfileInfo", none, func() (nvml.GpuInstanceProfileInfo, nvml.Return) {
			return m.parent.handle.GetGpuInstanceProfileInfo(number)
		})
		if profile.SliceCount > 0 {
			all[profile.Id] = media[number]
		}
	}
	if a.err == nil && !a.kept {
		m.menu.media = all
	}
	a.kept = a.kept || before
	return all
}

// slicesOf is what the attributes of an instance say that it has.
func slicesOf(a nvml.DeviceAttributes) core.Slices {
	return core.Slices{
		GPU: int(a.GpuInstanceSliceCount), Compute: int(a.ComputeInstanceSliceCount),
		Multiprocessors: int(a.MultiprocessorCount), CopyEngines: int(a.SharedCopyEngineCount),
		Decoders: int(a.SharedDecoderCount), Encoders: int(a.SharedEncoderCount),
		JPEGDecoders: int(a.SharedJpegCount), OFAs: int(a.SharedOfaCount),
	}
}
