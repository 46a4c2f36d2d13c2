package status

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/agent/kube/kubestatus"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// fixedAgent is an agent and adapter whose state never changes, with a configuration that was read without a problem.
type fixedAgent struct {
	control.Agent // no other method is called
	cfg           core.Config
	state         core.State
	stats         monitor.Stats
	use           use.Table
	calls         []gpu.CallCount
}

func (a fixedAgent) State() core.State    { return a.state }
func (a fixedAgent) Stats() monitor.Stats { return a.stats }
func (a fixedAgent) Use() use.Table       { return a.use }

// adapter and reload are those of a fixedAgent.
type (
	adapter struct{ inv *inventory.Allocatable }
	reload  struct{}
)

func (adapter) Alive(context.Context) error { return nil }
func (adapter) Ready() error                { return nil }
func (a adapter) Stats() (stats []deviceplugin.ResourceStats) {
	for r := range deviceplugin.Resources(a.inv) {
		stats = append(stats, deviceplugin.ResourceStats{Resource: r})
	}
	return stats
}

func (reload) Last() (bool, time.Time)     { return true, time.Unix(1, 0) }
func (reload) Problems() []problem.Problem { return nil }

func (a fixedAgent) handler() http.Handler { return a.server().handler() }

func (a fixedAgent) server() *Server {
	return New(Options{
		Name: "k8s-gpu", Agent: a, Log: slog.New(slog.DiscardHandler), Adapter: kubestatus.DevicePlugins{Plugins: adapter{a.state.Allocatable}, Durations: kubestatus.NewDurations()}, Config: a.cfg, Reload: reload{},
		Sources: func() map[string]bool { return map[string]bool{} }, Problems: func() []problem.Problem { return nil },
		DriverCalls: func() []gpu.CallCount { return a.calls },
	})
}

// read is an agent after the first reading, in which every GPU was checked.
func read(cfg core.Config, s gpu.Snapshot) fixedAgent {
	var checks []health.Observation
	for _, d := range s.Devices {
		if d.Profile == "" {
			checks = append(checks, health.Observation{At: d.At, Kind: health.Checked,
				Sample: health.Sample{RecoveryAction: health.RecoveryNone, Events: health.Yes}})
		}
	}
	return fixedAgent{cfg: cfg, state: core.NewState(cfg).Read(cfg, time.Unix(0, 0), s, checks...)}
}

// observe is the agent after observations at a time.
func (a fixedAgent) observe(now time.Time, obs ...health.Observation) fixedAgent {
	a.state = a.state.Observe(a.cfg, now, obs...)
	return a
}

// scrape returns the lines of /metrics about this agent.
func (a fixedAgent) scrape(t *testing.T) []string {
	t.Helper()
	w := httptest.NewRecorder()
	a.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
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

// series are the lines of a metric.
func series(lines []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return !strings.HasPrefix(l, name+"{") })
}

// replicated is a configuration that shares GPUs.
func replicated(n int, gpus ...int) core.Config {
	cfg := core.DefaultConfig()
	var s inventory.Selector
	for _, i := range gpus {
		s.Indices = append(s.Indices, gpu.DeviceIndex{GPU: i, Instance: -1})
	}
	cfg.Policy.Rules = []inventory.Rule{{Select: s, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: n}}}
	return cfg
}
