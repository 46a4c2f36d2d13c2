package status

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// fixedAgent is an agent whose state never changes.
type fixedAgent struct {
	control.Agent // no other method is called
	state         core.State
	stats         monitor.Stats
}

func (a fixedAgent) State() core.State    { return a.state }
func (a fixedAgent) Stats() monitor.Stats { return a.stats }

// idleAdapter is an adapter without resources.
type idleAdapter struct{}

func (idleAdapter) Alive(context.Context) error        { return nil }
func (idleAdapter) Ready() error                       { return nil }
func (idleAdapter) Stats() []kubeadapter.ResourceStats { return nil }

func newTestServer(o Options) *Server {
	o.Reload, o.Sources = loaded{}, func() map[string]bool { return map[string]bool{} }
	return New(o)
}

// loaded is a configuration that was read without a problem.
type loaded struct{}

func (loaded) Last() (bool, time.Time) { return true, time.Unix(1, 0) }
func (loaded) Warnings() []string      { return nil }

// read is a state after the first reading, in which every GPU was checked.
func read(cfg core.Config, s gpu.Snapshot) core.State {
	var checks []health.Observation
	for _, d := range s.Devices {
		if d.Profile == "" {
			checks = append(checks, health.Observation{At: d.At, Kind: health.Checked,
				Sample: health.Sample{RecoveryAction: health.RecoveryNone, Events: health.Yes}})
		}
	}
	return core.NewState(cfg).Read(cfg, time.Unix(0, 0), s, checks...)
}

// scrape returns the lines of /metrics about this agent.
func scrape(t *testing.T, o Options) []string {
	t.Helper()
	w := httptest.NewRecorder()
	newTestServer(o).handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%d: %s", w.Code, w.Body)
	}
	var lines []string
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, "tandem_") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

func has(t *testing.T, lines []string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !slices.Contains(lines, w) {
			t.Errorf("no line %s", w)
		}
	}
}

// What an alert watches is there before anything happens, with a 0.
func TestSeriesExistBeforeTheFirstFault(t *testing.T) {
	cfg := core.DefaultConfig()
	o := Options{Agent: fixedAgent{state: read(cfg, coretest.GPUs(2))}, Adapter: idleAdapter{}, Config: cfg}
	id := string(coretest.GPU(1))
	lines := scrape(t, o)
	has(t, lines,
		`tandem_device_health{device="`+id+`",model="NVIDIA H100 80GB HBM3",state="healthy"} 1`,
		`tandem_device_health{device="`+id+`",model="NVIDIA H100 80GB HBM3",state="lost"} 0`,
		`tandem_health_transitions_total{device="`+id+`"} 0`,
		`tandem_gpu_recovery_action{action="none",gpu="`+id+`"} 1`,
		`tandem_gpu_recovery_action{action="gpu_reset",gpu="`+id+`"} 0`,
		`tandem_xid_errors_total{gpu="`+id+`",xid="79"} 0`,
		`tandem_xid_errors_total{gpu="`+id+`",xid="other"} 0`,
		`tandem_events_total{event="FatalPoisonError",gpu="`+id+`"} 0`,
		`tandem_health_check_duration_seconds_sum 0`, `tandem_health_check_duration_seconds_count 0`,
		`tandem_last_health_check_timestamp_seconds 0`, `tandem_driver_calls_stuck 0`,
		`tandem_health_source_up{source="events"} 1`, `tandem_health_source_up{source="recovery_action"} 1`,
	)
	for _, line := range lines {
		if strings.Contains(line, "tandem_device_condition{") || strings.Contains(line, `source="history"`) || strings.Contains(line, `source="kernel_log"`) {
			t.Errorf("nothing stands, and what is off is not down: %s", line)
		}
	}
}

