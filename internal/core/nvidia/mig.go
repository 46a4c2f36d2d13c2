package nvidia

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// migKey is what determines a MIG instance. A UUID alone does not: the driver may reuse it for another instance in the
// same place.
type migKey struct {
	id         gpu.DeviceID
	at         gpu.Placement
	name       string
	attributes nvml.DeviceAttributes
}

// migInfo is what is read once of an instance.
type migInfo struct {
	profile      string
	memory, bar1 uint64 // bytes
	memorySlices gpu.SliceRange
}

// migProfileCache is what was read about a GPU's MIG instances and need not be read again.
type migProfileCache struct {
	info  map[migKey]migInfo
	media map[uint32]string // suffix of each profile, by its number on this GPU (see mediaOfProfiles); nil = not read
}

// migReader reads the instances of one GPU.
type migReader struct {
	parent       nvmlDevice
	last         []nvmlDevice // the instances of the reading before
	capabilities migCapabilities
	cache        *migProfileCache // of the GPU's worker
}

const migHandle = "nvmlDeviceGetMigDeviceHandleByIndex"

// instanceSubject is what the calls are about that describe a MIG instance: see caller.
type instanceSubject struct {
	id gpu.DeviceID
	at gpu.Placement
}

// errNoProfile means that an instance can't be offered, as requests name the profile.
var errNoProfile = errors.New("the driver reports no profile of this MIG instance")

// read reads the MIG instances. One that can't be read becomes an exclusion, at its placement if that is known, else at
// the GPU's. An error that concerns the whole GPU or driver is the caller's.
func (m migReader) read(c *caller) (found []nvmlDevice, excluded []gpu.Exclusion) {
	slots := retained(c, "nvmlDeviceGetMaxMigDeviceCount", m.parent.handle.GetMaxMigDeviceCount)
	if isUnsupported(c.err) { // it is not known which instances there are: those of an earlier session may be
		parent := m.parent.device
		excluded = []gpu.Exclusion{{Index: parent.Index, At: parent.At, PCI: parent.PCI, Reason: c.err.Error()}}
		c.err = nil
		return nil, excluded
	}
	if c.err != nil {
		return nil, nil
	}
	var unanswered []nvmlDevice // instances that were there
	for i := range slots {
		calls := c.withPlacement(c.at)
		calls.subject = i
		wasEmpty, _ := lastAnswer[bool](calls, migHandle)
		instance, at, err := m.instance(calls, i)
		isEmpty := returnCode(err) == nvml.ERROR_NOT_FOUND && instance.handle == nil // no instance has this number
		if isEmpty || err == nil {
			calls.subject = i
			calls.remember(migHandle, isEmpty)
		}
		switch {
		case isEmpty, isUnsupported(err) && wasEmpty && instance.handle == nil:
		case isUnsupported(err) && m.lastWith(i, at) != nil:
			unanswered = append(unanswered, *m.lastWith(i, at))
		case isLost(err), isDriverLost(err), errors.Is(err, errQueryAbandoned):
			c.err = err
			return nil, nil
		case err != nil:
			excluded = append(excluded, gpu.Exclusion{
				Index: m.parent.device.Index, At: at, PCI: m.parent.device.PCI, Failure: failureOf(err), Reason: err.Error(),
			})
		default:
			d := &instance.device
			d.GICap, d.CICap = m.capabilities.of(d.Minor, d.At)
			found = append(found, instance)
		}
	}
	for _, last := range unanswered { // an instance that was there stays: see retained
		if !hasInstance(found, last.device.ID) {
			found = append(found, last)
		}
	}
	m.forgetOthers(c, found)
	return found, excluded
}

// lastWith returns the instance that had a number in the reading before; nil if there was none. at is its placement now
// if that was read.
func (m migReader) lastWith(number int, at gpu.Placement) *nvmlDevice {
	for i := range m.last {
		d := &m.last[i].device
		if d.Instance == number && (at == m.parent.device.At || at == d.At) {
			return &m.last[i]
		}
	}
	return nil
}

