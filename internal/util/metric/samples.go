package metric

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Samples sends the samples of one scrape to a registry. They share the labels that are equal: prometheus.NewConstMetric makes three objects
// for each label of each sample, and a scrape of a large node has 12,000 samples (see docs/performance.md).
type Samples struct {
	ch     chan<- prometheus.Metric
	labels map[label]*dto.LabelPair
}

type label struct{ name, value string }

// NewSamples returns what sends the samples of one scrape.
func NewSamples(ch chan<- prometheus.Metric) *Samples {
	return &Samples{ch, map[label]*dto.LabelPair{}}
}

// sample is a gauge or counter as prometheus.Metric. It is immutable.
type sample struct {
	metric *Metric
	labels []*dto.LabelPair // by name
	value  float64
}

// Desc implements prometheus.Metric.
func (s *sample) Desc() *prometheus.Desc { return s.metric.desc }

// Write implements prometheus.Metric.
func (s *sample) Write(out *dto.Metric) error {
	out.Label = s.labels
	if s.metric.Type == Counter {
		out.Counter = &dto.Counter{Value: &s.value}
	} else {
		out.Gauge = &dto.Gauge{Value: &s.value}
	}
	return nil
}

// Add adds a sample of a gauge or counter; labels are the values of m.Labels. No two samples may have the same labels.
func (p *Samples) Add(m *Metric, v float64, labels ...string) {
	if len(labels) != len(m.Labels) {
		p.send(m, nil, fmt.Errorf("%d labels, want %d", len(labels), len(m.Labels)))
		return
	}
	s := &sample{m, make([]*dto.LabelPair, len(m.order)), v}
	for i, at := range m.order {
		s.labels[i] = p.pair(m.Labels[at], labels[at])
	}
	p.ch <- s
}

// pair returns a label. What is no UTF-8 is replaced: a registry refuses it.
func (p *Samples) pair(name, value string) *dto.LabelPair {
	pair := p.labels[label{name, value}]
	if pair == nil {
		pair = &dto.LabelPair{Name: new(name), Value: new(strings.ToValidUTF8(value, "\uFFFD"))}
		p.labels[label{name, value}] = pair
	}
	return pair
}

// AddBool adds 1 for true, 0 for false.
func (p *Samples) AddBool(m *Metric, v bool, labels ...string) {
	if v {
		p.Add(m, 1, labels...)
		return
	}
	p.Add(m, 0, labels...)
}

// AddSummary adds a sample of a summary without labels; the sum is in the metric's unit.
func (p *Samples) AddSummary(m *Metric, count uint64, sum float64) {
	s, err := prometheus.NewConstSummary(m.desc, count, sum, nil)
	p.send(m, s, err)
}

func (p *Samples) send(m *Metric, s prometheus.Metric, err error) {
	if err != nil {
		s = prometheus.NewInvalidMetric(m.desc, err)
	}
	p.ch <- s
}
