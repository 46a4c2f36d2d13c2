package metrics

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

func TestSourcesOfTheDriver(t *testing.T) {
	cfg, now := core.DefaultConfig(), time.Unix(1, 0)
	var checks []health.Observation
	for i := range 2 {
		checks = append(checks, health.Observation{At: gpu.WholeGPU(coretest.GPU(i)), Kind: health.Checked,
			Sample: health.Sample{RecoveryAction: health.RecoveryNone, Events: health.Yes}})
	}
	two := core.NewState(cfg).Read(cfg, now, coretest.GPUs(2), checks...)
	withoutEvents := two.Observe(cfg, now,
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked, Sample: health.Sample{Events: health.No}})
	for name, c := range map[string]struct {
		state core.State
		stats monitor.Stats
		want  map[string]bool
	}{
		"healthy":      {state: two, want: map[string]bool{"events": true, "recovery_action": true}},
		"not read yet": {state: core.NewState(cfg), want: map[string]bool{"events": false, "recovery_action": false}},
		"no GPU":       {state: core.NewState(cfg).Read(cfg, now, coretest.GPUs(0)), want: map[string]bool{"events": true, "recovery_action": true}},
		"wait fails":   {state: two, stats: monitor.Stats{EventsFail: true}, want: map[string]bool{"events": false, "recovery_action": true}},
		"one GPU":      {state: withoutEvents, want: map[string]bool{"events": false, "recovery_action": false}},
	} {
		if diff := cmp.Diff(c.want, withDriverSources(map[string]bool{}, c.state, c.stats)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
