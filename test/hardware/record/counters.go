package record

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// total is the number of ECC errors of a type.
func total(name string, kind nvml.MemoryErrorType, counter nvml.EccCounterType) key {
	return with(name, "nvmlDeviceGetTotalEccErrors", fmt.Sprintf("%d, %d", kind, counter), kind, func(d nvml.Device, kind nvml.MemoryErrorType) (uint64, nvml.Return) {
		return d.GetTotalEccErrors(kind, counter)
	}, decimal)
}

// corrected is the number of volatile corrected errors in one memory.
func corrected(name string, in nvml.MemoryLocation) key {
	return with(name, "nvmlDeviceGetMemoryErrorCounter", fmt.Sprintf("corrected, volatile, %d", in), in, func(d nvml.Device, in nvml.MemoryLocation) (uint64, nvml.Return) {
		return d.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC, in)
	}, decimal)
}

// remapped are the values of nvmlDeviceGetRemappedRows.
type remapped struct {
	correctable, uncorrectable int
	pending, failed            bool
}

func remappedKey(name string, text func(remapped) string) key {
	return of(name, "nvmlDeviceGetRemappedRows", func(d nvml.Device) (r remapped, ret nvml.Return) {
		r.correctable, r.uncorrectable, r.pending, r.failed, ret = d.GetRemappedRows()
		return r, ret
	}, text)
}

const repairs = "nvmlDeviceGetRepairStatus"

var errorKeys = []key{
	total("ecc_corrected_volatile", nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC),
	total("ecc_uncorrected_volatile", nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC),
	total("ecc_corrected_aggregate", nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.AGGREGATE_ECC),
	total("ecc_uncorrected_aggregate", nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC),
	corrected("ecc_l1", nvml.MEMORY_LOCATION_L1_CACHE), corrected("ecc_l2", nvml.MEMORY_LOCATION_L2_CACHE),
	corrected("ecc_device", nvml.MEMORY_LOCATION_DEVICE_MEMORY), corrected("ecc_register", nvml.MEMORY_LOCATION_REGISTER_FILE),
	of("sram_threshold_exceeded", "nvmlDeviceGetSramEccErrorStatus", nvml.Device.GetSramEccErrorStatus, func(s nvml.EccSramErrorStatus) string {
		return flag(s.BThresholdExceeded)
	}),
	of("retired_pending", "nvmlDeviceGetRetiredPagesPendingStatus", nvml.Device.GetRetiredPagesPendingStatus, flag),
	remappedKey("remapped_correctable", func(r remapped) string { return decimal(r.correctable) }),
	remappedKey("remapped_uncorrectable", func(r remapped) string { return decimal(r.uncorrectable) }),
	remappedKey("remapped_pending", func(r remapped) string { return yesNo(r.pending) }),
	remappedKey("remapped_failed", func(r remapped) string { return yesNo(r.failed) }),
	of("remap_banks_max", "nvmlDeviceGetRowRemapperHistogram", nvml.Device.GetRowRemapperHistogram, func(h nvml.RowRemapperHistogramValues) string { return decimal(h.Max) }),
	of("remap_banks_none", "nvmlDeviceGetRowRemapperHistogram", nvml.Device.GetRowRemapperHistogram, func(h nvml.RowRemapperHistogramValues) string { return decimal(h.None) }),
	of("channel_repair_pending", repairs, nvml.Device.GetRepairStatus, func(s nvml.RepairStatus) string { return flag(s.BChannelRepairPending) }),
	of("tpc_repair_pending", repairs, nvml.Device.GetRepairStatus, func(s nvml.RepairStatus) string { return flag(s.BTpcRepairPending) }),
	of("unrepairable_memory", "nvmlDeviceGetUnrepairableMemoryFlag_v1", nvml.Device.GetUnrepairableMemoryFlag_v1, func(s nvml.UnrepairableMemoryStatus_v1) string {
		return flag(s.BUnrepairableMemory)
	}),
	of("inforom_corrupt", "nvmlDeviceValidateInforom", func(d nvml.Device) (bool, nvml.Return) {
		ret := d.ValidateInforom()
		if ret == nvml.ERROR_CORRUPTED_INFOROM {
			return true, nvml.SUCCESS
		}
		return false, ret
	}, yesNo),
}

var fieldKeys = []key{
	field("memory_temperature", nvml.FI_DEV_MEMORY_TEMP, 0, celsius),
	field("pcie_tx_bytes", nvml.FI_DEV_PCIE_COUNT_TX_BYTES, 0, decimal),
	field("pcie_rx_bytes", nvml.FI_DEV_PCIE_COUNT_RX_BYTES, 0, decimal),
	field("retired_sbe", nvml.FI_DEV_RETIRED_SBE, 0, decimal),
	field("retired_dbe", nvml.FI_DEV_RETIRED_DBE, 0, decimal),
	field("recovery_action", nvml.FI_DEV_GET_GPU_RECOVERY_ACTION, 0, decimal),
	field("sw_power_cap_ns", nvml.FI_DEV_PERF_POLICY_POWER, 0, decimal),
	field("reliability_ns", nvml.FI_DEV_PERF_POLICY_RELIABILITY, 0, decimal),
	field("sw_thermal_slowdown_ns", nvml.FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, 0, decimal),
	field("hw_thermal_slowdown_ns", nvml.FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, 0, decimal),
	field("hw_power_brake_ns", nvml.FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, 0, decimal),
	field("nvlink_tx_kib", nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, allLinks, decimal),
	field("nvlink_rx_kib", nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, allLinks, decimal),
	field("nvlink_crc_errors", nvml.FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0, decimal),
	field("nvlink_replays", nvml.FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0, decimal),
	field("nvlink_recoveries", nvml.FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0, decimal),
	field("nvlink_speed", nvml.FI_DEV_NVLINK_GET_SPEED, 0, decimal),
	with("nvlink_version", "nvmlDeviceGetNvLinkVersion", "link 0", 0, nvml.Device.GetNvLinkVersion, decimal),
	field("c2c_links", nvml.FI_DEV_C2C_LINK_COUNT, 0, decimal),
}
