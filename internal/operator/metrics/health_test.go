package metrics

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
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
	structured := func(second health.Tristate) core.State {
		checks := slices.Clone(checks)
		checks[0].Sample.OperationalEvents, checks[1].Sample.OperationalEvents = health.Yes, second
		return core.NewState(cfg).Read(cfg, now, coretest.GPUs(2), checks...)
	}
	for name, c := range map[string]struct {
		state core.State
		stats monitor.Stats
		want  map[string]bool
	}{
		"healthy":            {state: two, want: map[string]bool{"events": true, "recovery_action": true}},
		"not read yet":       {state: core.NewState(cfg), want: map[string]bool{"events": false, "recovery_action": false}},
		"no GPU":             {state: core.NewState(cfg).Read(cfg, now, coretest.GPUs(0)), want: map[string]bool{"events": true, "recovery_action": true}},
		"wait fails":         {state: two, stats: monitor.Stats{EventsFail: true}, want: map[string]bool{"events": false, "recovery_action": true}},
		"operational events": {state: structured(health.Yes), want: map[string]bool{"events": true, "recovery_action": true, "operational_events": true}},
		"of one GPU":         {state: structured(health.NotReported), want: map[string]bool{"events": true, "recovery_action": true, "operational_events": true}},
		"one fails":          {state: structured(health.No), want: map[string]bool{"events": true, "recovery_action": true, "operational_events": false}},
		"one GPU":            {state: withoutEvents, want: map[string]bool{"events": false, "recovery_action": false}},
	} {
		if diff := cmp.Diff(c.want, withDriverSources(map[string]bool{}, c.state, c.stats)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// Operational events are counted by severity; a GPU whose driver has none has no series.
func TestOperationalEvents(t *testing.T) {
	cfg, now := core.DefaultConfig(), time.Unix(1, 0)
	at := gpu.WholeGPU(coretest.GPU(0))
	resource := func(inventory.Unit) string { return "r" }
	event := func(e health.OperationalEvent) health.Observation {
		return health.Observation{At: at, Kind: health.Operational, Operational: e}
	}
	s := core.NewState(cfg).Read(cfg, now, coretest.GPUs(2), health.Observation{At: at, Kind: health.Checked, Sample: health.Sample{OperationalEvents: health.Yes}})
	want := map[string]float64{"total 0 informational": 0, "total 0 corrected": 0, "total 0 recoverable": 0, "total 0 fatal": 0, "total 0 other": 0, "dropped_total 0": 0}
	if diff := cmp.Diff(want, seriesOf(t, Source{State: s, Config: cfg, Sources: map[string]bool{}, ResourceOf: resource}, "tandem_operational_events_")); diff != "" {
		t.Errorf("before the first: %s", diff)
	}
	s = s.Observe(cfg, now, event(health.OperationalEvent{Severity: health.SeverityFatal}), event(health.OperationalEvent{Severity: 77, Attributes: 1 << 6}),
		event(health.OperationalEvent{Severity: 78}))
	want["total 0 fatal"], want["total 0 other"], want["dropped_total 0"] = 1, 2, 1
	if diff := cmp.Diff(want, seriesOf(t, Source{State: s, Config: cfg, Sources: map[string]bool{}, ResourceOf: resource}, "tandem_operational_events_")); diff != "" {
		t.Error(diff)
	}
}
