package record

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// profile is a MIG profile, by the keys of machine files.
type profile struct {
	name                 string
	giProfile, giID      int // NVML_GPU_INSTANCE_PROFILE_*, and its number on this GPU
	ciProfile, ciID      int
	slices, compute      int // compute: of a compute instance that is a part of its GPU instance; 0 = all of it
	size, max            int // memory slices, instances
	memory               uint64
	multiprocessors      int
	copies, dec, enc     int
	jpegs, ofas          int
	ciGuessed, sizeGuess bool // no instance has it, and the driver has no function for it
}

// suffixes are the parts of profile names that NVML has as kinds of profiles.
var suffixes = map[int]string{
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1: "+me", nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1: "+me",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX: "+gfx", nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX: "+gfx", nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX: "+gfx",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME: "-me", nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME: "-me",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "+me.all", nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "+me.all",
}

// computeProfiles are the compute instance profiles (NVML_COMPUTE_INSTANCE_PROFILE_*) that have all slices of a GPU instance.
var computeProfiles = map[int]int{1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}

// readProfiles reads the profiles of the first GPU that has a MIG mode. All GPUs of a machine file have the same.
func (m *machine) readProfiles() {
	const function = "nvmlDeviceGetGpuInstanceProfileInfo"
	i := slices.IndexFunc(m.gpus, func(g GPU) bool { return g.Values["mig"] != "" })
	if i < 0 || !m.has(function) {
		return
	}
	memory, ret := m.handles[i].GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return
	}
	for kind := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := m.handles[i].GetGpuInstanceProfileInfo(kind)
		if m.note(m.gpus[i].Index, "profile", fmt.Sprintf("%s(%d)", function, kind), fmt.Sprintf("%d slices, %d MiB", info.SliceCount, info.MemorySizeMB), ret); ret != nvml.SUCCESS {
			continue
		}
		p := profile{
			giProfile: kind, giID: int(info.Id), slices: int(info.SliceCount), max: int(info.InstanceCount), memory: info.MemorySizeMB << 20,
			multiprocessors: int(info.MultiprocessorCount), copies: int(info.CopyEngineCount), dec: int(info.DecoderCount),
			enc: int(info.EncoderCount), jpegs: int(info.JpegCount), ofas: int(info.OfaCount),
		}
		p.ciProfile, p.ciGuessed = computeProfiles[p.slices], true
		p.ciID = p.ciProfile
		m.profiles = append(m.profiles, p)
	}
	m.measureProfiles(i, memory.Total)
}

// measureProfiles sets sizes, names and the number of instances of a whole GPU.
func (m *machine) measureProfiles(i int, total uint64) {
	slicesOfGPU := 8
	if n := slices.IndexFunc(m.profiles, func(p profile) bool { return p.giProfile == nvml.GPU_INSTANCE_PROFILE_1_SLICE }); n >= 0 {
		if m.profiles[n].max == 4 {
			slicesOfGPU = 4
		}
		for j := range m.gpus {
			if g := m.gpus[j]; g.Values["mig"] != "" {
				g.Values["max_mig"] = decimal(m.profiles[n].max)
				if slicesOfGPU != 8 {
					g.Values["mig_slices"] = decimal(slicesOfGPU)
				}
			}
		}
	}
	placements := m.has("nvmlDeviceGetGpuInstancePossiblePlacements_v2", "nvmlDeviceGetGpuInstancePossiblePlacements")
	for j := range m.profiles {
		p := &m.profiles[j]
		p.size, p.sizeGuess = int(math.Round(float64(p.memory)/float64(total)*float64(slicesOfGPU))), true
		if placements {
			info := nvml.GpuInstanceProfileInfo{Id: uint32(p.giID), InstanceCount: uint32(p.max)}
			if at, ret := m.handles[i].GetGpuInstancePossiblePlacements(&info); ret == nvml.SUCCESS && len(at) > 0 {
				p.size, p.sizeGuess = int(at[0].Size), false
			}
		}
		gib := math.Ceil(float64(total) / (1 << 30))
		p.name = fmt.Sprintf("%dg.%dgb%s", p.slices, int(math.Round(float64(p.size)*gib/float64(slicesOfGPU))), suffixes[p.giProfile])
	}
}

