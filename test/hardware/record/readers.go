package record

import (
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

const pciInfo = "nvmlDeviceGetPciInfo_v3 nvmlDeviceGetPciInfo_v2 nvmlDeviceGetPciInfo"

// address is a PCI address as sysfs has it: "0000:1b:00.0".
func address(p nvml.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device)
}

var identityKeys = []key{
	of("name", "nvmlDeviceGetName", nvml.Device.GetName, strings.TrimSpace),
	of("uuid", "nvmlDeviceGetUUID", nvml.Device.GetUUID, strings.TrimSpace),
	of("pci", pciInfo, nvml.Device.GetPciInfo, address),
	of("serial", "nvmlDeviceGetSerial", nvml.Device.GetSerial, strings.TrimSpace),
	of("vbios", "nvmlDeviceGetVbiosVersion", nvml.Device.GetVbiosVersion, strings.TrimSpace),
	of("minor", "nvmlDeviceGetMinorNumber", nvml.Device.GetMinorNumber, decimal),
	of("brand", "nvmlDeviceGetBrand", nvml.Device.GetBrand, word(brands)),
	of("arch", "nvmlDeviceGetArchitecture", nvml.Device.GetArchitecture, word(architectures)),
	of("addressing_mode", "nvmlDeviceGetAddressingMode", nvml.Device.GetAddressingMode, func(m nvml.DeviceAddressingMode) string { return decimal(m.Value) }),
	of("compute", "nvmlDeviceGetCudaComputeCapability", func(d nvml.Device) ([2]int, nvml.Return) {
		major, minor, ret := d.GetCudaComputeCapability()
		return [2]int{major, minor}, ret
	}, func(v [2]int) string { return fmt.Sprintf("%d.%d", v[0], v[1]) }),
	of("pci_device", pciInfo, nvml.Device.GetPciInfo, func(p nvml.PciInfo) string { return fmt.Sprintf("0x%08X", p.PciDeviceId) }),
	of("pci_subsystem", pciInfo, nvml.Device.GetPciInfo, func(p nvml.PciInfo) string { return fmt.Sprintf("0x%08X", p.PciSubSystemId) }),
	of("cores", "nvmlDeviceGetNumGpuCores", nvml.Device.GetNumGpuCores, decimal),
	of("board_id", "nvmlDeviceGetBoardId", nvml.Device.GetBoardId, hexadecimal),
	of("module_id", "nvmlDeviceGetModuleId", nvml.Device.GetModuleId, decimal),
	of("virtualization", "nvmlDeviceGetVirtualizationMode", nvml.Device.GetVirtualizationMode, word(virtualizations)),
}

var memoryKeys = []key{
	of("memory", "nvmlDeviceGetMemoryInfo", nvml.Device.GetMemoryInfo, func(m nvml.Memory) string { return mebibytes(m.Total) }),
	of("memory_reserved", "nvmlDeviceGetMemoryInfo_v2", nvml.Device.GetMemoryInfo_v2, func(m nvml.Memory_v2) string { return mebibytes(m.Reserved) }),
	of("memory_used", "nvmlDeviceGetMemoryInfo_v2", nvml.Device.GetMemoryInfo_v2, func(m nvml.Memory_v2) string { return mebibytes(m.Used) }),
	of("memory_bus_width", "nvmlDeviceGetMemoryBusWidth", nvml.Device.GetMemoryBusWidth, decimal),
	of("bar1", "nvmlDeviceGetBAR1MemoryInfo", nvml.Device.GetBAR1MemoryInfo, func(m nvml.BAR1Memory) string { return mebibytes(m.Bar1Total) }),
	of("bar1_used", "nvmlDeviceGetBAR1MemoryInfo", nvml.Device.GetBAR1MemoryInfo, func(m nvml.BAR1Memory) string { return mebibytes(m.Bar1Used) }),
}

// clockKey is a present or a maximum clock rate.
func clockKey(name string, kind nvml.ClockType) key {
	if strings.HasPrefix(name, "max_") {
		return with(name, "nvmlDeviceGetMaxClockInfo", fmt.Sprint(kind), kind, nvml.Device.GetMaxClockInfo, megahertz)
	}
	return with(name, "nvmlDeviceGetClockInfo", fmt.Sprint(kind), kind, nvml.Device.GetClockInfo, megahertz)
}

// constraint is a limit of the power limit.
func constraint(name string, highest bool) key {
	return of(name, "nvmlDeviceGetPowerManagementLimitConstraints", func(d nvml.Device) (uint32, nvml.Return) {
		low, high, ret := d.GetPowerManagementLimitConstraints()
		if highest {
			return high, ret
		}
		return low, ret
	}, watts)
}

func threshold(name string, kind nvml.TemperatureThresholds) key {
	return with(name, "nvmlDeviceGetTemperatureThreshold", fmt.Sprint(kind), kind, nvml.Device.GetTemperatureThreshold, celsius)
}

