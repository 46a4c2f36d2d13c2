package nvidia

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// cString is the text of a C array up to its first NUL.
func cString(b []int8) string {
	var s strings.Builder
	for _, c := range b {
		if c == 0 {
			break
		}
		s.WriteByte(byte(c))
	}
	return s.String()
}

// pciAddress parses the PCI address in busId, or in busIdLegacy, which is all that nvmlDeviceGetPciInfo (v1) fills.
func pciAddress(p nvml.PciInfo) (gpu.PCIAddress, error) {
	s := cString(p.BusId[:])
	if s == "" {
		s = cString(p.BusIdLegacy[:])
	}
	return gpu.ParsePCIAddress(s)
}

// cudaVersion formats NVML's 12080 as "12.8"; "" for 0.
func cudaVersion(v int) string {
	if v <= 0 {
		return ""
	}
	return fmt.Sprintf("%d.%d", v/1000, v%1000/10)
}

func widen(v uint32) uint64                         { return uint64(v) }
func memoryTotal(m nvml.Memory) uint64              { return m.Total }
func bar1Total(m nvml.BAR1Memory) uint64            { return m.Bar1Total }
func brand(b nvml.BrandType) string                 { return brands[b] }
func architecture(a nvml.DeviceArchitecture) string { return architectures[a] }
func addressingMode(m nvml.DeviceAddressingMode) string {
	return addressingModes[nvml.DeviceAddressingModeType(m.Value)]
}

func toggle(e nvml.EnableState) gpu.Toggle {
	if e == nvml.FEATURE_ENABLED {
		return gpu.Enabled
	}
	return gpu.Disabled
}

// architectures are nvidia-smi's names of nvmlDeviceArchitecture_t; a value that nvml.h of this version does not name has
// none.
var architectures = map[nvml.DeviceArchitecture]string{
	nvml.DEVICE_ARCH_KEPLER: "Kepler", nvml.DEVICE_ARCH_MAXWELL: "Maxwell", nvml.DEVICE_ARCH_PASCAL: "Pascal",
	nvml.DEVICE_ARCH_VOLTA: "Volta", nvml.DEVICE_ARCH_TURING: "Turing", nvml.DEVICE_ARCH_AMPERE: "Ampere",
	nvml.DEVICE_ARCH_ADA: "Ada Lovelace", nvml.DEVICE_ARCH_HOPPER: "Hopper", nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
	nvml.DEVICE_ARCH_RUBIN: "Rubin",
}

// addressingModes are nvidia-smi's names of nvmlDeviceAddressingModeType_t.
var addressingModes = map[nvml.DeviceAddressingModeType]string{
	nvml.DEVICE_ADDRESSING_MODE_NONE: "None", nvml.DEVICE_ADDRESSING_MODE_HMM: "HMM", nvml.DEVICE_ADDRESSING_MODE_ATS: "ATS",
}

// brands are nvidia-smi's names of nvmlBrandType_t; those of vGPU types are from the comments in nvml.h.
var brands = map[nvml.BrandType]string{
	nvml.BRAND_QUADRO: "Quadro", nvml.BRAND_TESLA: "Tesla", nvml.BRAND_NVS: "NVS", nvml.BRAND_GRID: "GRID",
	nvml.BRAND_GEFORCE: "GeForce", nvml.BRAND_TITAN: "Titan", nvml.BRAND_NVIDIA_VAPPS: "NVIDIA Virtual Applications",
	nvml.BRAND_NVIDIA_VPC: "NVIDIA Virtual PC", nvml.BRAND_NVIDIA_VCS: "NVIDIA vGPU for Compute",
	nvml.BRAND_NVIDIA_VWS: "NVIDIA RTX Virtual Workstation", nvml.BRAND_NVIDIA_CLOUD_GAMING: "NVIDIA Cloud Gaming",
	nvml.BRAND_QUADRO_RTX: "Quadro RTX", nvml.BRAND_NVIDIA_RTX: "NVIDIA RTX", nvml.BRAND_NVIDIA: "NVIDIA",
	nvml.BRAND_GEFORCE_RTX: "GeForce RTX", nvml.BRAND_TITAN_RTX: "Titan RTX",
}

// nvlinkGeneration is the generation of an NVLink by nvmlNvlinkVersion_t; a version that is not listed is unknown.
var nvlinkGeneration = map[uint32]gpu.NVLinkGeneration{
	1: 1,       // 1.0
	2: 2, 3: 2, // 2.0, 2.2
	4: 3, 5: 3, // 3.0, 3.1
	6: 4, 7: 5, 8: 6,
}

// pciePath is the path between two GPUs by NVML's nearest common ancestor; a level that is not listed is gpu.PathUnknown.
var pciePath = map[nvml.GpuTopologyLevel]gpu.PCIePath{
	nvml.TOPOLOGY_INTERNAL: gpu.PathBoard, nvml.TOPOLOGY_SINGLE: gpu.PathSingleSwitch,
	nvml.TOPOLOGY_MULTIPLE: gpu.PathMultiSwitch, nvml.TOPOLOGY_HOSTBRIDGE: gpu.PathHostBridge,
	nvml.TOPOLOGY_NODE: gpu.PathNUMA, nvml.TOPOLOGY_SYSTEM: gpu.PathSystem,
}

var migName = regexp.MustCompile(` MIG ((?:[1-9]\d?c\.)?[1-9]\d?g\.[1-9]\d*gb(?:[+-][a-z][a-z.,]*)?)$`)

// profileInName is the profile that ends the NVML name of a MIG instance ("NVIDIA A100-SXM4-40GB MIG
// 1c.3g.20gb"); "" if there is none.
func profileInName(name string) string {
	if m := migName.FindStringSubmatch(name); m != nil {
		return m[1]
	}
	return ""
}

// profileOf is the profile of an instance by its slices and its part of the GPU's memory (bytes). NVIDIA counts
// memory in eighths of the GPU, rounded up, of its size in whole GiB, rounded up: an instance with 4864 of 40960 MiB is
// a 5gb one. "" if the attributes are unknown.
func profileOf(a nvml.DeviceAttributes, gpuMemory uint64) string {
	c, g := a.ComputeInstanceSliceCount, a.GpuInstanceSliceCount
	const gib = 1 << 30
	size := (gpuMemory + gib - 1) / gib
	if g == 0 || size == 0 || a.MemorySizeMB == 0 {
		return ""
	}
	eighths := (a.MemorySizeMB<<20*8 + gpuMemory - 1) / gpuMemory
	gb := (eighths*size + 4) / 8
	if c == g || c == 0 {
		return fmt.Sprintf("%dg.%dgb", g, gb)
	}
	return fmt.Sprintf("%dc.%dg.%dgb", c, g, gb)
}

// media is the suffix of a profile's name, for its media and graphics engines, by NVML_GPU_INSTANCE_PROFILE_*.
var media = map[int]string{
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1:   "+me",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:   "+me",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "+me.all",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "+me.all",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME:  "-me",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:  "-me",
}
