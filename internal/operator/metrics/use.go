package metrics

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// The metrics of what offered devices do and which work has them. What a device does not report has no series.
var (
	useRead = shared.Gauge("use_last_read_timestamp_seconds",
		"When the use of the devices was last read. No series with occupancy = off, which reads none; the metrics of use are missing then.")
	holdersKnown = shared.Gauge("holders_known", "1 if the orchestrator's record of which work has which devices was read: a device without an owner is free.")
	owner        = shared.Gauge("device_owner", "Work that has the device: name is the pod or the ID of the Nomad job, container the container or task, id the UID of the pod or the ID of the allocation.",
		"device", "orchestrator", "namespace", "name", "container", "id")
	held        = shared.Gauge("device_held", "1 if work has the device. No series while holders_known is 0.", "device")
	idleSeconds = shared.Gauge("device_idle_seconds", "How long the device has had work and a utilisation of zero; 0 if it is busy. No series if no work has it.", "device")
	processes   = shared.Gauge("device_processes", "Processes with memory of the device.", "device")
	unreserved  = shared.Gauge("device_unreserved_processes", "Processes with memory of the device that no work runs to which it was given.", "device")
)

// reading is a metric whose value is one number of a gpu.Usage.
type reading struct {
	metric *metric.Metric
	labels []string // after the device
	unit   float64  // of the number, in the metric's unit
	of     func(*gpu.Usage) gpu.OptionalUint64
}

// Units of the numbers in a gpu.Usage.
const (
	percent = 0.01
	milli   = 0.001
	one     = 1
	kibi    = 1 << 10
	mega    = 1e6
)

const sinceLoaded = " since the driver was loaded."

var (
	clockHertz  = shared.Gauge("device_clock_hertz", "Clock rate, up to 10 s old.", "device", "clock")
	eccErrors   = shared.Counter("device_ecc_errors_total", "ECC errors by memory and severity"+sinceLoaded+" A reset of the GPU sets them to zero.", "device", "location", "severity")
	pcieBytes   = shared.Counter("device_pcie_bytes_total", "Bytes over PCIe, from the GPU (transmit) and to it. The driver's counter can wrap. Ada, Hopper and newer.", "device", "direction")
	nvlinkBytes = shared.Counter("device_nvlink_bytes_total", "Data over all NVLinks, without the protocol.", "device", "direction")
	nvlinkFails = shared.Counter("device_nvlink_errors_total", "Errors of all NVLinks: CRC errors of flits, replays and recoveries.", "device", "type")
)

