package metrics

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/util/metric"
	"github.com/tandem-gpu/tandem/test/check"
)

// A request is in the bucket of its duration and in all above. Each method has its series before the first request.
func TestDurations(t *testing.T) {
	var set metric.Set
	d := NewDurations(set.Histogram("t_seconds", "Times.", "method"), "Allocate", "Prefer")
	for _, took := range []time.Duration{0, 50 * time.Microsecond, 50*time.Microsecond + 1, time.Second, time.Minute} {
		d.Observe("Prefer", took)
	}
	registry := prometheus.NewPedanticRegistry()
	check.NoError(t, registry.Register(d))
	families, err := registry.Gather()
	if err != nil || len(families) != 1 || families[0].GetName() != "tandem_t_seconds" || len(families[0].GetMetric()) != 2 {
		t.Fatalf("%v, %v", families, err)
	}
	h := families[0].GetMetric()[1].GetHistogram()
	if len(h.GetBucket()) != len(bounds) || h.GetSampleCount() != 5 {
		t.Fatalf("%v", h)
	}
	for _, b := range h.GetBucket() {
		want := uint64(2)
		if b.GetUpperBound() > bounds[0] {
			want = 3
		}
		if b.GetUpperBound() >= 1 {
			want = 4
		}
		if b.GetCumulativeCount() != want {
			t.Errorf("%v, want %d", b, want)
		}
	}
}

func BenchmarkObserve(b *testing.B) {
	var set metric.Set
	d := NewDurations(set.Histogram("t_seconds", "Times.", "method"))
	for b.Loop() {
		d.Observe("Allocate", time.Millisecond)
	}
}
