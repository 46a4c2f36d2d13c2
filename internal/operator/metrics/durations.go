package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// bounds are the upper bounds of the buckets, in seconds. A request is answered from memory in less than a millisecond; one that waits for
// the first answer of the driver takes seconds.
var bounds = []float64{
	50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10,
}

// Durations are histograms of how long requests take, by method. They are a prometheus.Collector.
type Durations struct{ *prometheus.HistogramVec }

// NewDurations returns the histograms of a metric whose label is the method. Each of the methods has its series from the start.
func NewDurations(m *metric.Metric, methods ...string) Durations {
	d := Durations{prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: m.Name, Help: m.Help, Buckets: bounds}, m.Labels)}
	for _, method := range methods {
		d.WithLabelValues(method)
	}
	return d
}

// Observe counts a request of a method.
func (d Durations) Observe(method string, took time.Duration) {
	d.WithLabelValues(method).Observe(took.Seconds())
}