func TestFaultsAreShown(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Health.XIDs = map[uint64]xid.Effect{999: xid.Withdraws}
	now := time.Unix(1000, 0)
	at := func(gi uint32) gpu.Placement { return gpu.Placement{GPU: coretest.GPU(1), GI: gi, CI: 0} }
	snapshot := coretest.GPUs(2)
	for gi := range uint32(2) {
		id := gpu.DeviceID("MIG-" + string(rune('a'+gi)))
		snapshot.Devices = append(snapshot.Devices, gpu.Device{ID: id, At: at(gi), Index: 1, Profile: "3g.40gb"})
	}
	state := read(cfg, gpu.NewSnapshot(snapshot)).Observe(cfg, now,
		health.Observation{At: at(0), Kind: health.XID, Code: 94},
		health.Observation{At: at(1), Kind: health.XID, Code: 94},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 999},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 998},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 997},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 13},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Event, Code: 0x2000},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.ProbeFailed},
		health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.XID, Code: 79, Simulated: true},
	)
	state, _, err := state.Ignore(cfg, now, health.Command{GPU: coretest.GPU(0), Cause: "XID_999"}, now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Adapter: idleAdapter{}, Config: cfg, Agent: fixedAgent{state: state, stats: monitor.Stats{
		Checks: 3, CheckTime: 1500 * time.Millisecond, LastCheck: time.UnixMilli(1_700_000_000_250), Stuck: 2, EventsFail: true,
		Transitions: map[gpu.DeviceID]uint64{coretest.GPU(0): 7},
	}}}
	a, b := string(coretest.GPU(0)), string(coretest.GPU(1))
	has(t, scrape(t, o),
		`tandem_device_condition{cause="XID_94",ci="0",gi="0",gpu="`+b+`",simulated="false",state="degraded"} 1`,
		`tandem_device_condition{cause="XID_94",ci="0",gi="1",gpu="`+b+`",simulated="false",state="degraded"} 1`,
		`tandem_device_condition{cause="XID_999",ci="",gi="",gpu="`+a+`",simulated="false",state="unhealthy"} 0`,
		`tandem_device_condition{cause="PROBE_FAILED",ci="",gi="",gpu="`+b+`",simulated="false",state="healthy"} 0`,
		`tandem_device_condition{cause="XID_79",ci="",gi="",gpu="`+b+`",simulated="true",state="lost"} 1`,
		`tandem_device_condition{cause="EVENT_0x2000",ci="",gi="",gpu="`+a+`",simulated="false",state="unhealthy"} 1`,
		`tandem_xid_errors_total{gpu="`+b+`",xid="94"} 2`,
		`tandem_xid_errors_total{gpu="`+a+`",xid="13"} 1`,
		`tandem_xid_errors_total{gpu="`+a+`",xid="999"} 1`,
		`tandem_xid_errors_total{gpu="`+a+`",xid="other"} 2`,
		`tandem_xid_errors_total{gpu="`+b+`",xid="79"} 0`,
		`tandem_events_total{event="FatalPoisonError",gpu="`+a+`"} 1`,
		`tandem_health_transitions_total{device="`+a+`"} 7`,
		`tandem_device_health{device="`+b+`",model="NVIDIA H100 80GB HBM3",state="lost"} 1`,
		`tandem_health_check_duration_seconds_sum 1.5`, `tandem_health_check_duration_seconds_count 3`,
		`tandem_last_health_check_timestamp_seconds 1.70000000025e+09`, `tandem_driver_calls_stuck 2`,
		`tandem_health_source_up{source="events"} 0`, `tandem_health_source_up{source="recovery_action"} 1`,
	)
}

// A driver that makes codes up makes no series of its own but of what stands.
func TestUnknownCodesMakeNoSeries(t *testing.T) {
	cfg := core.DefaultConfig()
	state := read(cfg, coretest.GPUs(1))
	count := func(state core.State) (n int) {
		for _, line := range scrape(t, Options{Agent: fixedAgent{state: state}, Adapter: idleAdapter{}, Config: cfg}) {
			if !strings.HasPrefix(line, "tandem_device_condition{") {
				n++
			}
		}
		return n
	}
	before := count(state)
	for code := range uint64(500) {
		state = state.Observe(cfg, time.Unix(1, 0), health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 10_000 + code})
	}
	if after := count(state); after != before {
		t.Errorf("%d series, were %d", after, before)
	}
}

func TestSourcesOfTheDriver(t *testing.T) {
	cfg := core.DefaultConfig()
	at := gpu.WholeGPU(coretest.GPU(0))
	withoutEvents := read(cfg, coretest.GPUs(2)).Observe(cfg, time.Unix(1, 0), health.Observation{At: at, Kind: health.Checked, Sample: health.Sample{Events: health.No}})
	for name, c := range map[string]struct {
		state core.State
		stats monitor.Stats
		want  map[string]bool
	}{
		"healthy":       {state: read(cfg, coretest.GPUs(2)), want: map[string]bool{"events": true, "recovery_action": true}},
		"not asked yet": {state: core.NewState(cfg), want: map[string]bool{"events": false, "recovery_action": false}},
		"no GPU":        {state: read(cfg, coretest.GPUs(0)), want: map[string]bool{"events": true, "recovery_action": true}},
		"wait fails":    {state: read(cfg, coretest.GPUs(2)), stats: monitor.Stats{EventsFail: true}, want: map[string]bool{"events": false, "recovery_action": true}},
		"one GPU":       {state: withoutEvents, want: map[string]bool{"events": false, "recovery_action": false}},
	} {
		if diff := cmp.Diff(c.want, withDriverSources(map[string]bool{}, c.state, c.stats)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
