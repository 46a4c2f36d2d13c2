package metrics

import (
	"bytes"
	"math"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/tandem-gpu/tandem/internal/operator/latency"
)

// The parser of Prometheus reads back what was added, whatever is in a label.
func TestText(t *testing.T) {
	var set Set
	gauge, count := set.Gauge("b", `A help\text.`, "z", "a"), set.Counter("a_total", "None.")
	times, sum := set.Histogram("t_seconds", "Times.", "method"), set.Summary("s_seconds", "Sums.")
	plain := set.Histogram("p_seconds", "Times without a label.")
	var h latency.Histogram
	h.Observe(time.Millisecond)
	h.Observe(time.Hour)
	values := []float64{0, 1, -1, 0.5, 999999, 1e6, 8.5520809984e10, 1.70000000025e9, 1e300, math.Inf(1), math.MaxUint64}
	hostile := []string{"", "plain", `quo"te`, `back\slash`, "line\nbreak", "emoji ☃", "\xff invalid", `{a="b"} 1`}
	p := NewPage()
	for i, v := range values {
		for _, s := range hostile {
			p.Add(gauge, v, s, string(rune('a'+i)))
		}
	}
	p.Add(count, 7)
	p.AddHistogram(times, h.Snapshot(), "Allocate")
	p.AddHistogram(plain, h.Snapshot())
	p.AddSummary(sum, 3, 1.5)
	text := p.Text([]byte("# before\n"))
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		t.Fatalf("%v:\n%s", err, text)
	}
	if n := len(families); n != 5 || families["tandem_b"].GetHelp() != `A help\text.` {
		t.Errorf("%d families, %v", n, families["tandem_b"])
	}
	for i, m := range families["tandem_b"].GetMetric() {
		z, v := hostile[i%len(hostile)], values[i/len(hostile)]
		if z == "\xff invalid" {
			z = "\uFFFD invalid"
		}
		if got := m.GetGauge().GetValue(); got != v || m.GetLabel()[0].GetValue() != string(rune('a'+i/len(hostile))) || m.GetLabel()[1].GetValue() != z {
			t.Errorf("%v, want %v %q", m, v, z)
		}
	}
	for _, name := range []string{"tandem_t_seconds", "tandem_p_seconds"} {
		got := families[name].GetMetric()[0].GetHistogram()
		if got.GetSampleCount() != 2 || got.GetSampleSum() != 3600.001 || got.GetBucket()[0].GetCumulativeCount() != 0 ||
			got.GetBucket()[len(h.Snapshot().Buckets)].GetCumulativeCount() != 2 {
			t.Errorf("%s: %v", name, got)
		}
	}
	if s := families["tandem_s_seconds"].GetMetric()[0].GetSummary(); s.GetSampleCount() != 3 || s.GetSampleSum() != 1.5 {
		t.Errorf("%v", s)
	}
}
