package compare

import (
	"cmp"
	"strconv"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// metric is a value that a metric has.
type metric struct {
	name   string
	labels map[string]string // that it must have
	value  Value
	unit   float64 // number of the metric's units in one of the value's
	gpus   bool    // of GPUs only: nvidia-smi shows it for no MIG instance
}

var metrics = []metric{
	{"tandem_device_memory_total_bytes", nil, Memory, 1 << 20, false},
	{"tandem_device_memory_used_bytes", nil, MemoryUsed, 1 << 20, false},
	{"tandem_device_bar1_total_bytes", nil, BAR1, 1 << 20, false},
	{"tandem_device_bar1_used_bytes", nil, BAR1Used, 1 << 20, true},
	{"tandem_device_power_limit_watts", nil, PowerLimit, 1, true},
	{"tandem_device_power_watts", nil, Power, 1, true},
	{"tandem_device_temperature_celsius", nil, Temperature, 1, true},
	{"tandem_device_utilization_ratio", nil, GPUUtilization, 0.01, true},
	{"tandem_device_memory_busy_ratio", nil, MemoryUtilization, 0.01, true},
	{"tandem_device_encoder_utilization_ratio", nil, EncoderUtilization, 0.01, true},
	{"tandem_device_decoder_utilization_ratio", nil, DecoderUtilization, 0.01, true},
	{"tandem_device_clock_hertz", map[string]string{"clock": "sm"}, SMClock, 1e6, true},
	{"tandem_device_clock_hertz", map[string]string{"clock": "memory"}, MemoryClock, 1e6, true},
	{"tandem_device_pcie_link_generation", nil, PCIeGeneration, 1, true},
	{"tandem_device_pcie_link_width", nil, PCIeWidth, 1, true},
	{"tandem_device_pcie_replays_total", nil, PCIeReplays, 1, true},
	{"tandem_device_nvlinks", nil, NVLinks, 1, true},
	{"tandem_device_ecc_errors_total", map[string]string{"severity": "corrected", "location": "memory"}, ECCMemory, 1, true},
	{"tandem_device_ecc_errors_total", map[string]string{"severity": "corrected", "location": "l1"}, ECCL1, 1, true},
	{"tandem_device_ecc_errors_total", map[string]string{"severity": "corrected", "location": "l2"}, ECCL2, 1, true},
	{"tandem_device_ecc_errors_total", map[string]string{"severity": "uncorrected"}, ECCUncorrected, 1, true},
}

// Sample is a value of a metric.
type Sample struct {
	Name   string
	Labels map[string]string
	Value  float64
}

// Samples are the gauges and counters of a metrics page.
func Samples(page string) (all []Sample) {
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, _ := parser.TextToMetricFamilies(strings.NewReader(page)) // of a page that is cut off, what is before
	for name, family := range families {
		for _, m := range family.Metric {
			s := Sample{name, map[string]string{}, cmp.Or(m.GetGauge().GetValue(), m.GetCounter().GetValue())}
			for _, l := range m.Label {
				s.Labels[l.GetName()] = l.GetValue()
			}
			all = append(all, s)
		}
	}
	return all
}

// OfMetrics has the values of a metrics page.
func OfMetrics(page string) Source {
	s := NewSource("metrics")
	for _, sample := range Samples(page) {
		if sample.Name == "tandem_gpu_recovery_action" && sample.Value == 1 && sample.Labels["action"] != "not_reported" {
			s.Device(sample.Labels["gpu"]).set(RecoveryAction, strings.ReplaceAll(sample.Labels["action"], "_", " "))
		}
		for _, m := range metrics {
			if m.of(sample) {
				v := strconv.FormatFloat(sample.Value/m.unit, 'f', -1, 64)
				if m.unit == 0.01 {
					v = strconv.FormatFloat(float64(int(sample.Value*100+0.5)), 'f', -1, 64)
				}
				s.Device(sample.Labels["device"]).set(m.value, v)
			}
		}
	}
	return s
}

func (m metric) of(s Sample) bool {
	if s.Name != m.name || m.gpus && strings.HasPrefix(s.Labels["device"], "MIG-") {
		return false
	}
	for name, value := range m.labels {
		if s.Labels[name] != value {
			return false
		}
	}
	return true
}

var pathNames = map[gpu.PCIePath]string{
	gpu.PathSystem: "SYS", gpu.PathNUMA: "NODE", gpu.PathHostBridge: "PHB", gpu.PathMultiSwitch: "PXB", gpu.PathSingleSwitch: "PIX", gpu.PathBoard: "PIX",
}

// OfSnapshot has the connections of GPUs as the agents use them for placement.
func OfSnapshot(s gpu.Snapshot) Source {
	all := NewSource("placement")
	index := map[gpu.DeviceID]int{}
	for _, d := range s.Devices {
		if d.Profile == "" {
			index[d.ID] = d.Index
		}
	}
	for _, l := range s.Links {
		i, j := index[l.A], index[l.B]
		if name := pathNames[l.Path]; l.NVLinks > 0 {
			all.Machine.set(Connection(min(i, j), max(i, j)), "NV"+strconv.Itoa(l.NVLinks))
		} else {
			all.Machine.set(Connection(min(i, j), max(i, j)), name)
		}
	}
	return all
}