// readings are in the order of gpu.Usage.
var readings = []reading{
	{shared.Gauge("device_power_watts", "Power drawn by the GPU. No series for a MIG instance.", "device"), nil, milli, func(u *gpu.Usage) gpu.OptionalUint64 { return u.Power }},
	{shared.Gauge("device_power_limit_watts", "Power limit of the GPU.", "device"), nil, milli, func(u *gpu.Usage) gpu.OptionalUint64 { return u.PowerLimit }},
	{shared.Gauge("device_utilization_ratio", "Part of the driver's last sample period in which a kernel was running. No series for a MIG instance.", "device"), nil, percent, func(u *gpu.Usage) gpu.OptionalUint64 { return u.GPU }},
	{shared.Gauge("device_memory_busy_ratio", "Part of the driver's last sample period with memory traffic.", "device"), nil, percent, func(u *gpu.Usage) gpu.OptionalUint64 { return u.Memory }},
	{shared.Gauge("device_encoder_utilization_ratio", "Utilisation of the video encoders.", "device"), nil, percent, func(u *gpu.Usage) gpu.OptionalUint64 { return u.Encoder }},
	{shared.Gauge("device_decoder_utilization_ratio", "Utilisation of the video decoders.", "device"), nil, percent, func(u *gpu.Usage) gpu.OptionalUint64 { return u.Decoder }},
	{shared.Gauge("device_temperature_celsius", "Temperature of the GPU, also for its MIG instances.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.Temperature }},
	{shared.Gauge("device_memory_used_bytes", "Memory in use.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.MemoryUsed }},
	{shared.Gauge("device_memory_total_bytes", "Memory of the device.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.MemoryTotal }},
	{shared.Gauge("device_bar1_used_bytes", "BAR1 memory in use.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.BAR1Used }},
	{shared.Gauge("device_bar1_total_bytes", "BAR1 memory of the device.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.BAR1Total }},
	{eccErrors, []string{"l1", "corrected"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.ECCL1 }},
	{eccErrors, []string{"l2", "corrected"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.ECCL2 }},
	{eccErrors, []string{"memory", "corrected"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.ECCMemory }},
	{eccErrors, []string{"total", "uncorrected"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.ECCUncorrected }},
	{clockHertz, []string{"sm"}, mega, func(u *gpu.Usage) gpu.OptionalUint64 { return u.ClockSM }},
	{clockHertz, []string{"memory"}, mega, func(u *gpu.Usage) gpu.OptionalUint64 { return u.ClockMemory }},
	{pcieBytes, []string{"transmit"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.PCIeTransmitted }},
	{pcieBytes, []string{"receive"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.PCIeReceived }},
	{shared.Counter("device_pcie_replays_total", "PCIe replays"+sinceLoaded, "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.PCIeReplays }},
	{shared.Gauge("device_pcie_link_generation", "Present generation of the PCIe link, up to a minute old. It is lower while the GPU is idle.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.PCIeGeneration }},
	{shared.Gauge("device_pcie_link_width", "Present lanes of the PCIe link, up to a minute old. They can be fewer while the GPU is idle.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.PCIeWidth }},
	{shared.Gauge("device_nvlinks", "Active NVLinks, up to five minutes old.", "device"), nil, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.NVLinks }},
	{nvlinkBytes, []string{"transmit"}, kibi, func(u *gpu.Usage) gpu.OptionalUint64 { return u.NVLinkTransmitted }},
	{nvlinkBytes, []string{"receive"}, kibi, func(u *gpu.Usage) gpu.OptionalUint64 { return u.NVLinkReceived }},
	{nvlinkFails, []string{"crc"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.NVLinkCRCErrors }},
	{nvlinkFails, []string{"replay"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.NVLinkReplays }},
	{nvlinkFails, []string{"recovery"}, one, func(u *gpu.Usage) gpu.OptionalUint64 { return u.NVLinkRecoveries }},
}

// collectUse adds the use of the devices that are in the inventory: a device that was removed has no series, also while the latest
// table has it.
func collectUse(p *metric.Samples, s Source) {
	t := s.Use
	if t.At.IsZero() {
		return
	}
	p.Add(useRead, timestamp(t.At))
	p.AddBool(holdersKnown, t.HoldersKnown)
	byID := make(map[gpu.DeviceID]*use.Device, len(t.Devices))
	for i := range t.Devices {
		byID[t.Devices[i].ID] = &t.Devices[i]
	}
	for u := range s.State.Allocatable.Devices() {
		if d := byID[u.Device.ID]; d != nil {
			collectOwners(p, t, d)
			collectReadings(p, d)
		}
	}
}

func collectOwners(p *metric.Samples, t use.Table, d *use.Device) {
	id := string(d.ID)
	owners := d.Owners()
	for i := range owners {
		owners[i].Claim = "" // no label: a container that has a device twice has one series
	}
	for i, o := range owners {
		if !slices.Contains(owners[:i], o) {
			p.Add(owner, 1, id, o.Orchestrator, o.Namespace, o.Name, o.Container, o.ID)
		}
	}
	if t.HoldersKnown {
		p.AddBool(held, len(d.Holders) > 0, id)
	}
	switch {
	case d.HeldSince.IsZero():
	case !d.IdleSince.IsZero():
		p.Add(idleSeconds, t.At.Sub(d.IdleSince).Seconds(), id)
	case d.Usage.GPU.OK:
		p.Add(idleSeconds, 0, id)
	}
	if d.Processes != nil {
		p.Add(processes, float64(len(d.Processes)), id)
		if t.HoldersKnown {
			p.Add(unreserved, float64(len(d.Unreserved())), id)
		}
	}
}

func collectReadings(p *metric.Samples, d *use.Device) {
	if d.Usage.At.IsZero() {
		return
	}
	var labels [3]string
	labels[0] = string(d.ID)
	for i := range readings {
		r := &readings[i]
		if v := r.of(&d.Usage); v.OK {
			p.Add(r.metric, r.value(v.Value), labels[:1+copy(labels[1:], r.labels)]...)
		}
	}
}

// value is a number in the metric's unit. It divides where that gives the shorter text: 70 W and not 70.00000000000001.
func (r *reading) value(n uint64) float64 {
	if r.unit < 1 {
		return float64(n) / (1 / r.unit)
	}
	return float64(n) * r.unit
}
