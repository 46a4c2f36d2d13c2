// Package metrics has the metrics that both agents share: their names, and how their values follow from the agent's state. The
// adapters' own are in agent/kube/kubestatus and agent/nomad. All values are computed at a scrape; none is kept, so
// that a series ends with what it is about.
package metrics

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/metric"
)

// Source is what the shared metrics are computed from: values of one moment.
type Source struct {
	Agent, Version string // "k8s-gpu", "2.0.0"
	Config         core.Config
	State          core.State // with the inventory as the orchestrator sees it
	Stats          monitor.Stats
	Use            use.Table
	Proofs         *proof.Result   // the latest decision about proofs; nil = no GPU is proved
	Resets         *reset.Result   // the latest decision about resets; nil = none is made
	Limits         *limit.Table    // limits of device memory; nil = there are none
	Sources        map[string]bool // whether each source of health information apart from the driver can be used; it is changed
	DriverCalls    []gpu.CallCount

	// Of the latest reads of the configuration: whether the latest succeeded, and when one last did.
	ReloadOK   bool
	ReloadedAt time.Time

	Resources  []string                    // those that have series also without a unit
	ResourceOf func(inventory.Unit) string // the name by which an orchestrator knows a unit
}

var shared metric.Set

// Shared returns the metrics that both agents have.
func Shared() []*metric.Metric { return shared.Metrics() }

var (
	buildInfo = shared.Gauge("build_info", "The agent.", "agent", "version", "go")

	// The names are Prometheus' own for the same values.
	reloaded   = shared.Gauge("config_last_reload_successful", "0 if the latest read of the configuration failed: an older one is in force.")
	reloadTime = shared.Gauge("config_last_reload_success_timestamp_seconds", "When the configuration was last read without a problem.")

	callCount   = shared.Counter("driver_calls_total", "Driver calls that have returned. driver_calls_stuck counts those that have not.", "function")
	callErrors  = shared.Counter("driver_call_errors_total", "Driver calls that failed. An answer that the device or the driver lacks the value is no failure.", "function")
	callSeconds = shared.Counter("driver_call_seconds_total", "Duration of the driver calls that have returned. nvmlEventSetWait waits for events.", "function")
)

// Collector is a prometheus.Collector of the shared metrics, which it computes from what it returns. It makes no driver call and takes no lock.
type Collector func() Source

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) { shared.Describe(ch) }

// Collect implements prometheus.Collector.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	s, p := c(), metric.NewSamples(ch)
	p.Add(buildInfo, 1, s.Agent, s.Version, runtime.Version())
	p.AddBool(reloaded, s.ReloadOK)
	p.Add(reloadTime, timestamp(s.ReloadedAt))
	for _, c := range s.DriverCalls {
		p.Add(callCount, float64(c.Calls), c.Function)
		p.Add(callErrors, float64(c.Errors), c.Function)
		p.Add(callSeconds, c.Time.Seconds(), c.Function)
	}
	collectInventory(p, s)
	collectHealth(p, s)
	collectUse(p, s)
	collectProofs(p, s)
	collectResets(p, s)
	collectLimits(p, s)
}

// timestamp is a time in seconds since 1970, in milliseconds; 0 for none.
func timestamp(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}
