package dra

import (
	"fmt"
	"slices"
	"time"
)

// spread is a sample of durations.
type spread []time.Duration

// quantile is the smallest duration that is not below a part q of the sample.
func (s spread) quantile(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s))
	return sorted[max(0, min(len(sorted)-1, int(q*float64(len(sorted))+0.999999)-1))]
}

func (s spread) String() string {
	r := func(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }
	return fmt.Sprintf("p50 %v, p99 %v, max %v of %d", r(s.quantile(0.5)), r(s.quantile(0.99)), r(slices.Max(s)), len(s))
}
