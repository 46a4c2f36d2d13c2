package latency

import (
	"sync"
	"testing"
	"time"
)

// Each request is in the bucket of its duration and in all above; the last bucket and the count have all.
func TestHistogram(t *testing.T) {
	var h Histogram
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			for _, d := range []time.Duration{0, bounds[0], bounds[0] + 1, time.Second, time.Minute} {
				h.Observe(d)
			}
		})
	}
	all.Wait()
	s := h.Snapshot()
	if s.Count != 50 || s.Sum != 10*(2*bounds[0]+1+61*time.Second) || len(s.Buckets) != len(bounds) {
		t.Fatalf("%+v", s)
	}
	for _, b := range s.Buckets {
		want := uint64(20)
		if b.Bound > bounds[0] {
			want = 30
		}
		if b.Bound >= time.Second {
			want = 40
		}
		if b.Count != want {
			t.Errorf("%v: %d, want %d", b.Bound, b.Count, want)
		}
	}
}

func BenchmarkObserve(b *testing.B) {
	var h Histogram
	for b.Loop() {
		h.Since(time.Now())
	}
}