// readInstances reads the MIG instances of a GPU.
func (m *machine) readInstances(i int) {
	g, h := &m.gpus[i], m.handles[i]
	if g.Values["mig"] != "yes" || !m.has("nvmlDeviceGetMigDeviceHandleByIndex") {
		return
	}
	count, ret := h.GetMaxMigDeviceCount()
	if m.note(g.Index, "max_mig", "nvmlDeviceGetMaxMigDeviceCount", decimal(count), ret); ret != nvml.SUCCESS {
		return
	}
	g.Values["max_mig"] = decimal(count)
	for index := range count {
		instance, ret := h.GetMigDeviceHandleByIndex(index)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		line := ""
		if ret == nvml.SUCCESS {
			line, ret = m.instance(h, instance)
		}
		m.note(g.Index, "instance", fmt.Sprintf("nvmlDeviceGetMigDeviceHandleByIndex(%d)", index), line, ret)
		if ret != nvml.SUCCESS {
			continue
		}
		if index != len(g.Instances) {
			line += fmt.Sprint(" index=", index)
		}
		g.Instances = append(g.Instances, line)
	}
}

// instance is a line of a MIG instance: "1g.10gb gi=7 ci=0 start=0 uuid=MIG-...".
func (m *machine) instance(parent, h nvml.Device) (string, nvml.Return) {
	gi, ret := h.GetGpuInstanceId()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	ci, ret := h.GetComputeInstanceId()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	uuid, ret := h.GetUUID()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	var info nvml.GpuInstanceInfo
	if instance, ret := parent.GetGpuInstanceById(gi); ret != nvml.SUCCESS {
		return "", ret
	} else if info, ret = instance.GetInfo(); ret != nvml.SUCCESS {
		return "", ret
	} else {
		m.readComputeProfile(instance, info, ci)
	}
	attributes, ret := h.GetAttributes()
	if ret != nvml.SUCCESS {
		return "", ret
	}
	p, ok := m.profileOf(info, attributes)
	if !ok {
		return "", nvml.ERROR_NOT_FOUND
	}
	line := fmt.Sprintf("%s gi=%d ci=%d start=%d uuid=%s", p.name, gi, ci, info.Placement.Start, strings.TrimSpace(uuid))
	if used, ret := h.GetMemoryInfo(); ret == nvml.SUCCESS && used.Used > 0 {
		line += fmt.Sprint(" used=", used.Used)
	}
	if used, ret := h.GetBAR1MemoryInfo(); ret == nvml.SUCCESS && used.Bar1Used > 0 {
		line += fmt.Sprint(" bar1_used=", used.Bar1Used)
	}
	return line, nvml.SUCCESS
}

// readComputeProfile sets the compute profile and the size of a profile that an instance has.
func (m *machine) readComputeProfile(instance nvml.GpuInstance, info nvml.GpuInstanceInfo, ci int) {
	n := slices.IndexFunc(m.profiles, func(p profile) bool { return p.giID == int(info.ProfileId) && p.compute == 0 })
	if n < 0 {
		return
	}
	m.profiles[n].size, m.profiles[n].sizeGuess = int(info.Placement.Size), false
	if !m.has("nvmlComputeInstanceGetInfo_v2") {
		return
	}
	compute, ret := instance.GetComputeInstanceById(ci)
	if ret != nvml.SUCCESS {
		return
	}
	got, ret := compute.GetInfo()
	if ret == nvml.SUCCESS && int(got.Placement.Size) == m.profiles[n].slices {
		m.profiles[n].ciID, m.profiles[n].ciGuessed = int(got.ProfileId), false
	}
}

// profileOf is the profile of an instance. One with a part of its GPU instance gets a profile of its own.
func (m *machine) profileOf(info nvml.GpuInstanceInfo, a nvml.DeviceAttributes) (profile, bool) {
	part := 0
	if a.ComputeInstanceSliceCount < a.GpuInstanceSliceCount {
		part = int(a.ComputeInstanceSliceCount)
	}
	n := slices.IndexFunc(m.profiles, func(p profile) bool { return p.giID == int(info.ProfileId) && p.compute == part })
	if n >= 0 {
		return m.profiles[n], true
	}
	n = slices.IndexFunc(m.profiles, func(p profile) bool { return p.giID == int(info.ProfileId) })
	if n < 0 {
		return profile{}, false
	}
	p := m.profiles[n]
	p.name, p.compute, p.multiprocessors = fmt.Sprintf("%dc.%s", part, p.name), part, int(a.MultiprocessorCount)
	p.ciProfile = computeProfiles[part]
	p.ciID = p.ciProfile
	m.profiles = append(m.profiles, p)
	return p, true
}
