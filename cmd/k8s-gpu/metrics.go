package main

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// Metrics are computed when they are scraped, from what the agent knows anyway.
var (
	devicesDesc = prometheus.NewDesc("tandem_devices",
		"Devices by resource and health. One that is shared counts once for each of its units.", []string{"resource", "health"}, nil)
	healthyDesc = prometheus.NewDesc("tandem_device_healthy",
		"1 if the device takes new work, else 0 and the reason.", []string{"device", "model", "health", "reason"}, nil)
	unitsDesc = prometheus.NewDesc("tandem_device_units",
		"Units that the device is offered as: 1, or as many as share it.", []string{"device", "resource", "sharing"}, nil)
	findingsDesc = prometheus.NewDesc("tandem_policy_findings",
		"What is wrong with the policy on this machine; inspect and the log say what.", nil, nil)
	contestedDesc = prometheus.NewDesc("tandem_devices_contested",
		"Devices that another agent on this host offers, too.", nil, nil)
	nodesDesc = prometheus.NewDesc("tandem_device_nodes_missing",
		"Device nodes that containers of the device need and the host lacks; inspect names them. No series without --pass-device-specs.",
		[]string{"device"}, nil)
	excludedDesc = prometheus.NewDesc("tandem_devices_excluded",
		"Devices that were seen and are not offered.", nil, nil)
	driverDesc = prometheus.NewDesc("tandem_driver_info",
		"The driver: pending, absent, failed or ready.", []string{"state", "version", "cuda"}, nil)
	buildDesc = prometheus.NewDesc("tandem_build_info",
		"The agent.", []string{"agent", "version", "go"}, nil)
	watchedDesc = prometheus.NewDesc("tandem_kubelet_watching",
		"1 while the kubelet watches the resource.", []string{"resource"}, nil)
)

// counter is one counter of a resource.
type counter struct {
	desc  *prometheus.Desc
	value func(kubeadapter.ResourceStats) uint64
}

func newCounter(name, help string, value func(kubeadapter.ResourceStats) uint64) counter {
	return counter{prometheus.NewDesc(name, help, []string{"resource"}, nil), value}
}

var counters = []counter{
	newCounter("tandem_registrations_total", "Registrations with the kubelet.",
		func(s kubeadapter.ResourceStats) uint64 { return s.Registrations }),
	newCounter("tandem_registration_errors_total", "Registrations that the kubelet refused.",
		func(s kubeadapter.ResourceStats) uint64 { return s.RegistrationErrors }),
	newCounter("tandem_allocations_total", "Allocate calls that were answered.",
		func(s kubeadapter.ResourceStats) uint64 { return s.Allocations }),
	newCounter("tandem_allocation_errors_total", "Allocate calls that were refused.",
		func(s kubeadapter.ResourceStats) uint64 { return s.AllocationErrors }),
	newCounter("tandem_preferred_allocations_total", "GetPreferredAllocation calls.",
		func(s kubeadapter.ResourceStats) uint64 { return s.PreferredAllocations }),
	newCounter("tandem_lists_total", "Device lists sent to the kubelet.",
		func(s kubeadapter.ResourceStats) uint64 { return s.Lists }),
}

func (s *status) registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(s, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Describe implements prometheus.Collector.
func (s *status) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		devicesDesc, healthyDesc, unitsDesc, findingsDesc, contestedDesc, excludedDesc, driverDesc, buildDesc, watchedDesc,
		nodesDesc, reloadedDesc, reloadTimeDesc,
	} {
		descs <- d
	}
	for _, c := range counters {
		descs <- c.desc
	}
	for _, d := range healthDescs {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (s *status) Collect(metrics chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	state := s.machine.State()
	s.collectHealth(metrics, state)
	s.config.collect(metrics)
	inv := state.Inventory
	driver := inv.Driver()
	gauge(buildDesc, 1, "k8s-gpu", versionText(), runtime.Version())
	gauge(driverDesc, 1, driver.State.String(), driver.Version, driver.CUDA)
	gauge(excludedDesc, float64(len(inv.Excluded())))
	gauge(findingsDesc, float64(len(inv.PolicyWarnings())+len(inv.OutdatedBindings())))
	gauge(contestedDesc, float64(len(inv.Overlaps())))
	for u := range inv.Devices() {
		gauge(healthyDesc, one(u.Health.Schedulable()), string(u.Device.ID), u.Device.Model, u.Health.State.String(), u.Health.Reason.String())
		if missing, known := inv.MissingNodes(u.Device); known {
			gauge(nodesDesc, float64(len(missing)), string(u.Device.ID))
		}
	}
	for of, n := range unitCounts(inv) {
		gauge(unitsDesc, float64(n), string(of.device), of.resource, of.mode.String())
	}
	stats := s.stats()
	count := kubeadapter.Resources(inv)
	for _, r := range stats {
		for state := core.Healthy; state <= core.GPULost; state++ {
			gauge(devicesDesc, float64(count[r.Resource][state]), r.Resource, state.String())
		}
		gauge(watchedDesc, one(r.Connected), r.Resource)
		for _, c := range counters {
			metrics <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(c.value(r)), r.Resource)
		}
	}
}

// offer is a device as it is offered: while a policy changes, in two ways at once.
type offer struct {
	device   core.DeviceID
	resource string
	mode     core.SharingMode
}

// unitCounts counts units, in series as many as devices: a GPU that a hundred share makes one.
func unitCounts(inv *core.Inventory) map[offer]int {
	count := map[offer]int{}
	for u := range inv.Units() {
		count[offer{u.Device.ID, kubeadapter.ResourceOf(u), u.Sharing.Mode}]++
	}
	return count
}

// one is how a metric says yes; no is 0.
func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// stats has the GPU resource from the start, so that an alert on it has a series before the first GPU.
func (s *status) stats() []kubeadapter.ResourceStats {
	stats := s.adapter.Stats()
	for _, r := range stats {
		if r.Resource == kubeadapter.GPUResource {
			return stats
		}
	}
	return append([]kubeadapter.ResourceStats{{Resource: kubeadapter.GPUResource}}, stats...)
}