func hasInstance(all []nvmlDevice, id gpu.DeviceID) bool {
	return slices.ContainsFunc(all, func(d nvmlDevice) bool { return d.device.ID == id })
}

// forgetOthers removes what was read about instances that no longer exist.
func (m migReader) forgetOthers(c *caller, found []nvmlDevice) {
	maps.DeleteFunc(m.cache.info, func(k migKey, _ migInfo) bool { return !hasInstance(found, k.id) })
	maps.DeleteFunc(c.slot.answers, func(k answerKey, _ any) bool {
		instance, ok := k.subject.(instanceSubject)
		return ok && !hasInstance(found, instance.id)
	})
}

// instance reads the instance with a number on its GPU. at is its placement as far as it was read.
func (m migReader) instance(c *caller, number int) (found nvmlDevice, at gpu.Placement, err error) {
	parent := m.parent.device
	at = parent.At
	h := required(c, migHandle, func() (nvml.Device, nvml.Return) {
		return m.parent.handle.GetMigDeviceHandleByIndex(number)
	})
	if c.err != nil {
		return nvmlDevice{}, at, c.err
	}
	found.handle = h
	gi := required(c, "nvmlDeviceGetGpuInstanceId", h.GetGpuInstanceId)
	ci := required(c, "nvmlDeviceGetComputeInstanceId", h.GetComputeInstanceId)
	if c.err == nil {
		at.GI, at.CI = uint32(gi), uint32(ci)
	}
	id := identifying(c, required(c, "nvmlDeviceGetUUID", uuidOf(h)))
	found.device = instanceOf(parent)
	d := &found.device
	d.ID, d.At, d.Instance = id, at, number
	m.describe(c, h, d)
	if c.err == nil && d.Profile == "" {
		c.err = errNoProfile
	}
	return found, at, c.err
}

// instanceOf is a MIG instance with the properties of its GPU. It has no NVLinks, and no power limit, as the GPU's
// limit applies to all instances together.
func instanceOf(d gpu.Device) gpu.Device {
	return gpu.Device{
		Index: d.Index, PCI: d.PCI, PCIeRoot: d.PCIeRoot, NUMANode: d.NUMANode, Minor: d.Minor, Serial: d.Serial,
		Compute: d.Compute, Architecture: d.Architecture, Brand: d.Brand, ECC: d.ECC,
		CoreClock: d.CoreClock, MemoryClock: d.MemoryClock, PCIeGen: d.PCIeGen, PCIeWidth: d.PCIeWidth,
		DisplayState: d.DisplayState, PersistenceMode: d.PersistenceMode, AddressingMode: d.AddressingMode,
	}
}

// describe reads name, profile, memory and slices of an instance whose UUID and placement are known. If the name or the
// attributes are not answered, all stays as it was.
func (m migReader) describe(c *caller, h nvml.Device, d *gpu.Device) {
	c.fellBack = false
	c.subject = instanceSubject{d.ID, d.At}
	key := migKey{id: d.ID, at: d.At}
	key.name = optional(c, "nvmlDeviceGetName", "", textOf(h.GetName))
	key.attributes = optional(c, "nvmlDeviceGetAttributes", nvml.DeviceAttributes{}, h.GetAttributes)
	for _, l := range m.last {
		if last := l.device; c.fellBack && last.ID == d.ID && last.At == d.At {
			d.Model, d.Profile, d.Memory, d.BAR1 = last.Model, last.Profile, last.Memory, last.BAR1
			d.Slices, d.MemorySlices = last.Slices, last.MemorySlices
			return
		}
	}
	info := m.infoOf(c, h, key)
	d.Profile, d.Memory, d.BAR1 = info.profile, info.memory, info.bar1
	d.Slices, d.MemorySlices = slicesFrom(key.attributes), info.memorySlices
	d.Model = key.name
	if profileInName(key.name) == "" {
		d.Model = m.parent.device.Model + " MIG " + d.Profile
	}
}

