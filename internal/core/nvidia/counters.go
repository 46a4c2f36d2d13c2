package nvidia

import (
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// counter is a counter of a gpu.Usage that is a field value.
type counter struct {
	field, scope uint32
	of           func(*gpu.Usage) *gpu.OptionalUint64
}

// allLinks is the scope of a throughput for the sum over all NVLinks (nvml.h).
const allLinks = math.MaxUint32

// counters are read with one call. nvmlDeviceGetPcieThroughput measures for 20 ms each (nvml.h), so PCIe traffic is read from the
// counters, which GPUs before Ada and Hopper lack. nvml.h gives the units: bytes for PCIe, KiB for NVLink, volatile double-bit
// errors for ECC.
var counters = [...]counter{
	{nvml.FI_DEV_ECC_DBE_VOL_TOTAL, 0, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.ECCUncorrected }},
	{nvml.FI_DEV_PCIE_COUNT_TX_BYTES, 0, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.PCIeTransmitted }},
	{nvml.FI_DEV_PCIE_COUNT_RX_BYTES, 0, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.PCIeReceived }},
	{nvml.FI_DEV_PCIE_REPLAY_COUNTER, 0, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.PCIeReplays }},
	{nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, allLinks, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.NVLinkTransmitted }},
	{nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, allLinks, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.NVLinkReceived }},
	{nvml.FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.NVLinkCRCErrors }},
	{nvml.FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.NVLinkReplays }},
	{nvml.FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0, func(u *gpu.Usage) *gpu.OptionalUint64 { return &u.NVLinkRecoveries }},
}

// readCounters reads the counters. One that the GPU does not report stays unset.
func readCounters(c *caller, h nvml.Device, u *gpu.Usage) {
	values := measured(c, "nvmlDeviceGetFieldValues", func() ([]nvml.FieldValue, nvml.Return) {
		values := make([]nvml.FieldValue, len(counters))
		for i, counter := range counters {
			values[i] = nvml.FieldValue{FieldId: counter.field, ScopeId: counter.scope}
		}
		return values, h.GetFieldValues(values)
	})
	for i, v := range values {
		if nvml.Return(v.NvmlReturn) == nvml.SUCCESS {
			*counters[i].of(u) = gpu.OptionalUint64Of(fieldValue(v))
		}
	}
}

// addSample adds what the latest health check has read.
func addSample(u *gpu.Usage, s health.Sample) {
	positive := func(n int) gpu.OptionalUint64 { return gpu.OptionalUint64{Value: uint64(max(n, 0)), OK: n > 0} }
	u.PCIeGeneration, u.PCIeWidth, u.NVLinks = positive(s.PCIeGen), positive(s.PCIeWidth), s.LinksUp
}
