// Package metrics has the metrics that both agents share: their names, and how their values follow from the agent's state. The
// adapters' own are in agent/kube/kubestatus and agent/nomad. All values are computed at a scrape; none is kept, so
// that a series ends with what it is about.
package metrics

import "slices"

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
	Labels []string // in the order of the values in Page.Add

	order    []int    // positions in Labels, by name
	openings []string // `{device="`, `,model="`: what precedes each value, in that order
}

// Set is a list of metrics. Its methods add one; they are for variables of packages.
type Set struct{ all []*Metric }

// Metrics returns the metrics by name.
func (s *Set) Metrics() []*Metric {
	return slices.SortedFunc(slices.Values(s.all), func(a, b *Metric) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
}

// Gauge adds a gauge.
func (s *Set) Gauge(name, help string, labels ...string) *Metric {
	return s.add(name, Gauge, help, labels)
}

// Counter adds a counter.
func (s *Set) Counter(name, help string, labels ...string) *Metric {
	return s.add(name, Counter, help, labels)
}

// Histogram adds a histogram.
func (s *Set) Histogram(name, help string, labels ...string) *Metric {
	return s.add(name, Histogram, help, labels)
}

// Summary adds a summary without quantiles: a count and a sum.
func (s *Set) Summary(name, help string, labels ...string) *Metric {
	return s.add(name, Summary, help, labels)
}

func (s *Set) add(name string, t Type, help string, labels []string) *Metric {
	m := &Metric{Name: "tandem_" + name, Type: t, Help: help, Labels: labels}
	for i := range labels {
		m.order = append(m.order, i)
	}
	slices.SortFunc(m.order, func(a, b int) int {
		if labels[a] < labels[b] {
			return -1
		}
		return 1
	})
	for i, at := range m.order {
		opening := ","
		if i == 0 {
			opening = "{"
		}
		m.openings = append(m.openings, opening+labels[at]+`="`)
	}
	s.all = append(s.all, m)
	return m
}
