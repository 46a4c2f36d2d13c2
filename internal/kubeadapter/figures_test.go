package kubeadapter

import (
	"fmt"
	"slices"
	"time"
)

// record records the times from when the kubelet accepted registrations to the first list of each affected resource.
func (s *storm) record(incident string, from time.Time) {
	for _, r := range s.adapter.Stats() {
		if at := s.kubelet.Listed(r.Resource); at.After(from) {
			s.took[incident] = append(s.took[incident], at.Sub(from))
		}
	}
}

// logTimes logs the times, and fails if those of restarts exceed the limit.
func (s *storm) logTimes() {
	var restarts []time.Duration
	for _, i := range incidents {
		if i.restart {
			restarts = append(restarts, s.took[i.name]...)
		}
		s.Log(figures(i.name, s.took[i.name]))
	}
	s.Log(figures("all restarts", restarts))
	limit, err := time.ParseDuration(envOr("TANDEM_STORM_P99", "0s"))
	if err != nil {
		s.Fatal(err)
	}
	if p99 := quantile(restarts, 0.99); limit > 0 && p99 > limit {
		s.Errorf("p99 %v, want no more than %v", p99, limit)
	}
}

func figures(name string, took []time.Duration) string {
	round := func(q float64) time.Duration { return quantile(took, q).Round(100 * time.Microsecond) }
	return fmt.Sprintf("%-42s n %5d  p50 %8v  p99 %8v  max %8v", name, len(took), round(0.5), round(0.99), round(1))
}

// quantile returns the q-quantile of times; zero if there are none.
func quantile(of []time.Duration, q float64) time.Duration {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	return sorted[min(int(q*float64(len(of))), len(of)-1)]
}
