package status

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// Metrics are computed at each scrape from the agent's state.
var (
	devicesDesc = newDesc("devices", "Devices by resource and health. A shared device counts once for each of its units.", "resource", "health")
	unitsDesc   = newDesc("device_units", "Units that the device is offered as: 1, or the number of its shares.", "device", "resource", "sharing")
	policyDesc  = newDesc("policy_warnings", "Problems of the policy on this node; inspect and the log have the texts.")
	overlapDesc = newDesc("device_overlaps", "Devices that another agent on this node offers, too.")
	nodesDesc   = newDesc("device_nodes_missing",
		"Device nodes that containers of the device need and the node lacks; inspect names them. No series if containers get neither nodes nor CDI names.", "device")
	cdiDesc = newDesc("cdi_devices",
		"Offered devices that the CDI specification defines, or does not define. No series if no specification is needed, or none was attempted yet.", "state")
	excludedDesc  = newDesc("devices_excluded", "Devices that were found and are not offered.")
	driverDesc    = newDesc("driver_info", "The driver: pending, absent, failed or ready.", "state", "version", "cuda")
	buildDesc     = newDesc("build_info", "The agent.", "agent", "version", "go")
	connectedDesc = newDesc("kubelet_connected", "1 while the kubelet has the ListAndWatch stream of the resource open.", "resource")

	// The names are Prometheus' own for the same values.
	reloadedDesc   = newDesc("config_last_reload_successful", "0 if the latest read of the configuration failed: an older one is in force.")
	reloadTimeDesc = newDesc("config_last_reload_success_timestamp_seconds", "When the configuration was last read without a problem.")
)

func newDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("tandem_"+name, help, labels, nil)
}

// counter is one counter per resource.
type counter struct {
	desc  *prometheus.Desc
	value func(kubeadapter.ResourceStats) uint64
}

var counters = []counter{
	{newDesc("registrations_total", "Registrations with the kubelet.", "resource"),
		func(s kubeadapter.ResourceStats) uint64 { return s.Registrations }},
	{newDesc("registration_errors_total", "Registrations that the kubelet refused.", "resource"),
		func(s kubeadapter.ResourceStats) uint64 { return s.RegistrationErrors }},
	{newDesc("allocations_total", "Allocate calls that succeeded.", "resource"),
		func(s kubeadapter.ResourceStats) uint64 { return s.Allocations }},
	{newDesc("allocation_errors_total", "Allocate calls that were refused.", "resource"),
		func(s kubeadapter.ResourceStats) uint64 { return s.AllocationErrors }},
	{newDesc("preferred_allocations_total", "GetPreferredAllocation calls.", "resource"),
		func(s kubeadapter.ResourceStats) uint64 { return s.PreferredAllocations }},
	{newDesc("listandwatch_responses_total", "Device lists sent to the kubelet.", "resource"),
		func(s kubeadapter.ResourceStats) uint64 { return s.Lists }},
}

func (s *Server) registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(s, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Describe implements prometheus.Collector: without descriptions the registry checks each scrape instead.
func (s *Server) Describe(chan<- *prometheus.Desc) {}

// sender sends one sample.
type sender func(d *prometheus.Desc, v float64, labels ...string)

func newSender(metrics chan<- prometheus.Metric, t prometheus.ValueType) sender {
	return func(d *prometheus.Desc, v float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
}

// Collect implements prometheus.Collector.
func (s *Server) Collect(metrics chan<- prometheus.Metric) {
	gauge, count := newSender(metrics, prometheus.GaugeValue), newSender(metrics, prometheus.CounterValue)
	state := s.Agent.State()
	s.collectHealth(metrics, state)
	ok, success := s.Reload.Last()
	gauge(reloadedDesc, boolValue(ok))
	gauge(reloadTimeDesc, float64(success.UnixMilli())/1000)
	inv := state.Inventory
	driver := inv.Driver()
	gauge(buildDesc, 1, "k8s-gpu", s.Version, runtime.Version())
	gauge(driverDesc, 1, driver.State.String(), driver.Version, driver.CUDA)
	gauge(excludedDesc, float64(len(inv.Excluded())))
	gauge(policyDesc, float64(len(inv.PolicyWarnings())+len(inv.OutdatedBindings())))
	gauge(overlapDesc, float64(len(inv.Overlaps())))
	for u := range inv.Devices() {
		if missing, known := inv.MissingNodes(u.Device); known {
			gauge(nodesDesc, float64(len(missing)), string(u.Device.ID))
		}
	}
	if defined, undefined, known := inv.CDIDevices(); known {
		gauge(cdiDesc, float64(defined), "defined")
		gauge(cdiDesc, float64(undefined), "undefined")
	}
	for key, n := range unitCounts(inv) {
		gauge(unitsDesc, float64(n), string(key.device), key.resource, key.mode.String())
	}
	byState := kubeadapter.Resources(inv)
	for _, r := range s.resources() {
		for h := health.Healthy; h <= health.GPULost; h++ {
			gauge(devicesDesc, float64(byState[r.Resource][h]), r.Resource, h.String())
		}
		gauge(connectedDesc, boolValue(r.Connected), r.Resource)
		for _, c := range counters {
			count(c.desc, float64(c.value(r)), r.Resource)
		}
	}
}

// unitKey is a way in which a device is offered: while a policy changes, a device has two.
type unitKey struct {
	device   gpu.DeviceID
	resource string
	mode     inventory.SharingMode
}

// unitCounts counts units. The number of series is that of devices, not of shares.
func unitCounts(inv *inventory.Inventory) map[unitKey]int {
	count := map[unitKey]int{}
	for u := range inv.Units() {
		count[unitKey{u.Device.ID, kubeadapter.ResourceOf(u), u.Sharing.Mode}]++
	}
	return count
}

// boolValue is 1 for true.
func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// resources has nvidia.com/gpu from the start, so that an alert on it has a series before the first GPU.
func (s *Server) resources() []kubeadapter.ResourceStats {
	stats := s.Adapter.Stats()
	for _, r := range stats {
		if r.Resource == kubeadapter.GPUResource {
			return stats
		}
	}
	return append([]kubeadapter.ResourceStats{{Resource: kubeadapter.GPUResource}}, stats...)
}
