// Package kubestatus shows to operators what an agent has for the kubelet, device plugins and a DRA driver: readiness, the metrics that only
// Kubernetes has, and their part of the report.
package kubestatus

import (
	"cmp"
	"context"
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// Plugins are what is shown; *deviceplugin.Plugins implement it. The methods are safe for concurrent use.
type Plugins interface {
	Alive(context.Context) error // nil if every endpoint answers over its own socket
	Ready() error                // *deviceplugin.IdleError if there is nothing to register
	Stats() []deviceplugin.ResourceStats
}

// DevicePlugins are device plugins as the HTTP server shows them. The methods are safe for concurrent use.
type DevicePlugins struct {
	Plugins   Plugins
	Durations prometheus.Collector // of the kubelet's calls

	// OnlyOffered leaves out nvidia.com/gpu unless it is offered: another API may offer the devices.
	OnlyOffered bool
}

var set metric.Set

// Metrics returns the metrics that the Collect methods add.
func Metrics() []*metric.Metric { return set.Metrics() }

var (
	connected = set.Gauge("kubelet_connected", "1 while the kubelet has the ListAndWatch stream of the resource open.", "resource")
	duration  = set.Histogram("request_duration_seconds", "Duration of the kubelet's calls, without the socket.", "method")
)

// counters are those of each resource.
var counters = []struct {
	metric *metric.Metric
	value  func(deviceplugin.ResourceStats) uint64
}{
	{set.Counter("registrations_total", "Registrations with the kubelet.", "resource"),
		func(s deviceplugin.ResourceStats) uint64 { return s.Registrations }},
	{set.Counter("registration_errors_total", "Registrations that the kubelet refused.", "resource"),
		func(s deviceplugin.ResourceStats) uint64 { return s.RegistrationErrors }},
	{set.Counter("allocations_total", "Allocate calls that succeeded.", "resource"),
		func(s deviceplugin.ResourceStats) uint64 { return s.Allocations }},
	{set.Counter("allocation_errors_total", "Allocate calls that were refused.", "resource"),
		func(s deviceplugin.ResourceStats) uint64 { return s.AllocationErrors }},
	{set.Counter("preferred_allocations_total", "GetPreferredAllocation calls.", "resource"),
		func(s deviceplugin.ResourceStats) uint64 { return s.PreferredAllocations }},
	{set.Counter("listandwatch_responses_total", "Device lists sent to the kubelet.", "resource"),
		func(s deviceplugin.ResourceStats) uint64 { return s.Lists }},
}

// NewDurations returns the durations that plugins report.
func NewDurations() metrics.Durations {
	return metrics.NewDurations(duration, "Allocate", "GetPreferredAllocation")
}

// Describe implements prometheus.Collector.
func (DevicePlugins) Describe(ch chan<- *prometheus.Desc) { set.Describe(ch) }

// Collect implements prometheus.Collector.
func (v DevicePlugins) Collect(ch chan<- prometheus.Metric) {
	p := metric.NewSamples(ch)
	v.Durations.Collect(ch)
	for _, r := range v.stats() {
		p.AddBool(connected, r.Connected, r.Resource)
		for _, c := range counters {
			p.Add(c.metric, float64(c.value(r)), r.Resource)
		}
	}
}

// stats has nvidia.com/gpu from the start, so that an alert on it has a series before the first GPU.
func (v DevicePlugins) stats() []deviceplugin.ResourceStats {
	stats := v.Plugins.Stats()
	if v.OnlyOffered {
		return stats
	}
	for _, r := range stats {
		if r.Resource == kubeadapter.GPUResource {
			return stats
		}
	}
	return append([]deviceplugin.ResourceStats{{Resource: kubeadapter.GPUResource}}, stats...)
}

// Resources implements status.Adapter.
func (v DevicePlugins) Resources() (names []string) {
	for _, r := range v.stats() {
		names = append(names, r.Resource)
	}
	return names
}

// ResourceOf implements status.Adapter.
func (DevicePlugins) ResourceOf(u inventory.Unit) string { return kubeadapter.ResourceOf(u) }

// Alive implements status.Adapter. It fails if the agent's own sockets do not answer.
func (v DevicePlugins) Alive(ctx context.Context) error { return v.Plugins.Alive(ctx) }

// Ready implements status.Adapter. The plugins are ready when the kubelet watches every resource.
func (v DevicePlugins) Ready() (text string, idle bool, err error) {
	err = v.Plugins.Ready()
	if reason := (*deviceplugin.IdleError)(nil); errors.As(err, &reason) {
		return reason.Reason, true, nil
	}
	var names []string
	for _, r := range v.Plugins.Stats() {
		names = append(names, r.Resource)
	}
	return "offered to the kubelet: " + strings.Join(names, ", "), false, err
}

// Endpoints returns the kubelet's endpoints, for the debug view.
func (v DevicePlugins) Endpoints() (all []report.Endpoint) {
	for _, r := range v.Plugins.Stats() {
		all = append(all, report.Endpoint{
			Resource: r.Resource, Status: cmp.Or(r.Reason, "connected"), Since: r.Since, Socket: r.Socket,
			Registrations: r.Registrations, Responses: r.Lists, LastError: r.LastError, LastErrorAt: r.LastErrorAt,
		})
	}
	return all
}
