// Package metric describes metrics and sends their samples, for collectors that compute all values at a scrape and keep none: so a series ends with
// what it is about.
package metric

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Type is the type of a metric in Prometheus' text format.
type Type string

// The types.
const (
	Gauge     Type = "gauge"
	Counter   Type = "counter"
	Histogram Type = "histogram"
	Summary   Type = "summary"
)

// Metric describes a metric. It is immutable.
type Metric struct {
	Name   string // "tandem_devices"
	Type   Type
	Help   string   // one line
	Labels []string // in the order of the values in Samples.Add

	desc  *prometheus.Desc
	order []int // positions in Labels, by name
}

// Set is a list of metrics. Its methods Gauge to Summary add one; they are for variables of packages.
type Set struct{ all []*Metric }

// Metrics returns the metrics.
func (s *Set) Metrics() []*Metric { return s.all }

// Describe is that method of a prometheus.Collector which sends samples of these metrics.
func (s *Set) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range s.all {
		ch <- m.desc
	}
}

// Gauge adds a gauge.
func (s *Set) Gauge(name, help string, labels ...string) *Metric {
	return s.add(&Metric{Name: name, Type: Gauge, Help: help, Labels: labels})
}

// Counter adds a counter.
func (s *Set) Counter(name, help string, labels ...string) *Metric {
	return s.add(&Metric{Name: name, Type: Counter, Help: help, Labels: labels})
}

// Histogram adds a histogram.
func (s *Set) Histogram(name, help string, labels ...string) *Metric {
	return s.add(&Metric{Name: name, Type: Histogram, Help: help, Labels: labels})
}

// Summary adds a summary without quantiles: a count and a sum.
func (s *Set) Summary(name, help string, labels ...string) *Metric {
	return s.add(&Metric{Name: name, Type: Summary, Help: help, Labels: labels})
}

func (s *Set) add(m *Metric) *Metric {
	m.Name = "tandem_" + m.Name
	for i := range m.Labels {
		m.order = append(m.order, i)
	}
	slices.SortFunc(m.order, func(a, b int) int { return strings.Compare(m.Labels[a], m.Labels[b]) })
	m.desc = prometheus.NewDesc(m.Name, m.Help, m.Labels, nil)
	s.all = append(s.all, m)
	return m
}
