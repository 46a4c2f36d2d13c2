package live

import (
	"context"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A driver of which statistics take longer than Nomad's interval: Nomad gets them, and the health of the GPUs is checked as
// often as configured.
func TestSlowStatisticsArriveAndKeepNoCheckFromItsTurn(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := stage(t, m, func(c *core.Config) { c.Probe = time.Second })
	must(t, s.kubelet.AwaitHealthy(t.Context(), "nvidia.com/gpu", 8))
	must(t, m.Slow(simdriver.All, "nvmlDeviceGetPowerUsage", 1100*time.Millisecond))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ch, err := s.nomad.plugin.Stats(ctx, time.Second)
	must(t, err)
	before, began := s.monitor.Stats().Checks, time.Now()
	readings := map[time.Time]bool{}
	for len(readings) < 6 {
		r, ok := <-ch
		if !ok || ctx.Err() != nil {
			t.Fatalf("numbers of %d readings within %v", len(readings), patience)
		}
		must(t, r.Error)
		for _, g := range r.Groups {
			if d := g.InstanceStats[s.UUID(0)]; d != nil && d.Summary.IntNumeratorVal != nil {
				readings[d.Timestamp] = true
			}
		}
	}
	took := time.Since(began)
	promised(t, "six readings", took, 10*time.Second)
	if n := s.monitor.Stats().Checks - before; n < 3 {
		t.Errorf("%d health checks in %v", n, took)
	}
}