// infoOf reads profile and memory of an instance, unless they are cached. The profile is at the end of the instance's
// name; in a name without it, it is computed from the attributes. Either may lack the suffix ("+me"), which then comes
// from the profile number of the GPU instance. NVML returns that instance only to privileged users.
func (m migReader) infoOf(c *caller, h nvml.Device, key migKey) migInfo {
	if info, ok := m.cache.info[key]; ok || c.err != nil {
		return info
	}
	info := migInfo{profile: cmp.Or(profileInName(key.name), profileOf(key.attributes, m.parent.device.Memory))}
	if gi, known := m.readGPUInstance(c, key.at.GI); known {
		if info.profile != "" && !strings.ContainsAny(info.profile, "+-") {
			info.profile += m.mediaOfProfiles(c)[gi.ProfileId]
		}
		info.memorySlices = gpu.SliceRange{First: int(gi.Placement.Start), Count: int(gi.Placement.Size)}
	}
	info.memory = optional(c, "nvmlDeviceGetMemoryInfo", key.attributes.MemorySizeMB<<20, converted(h.GetMemoryInfo, memoryTotal))
	info.bar1 = optional(c, "nvmlDeviceGetBAR1MemoryInfo", 0, converted(h.GetBAR1MemoryInfo, bar1Total))
	if c.err == nil && !c.fellBack {
		if m.cache.info == nil {
			m.cache.info = map[migKey]migInfo{}
		}
		m.cache.info[key] = info
	}
	return info
}

// readGPUInstance reads profile number and placement of a GPU instance; false if they are unknown.
func (m migReader) readGPUInstance(c *caller, gi uint32) (info nvml.GpuInstanceInfo, known bool) {
	instance := optional(c, "nvmlDeviceGetGpuInstanceById", nil, func() (nvml.GpuInstance, nvml.Return) {
		return m.parent.handle.GetGpuInstanceById(int(gi))
	})
	if instance == nil {
		return info, false
	}
	info = optional(c, "nvmlGpuInstanceGetInfo", nvml.GpuInstanceInfo{Id: gpu.Whole}, instance.GetInfo)
	return info, c.err == nil && info.Id == gi
}

// mediaOfProfiles is the suffix of each profile of the GPU, by the profile's number on this GPU. NVML numbers the kinds
// of profiles (NVML_GPU_INSTANCE_PROFILE_*), and each GPU model numbers its own profiles differently.
func (m migReader) mediaOfProfiles(c *caller) map[uint32]string {
	if m.cache.media != nil {
		return m.cache.media
	}
	all := map[uint32]string{}
	before := c.fellBack
	c.fellBack = false
	subject := c.subject
	defer func() { c.subject = subject }()
	for _, number := range slices.Sorted(maps.Keys(media)) {
		c.subject = number
		none := nvml.GpuInstanceProfileInfo{Id: gpu.Whole}
		profile := optional(c, "nvmlDeviceGetGpuInstanceProfileInfo", none, func() (nvml.GpuInstanceProfileInfo, nvml.Return) {
			return m.parent.handle.GetGpuInstanceProfileInfo(number)
		})
		if profile.SliceCount > 0 {
			all[profile.Id] = media[number]
		}
	}
	if c.err == nil && !c.fellBack {
		m.cache.media = all
	}
	c.fellBack = c.fellBack || before
	return all
}

func slicesFrom(a nvml.DeviceAttributes) gpu.Slices {
	return gpu.Slices{
		GPU: int(a.GpuInstanceSliceCount), Compute: int(a.ComputeInstanceSliceCount),
		Multiprocessors: int(a.MultiprocessorCount), CopyEngines: int(a.SharedCopyEngineCount),
		Decoders: int(a.SharedDecoderCount), Encoders: int(a.SharedEncoderCount),
		JPEGDecoders: int(a.SharedJpegCount), OFAs: int(a.SharedOfaCount),
	}
}
