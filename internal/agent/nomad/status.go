package nomad

import (
	"context"
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// view is a plugin as the HTTP server shows it. Its methods are safe for concurrent use.
type view struct {
	plugin    interface{ Counters() nomadadapter.Counters }
	durations metrics.Durations // of requests
}

var set metric.Set

// Metrics returns the metrics that Collect adds.
func Metrics() []*metric.Metric { return set.Metrics() }

var (
	fingerprints      = set.Counter("fingerprint_responses_total", "Fingerprints that Nomad has taken.")
	statsResponses    = set.Counter("stats_responses_total", "Device statistics that Nomad has taken.")
	reservations      = set.Counter("reservations_total", "Reserve calls that succeeded.")
	reservationErrors = set.Counter("reservation_errors_total", "Reserve calls that were refused.")
	groups            = set.Gauge("device_groups", "Device groups in the latest fingerprint.")
	duration          = set.Histogram("request_duration_seconds",
		"Reserve: duration of Nomad's calls. Fingerprint: from a change until Nomad has taken it, which is at most once a second. Stats: from the read of the usage until Nomad has taken it.",
		"method")
)

// newDurations are those that a plugin reports.
func newDurations() metrics.Durations {
	return metrics.NewDurations(duration, "Fingerprint", "Reserve", "Stats")
}

// Describe implements prometheus.Collector.
func (view) Describe(ch chan<- *prometheus.Desc) { set.Describe(ch) }

// Collect implements prometheus.Collector.
func (v view) Collect(ch chan<- prometheus.Metric) {
	p, s := metric.NewSamples(ch), v.plugin.Counters()
	p.Add(fingerprints, float64(s.FingerprintResponses))
	p.Add(statsResponses, float64(s.StatsResponses))
	p.Add(reservations, float64(s.Reservations))
	p.Add(reservationErrors, float64(s.ReservationErrors))
	p.Add(groups, float64(len(s.Groups)))
	v.durations.Collect(ch)
}

// Resources implements status.Adapter: an alert on GPUs has a series before the first GPU.
func (view) Resources() []string { return []string{nomadadapter.GPUResource} }

// ResourceOf implements status.Adapter.
func (view) ResourceOf(u inventory.Unit) string { return nomadadapter.ResourceOf(u) }

// Alive implements status.Adapter. Nomad restarts a plugin whose process ends, and the watchdog ends one that is stuck: nothing else
// would be helped by a restart.
func (view) Alive(context.Context) error { return nil }

var errNoFingerprint = errors.New("no fingerprint sent yet: the driver has not answered, or Nomad has not asked")

// Ready implements status.Adapter. The plugin is ready when Nomad has taken a fingerprint.
func (v view) Ready() (text string, idle bool, err error) {
	s := v.plugin.Counters()
	switch {
	case s.FingerprintResponses == 0:
		return "", false, errNoFingerprint
	case len(s.Groups) == 0:
		return "no device in the latest fingerprint; inspect names the reasons", true, nil
	}
	return "fingerprint sent to Nomad: " + strings.Join(s.Groups, ", "), false, nil
}
