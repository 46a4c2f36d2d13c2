package metric

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/test/check"
)

// What a driver or an orchestrator has as a label is valid in Prometheus: the registry refuses no sample.
func TestLabelsAreValid(t *testing.T) {
	var set Set
	m := set.Gauge("m", "Help.", "z", "a")
	ch := make(chan prometheus.Metric, 10)
	for _, label := range []string{"", `quo"te\`, "line\nbreak", "emoji ☃", "\xff invalid"} {
		NewSamples(ch).Add(m, 1, label, "x")
	}
	close(ch)
	registry := prometheus.NewPedanticRegistry()
	check.NoError(t, registry.Register(sent{&set, ch}))
	families, err := registry.Gather()
	if err != nil || len(families) != 1 || families[0].GetName() != "tandem_m" {
		t.Fatalf("%v, %v", families, err)
	}
	all := map[string]bool{}
	for _, m := range families[0].GetMetric() {
		all[m.GetLabel()[1].GetValue()] = true
	}
	if len(all) != 5 || !all["\uFFFD invalid"] {
		t.Error(all)
	}
}

// A sample that is refused does not hide the others.
func TestInvalidSample(t *testing.T) {
	var set Set
	m, ch := set.Gauge("m", "Help.", "label"), make(chan prometheus.Metric, 2)
	p := NewSamples(ch)
	p.Add(m, 1)
	p.Add(m, 2, "x")
	close(ch)
	registry := prometheus.NewPedanticRegistry()
	check.NoError(t, registry.Register(sent{&set, ch}))
	families, err := registry.Gather()
	if err == nil || len(families) != 1 || families[0].GetMetric()[0].GetGauge().GetValue() != 2 {
		t.Errorf("%v, %v", families, err)
	}
}

// sent is a collector of samples that were sent before.
type sent struct {
	*Set
	samples <-chan prometheus.Metric
}

func (s sent) Collect(ch chan<- prometheus.Metric) {
	for m := range s.samples {
		ch <- m
	}
}
