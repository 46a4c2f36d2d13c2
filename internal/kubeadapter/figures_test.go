package kubeadapter

import (
	"fmt"
	"slices"
	"time"
)

// note takes the times from when the kubelet took registrations to the first list of each resource that had
// to come back.
func (s *storm) note(incident string, from time.Time) {
	for _, r := range s.adapter.Stats() {
		if at := s.kubelet.Listed(r.Resource); at.After(from) {
			s.took[incident] = append(s.took[incident], at.Sub(from))
		}
	}
}

// report prints the times, and holds those of restarts against the limit.
func (s *storm) report() {
	var restarts []time.Duration
	for _, i := range incidents {
		if i.restart {
			restarts = append(restarts, s.took[i.name]...)
		}
		s.Log(figures(i.name, s.took[i.name]))
	}
	s.Log(figures("all restarts", restarts))
	limit, err := time.ParseDuration(setting("TANDEM_STORM_P99", "0s"))
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

// quantile is the least of the times that q of them do not exceed; zero of none.
func quantile(of []time.Duration, q float64) time.Duration {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	return sorted[min(int(q*float64(len(of))), len(of)-1)]
}