var powerKeys = []key{
	of("power_limit", "nvmlDeviceGetPowerManagementLimit", nvml.Device.GetPowerManagementLimit, watts),
	of("power_limit_default", "nvmlDeviceGetPowerManagementDefaultLimit", nvml.Device.GetPowerManagementDefaultLimit, watts),
	constraint("power_limit_min", false),
	constraint("power_limit_max", true),
	of("power_usage", "nvmlDeviceGetPowerUsage", nvml.Device.GetPowerUsage, watts),
	of("energy", "nvmlDeviceGetTotalEnergyConsumption", nvml.Device.GetTotalEnergyConsumption, func(v uint64) string { return fmt.Sprint(v, " mJ") }),
	clockKey("clock_graphics", nvml.CLOCK_GRAPHICS), clockKey("clock_sm", nvml.CLOCK_SM), clockKey("clock_memory", nvml.CLOCK_MEM),
	clockKey("clock_video", nvml.CLOCK_VIDEO),
	clockKey("max_clock_graphics", nvml.CLOCK_GRAPHICS), clockKey("max_clock_sm", nvml.CLOCK_SM), clockKey("max_clock_memory", nvml.CLOCK_MEM),
	clockKey("max_clock_video", nvml.CLOCK_VIDEO),
	with("temperature", "nvmlDeviceGetTemperature", "GPU", nvml.TEMPERATURE_GPU, nvml.Device.GetTemperature, celsius),
	of("margin_temperature", "nvmlDeviceGetMarginTemperature", nvml.Device.GetMarginTemperature, func(v nvml.MarginTemperature) string {
		if v.MarginTemperature < 0 {
			return "" // machine files have no negative numbers
		}
		return celsius(v.MarginTemperature)
	}),
	threshold("slowdown_temperature", nvml.TEMPERATURE_THRESHOLD_SLOWDOWN), threshold("shutdown_temperature", nvml.TEMPERATURE_THRESHOLD_SHUTDOWN),
	of("fan", "nvmlDeviceGetFanSpeed", nvml.Device.GetFanSpeed, decimal),
	of("pstate", "nvmlDeviceGetPerformanceState", nvml.Device.GetPerformanceState, decimal),
}

var pcieKeys = []key{
	of("pcie_gen", "nvmlDeviceGetCurrPcieLinkGeneration", nvml.Device.GetCurrPcieLinkGeneration, decimal),
	of("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", nvml.Device.GetCurrPcieLinkWidth, decimal),
	of("max_pcie_gen", "nvmlDeviceGetMaxPcieLinkGeneration", nvml.Device.GetMaxPcieLinkGeneration, decimal),
	of("max_pcie_width", "nvmlDeviceGetMaxPcieLinkWidth", nvml.Device.GetMaxPcieLinkWidth, decimal),
	of("gpu_max_pcie_gen", "nvmlDeviceGetGpuMaxPcieLinkGeneration", nvml.Device.GetGpuMaxPcieLinkGeneration, decimal),
	of("pcie_replays", "nvmlDeviceGetPcieReplayCounter", nvml.Device.GetPcieReplayCounter, decimal),
	with("pcie_tx", "nvmlDeviceGetPcieThroughput", "TX", nvml.PCIE_UTIL_TX_BYTES, nvml.Device.GetPcieThroughput, decimal),
	with("pcie_rx", "nvmlDeviceGetPcieThroughput", "RX", nvml.PCIE_UTIL_RX_BYTES, nvml.Device.GetPcieThroughput, decimal),
}

// both returns the two values of a function that has a present and a pending one.
func both[T integer](name, function string, call func(nvml.Device) (current, pending T, ret nvml.Return)) []key {
	return []key{
		of(name, function, func(d nvml.Device) (T, nvml.Return) { v, _, ret := call(d); return v, ret }, flag),
		of(name+"_pending", function, func(d nvml.Device) (T, nvml.Return) { _, v, ret := call(d); return v, ret }, flag),
	}
}

var modeKeys = slices.Concat([]key{
	of("display_mode", "nvmlDeviceGetDisplayMode", nvml.Device.GetDisplayMode, flag),
	of("display_active", "nvmlDeviceGetDisplayActive", nvml.Device.GetDisplayActive, flag),
	of("persistence", "nvmlDeviceGetPersistenceMode", nvml.Device.GetPersistenceMode, flag),
	of("compute_mode", "nvmlDeviceGetComputeMode", nvml.Device.GetComputeMode, decimal),
}, both("ecc", "nvmlDeviceGetEccMode", nvml.Device.GetEccMode), both("mig", "nvmlDeviceGetMigMode", nvml.Device.GetMigMode), []key{
	of("utilization_gpu", "nvmlDeviceGetUtilizationRates", nvml.Device.GetUtilizationRates, func(u nvml.Utilization) string { return decimal(u.Gpu) }),
	of("utilization_memory", "nvmlDeviceGetUtilizationRates", nvml.Device.GetUtilizationRates, func(u nvml.Utilization) string { return decimal(u.Memory) }),
	of("encoder", "nvmlDeviceGetEncoderUtilization", withoutPeriod(nvml.Device.GetEncoderUtilization), decimal),
	of("decoder", "nvmlDeviceGetDecoderUtilization", withoutPeriod(nvml.Device.GetDecoderUtilization), decimal),
	of("events", "nvmlDeviceGetSupportedEventTypes", nvml.Device.GetSupportedEventTypes, hexadecimal),
	of("clock_reasons", "nvmlDeviceGetCurrentClocksEventReasons", nvml.Device.GetCurrentClocksEventReasons, hexadecimal),
})

func withoutPeriod(call func(nvml.Device) (uint32, uint32, nvml.Return)) func(nvml.Device) (uint32, nvml.Return) {
	return func(d nvml.Device) (uint32, nvml.Return) { v, _, ret := call(d); return v, ret }
}
