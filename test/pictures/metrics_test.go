package pictures

import (
	"strings"
	"testing"
)

// agreed are metrics that the agents do not export yet, with their labels.
const agreed = `
device_info device gpu index instance model profile pci numa
device_owner device orchestrator namespace name container id
device_held device
device_idle_seconds device
device_processes device
device_unreserved_processes device
device_utilization_ratio device
device_memory_busy_ratio device
device_memory_used_bytes device
device_memory_total_bytes device
device_power_watts device
device_power_limit_watts device
device_temperature_celsius device
device_clock_hertz device clock
device_ecc_errors_total device location severity
device_pcie_bytes_total device direction
device_pcie_replays_total device
device_pcie_link_generation device
device_pcie_link_width device
device_nvlinks device
device_nvlink_bytes_total device direction
device_nvlink_errors_total device type
driver_calls_total function
driver_call_errors_total function
driver_call_seconds_total function
request_duration_seconds_bucket method le
request_duration_seconds_count method
fingerprint_responses_total
stats_responses_total
reservations_total
reservation_errors_total
device_groups
use_last_read_timestamp_seconds
holders_known
device_condition gpu gi ci cause state simulated
cdi_devices state
device_nodes_missing device
`

// exported are the labels of each metric that agents export.
func exported(t *testing.T) map[string][]string {
	t.Helper()
	all := startAgent(t).scrape()
	for line := range strings.SplitSeq(strings.TrimSpace(agreed), "\n") {
		words := strings.Fields(line)
		all["tandem_"+words[0]] = words[1:]
	}
	return all
}

// values are the values of labels that have few.
func (e *expressions) values(metric string) map[string][]string {
	health := []string{"healthy", "degraded", "unknown", "unhealthy", "lost"}
	switch metric {
	case "tandem_device_health":
		return map[string][]string{"state": health}
	case "tandem_devices":
		return map[string][]string{"health": health}
	}
	return nil
}
