package pictures

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/agent/kube/kubestatus"
	"github.com/tandem-gpu/tandem/internal/agent/nomad"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	fleet "github.com/tandem-gpu/tandem/internal/fleet/metrics"
	"github.com/tandem-gpu/tandem/internal/operator/metrics"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/metric"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// exported are the labels of each metric that agents and gpu-fleet export: those that the code describes, and those of Go's runtime and of
// the process, which are on the page of an agent.
func exported(t *testing.T) map[string][]string {
	t.Helper()
	described := map[string][]string{}
	for _, m := range slices.Concat(metrics.Shared(), kubestatus.Metrics(), nomad.Metrics(), fleet.Metrics()) {
		switch m.Type {
		case metric.Histogram:
			described[m.Name+"_bucket"] = append(slices.Clone(m.Labels), "le")
			fallthrough
		case metric.Summary:
			described[m.Name+"_count"], described[m.Name+"_sum"] = m.Labels, m.Labels
		default:
			described[m.Name] = m.Labels
		}
	}
	page := startAgent(t).scrape()
	if len(page) < 40 {
		t.Errorf("only %d metrics on the page", len(page))
	}
	for name, labels := range page {
		if want, ok := described[name]; strings.HasPrefix(name, "tandem_") && (!ok || slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(want, l) })) {
			t.Errorf("the page has %s with labels %q, the code describes %q", name, slices.Compact(slices.Sorted(slices.Values(labels))), want)
		}
	}
	maps.Copy(page, described)
	return page
}

// values are the values of labels that have few.
func (e *expressions) values(metric string) map[string][]string {
	health := []string{"healthy", "degraded", "unknown", "unhealthy", "lost"}
	return map[string]map[string][]string{
		"tandem_device_health":                   {"state": health},
		"tandem_devices":                         {"health": health},
		"tandem_driver_info":                     {"state": {"pending", "absent", "failed", "ready", "released"}},
		"tandem_health_source_up":                {"source": {"kernel_log", "history", "events", "recovery_action"}},
		"tandem_cdi_devices":                     {"state": {"defined", "undefined"}},
		"tandem_device_clock_hertz":              {"clock": {"sm", "memory"}},
		"tandem_device_ecc_errors_total":         {"severity": {"corrected", "uncorrected"}},
		"tandem_request_duration_seconds_bucket": {"method": {"Allocate", "Reserve"}},
		"tandem_memory_limit_state": {
			"required": {"true", "false"}, "begun": {"true", "false"}, "state": {string(limit.Limited), string(limit.Late), string(limit.Unlimited), string(limit.Foreign), string(limit.Unknown)},
		},
		"tandem_memory_limit_problems": {"code": {
			string(problem.StaleLimit), string(problem.LimitOverridden), string(problem.LimitsUnknown), string(problem.LimitState),
		}},
		"tandem_fleet_gpus":        {"health": health},
		"tandem_fleet_budget_used": {"mode": {"act", "report"}},
		"tandem_fleet_waits": {"alert": {"true", "false"}, "reason": {
			string(rescue.ReasonUnread), string(rescue.ReasonHolders), string(rescue.ReasonNoPlace), string(rescue.ReasonLedger), string(rescue.ReasonBlocked), string(rescue.ReasonStuck),
		}},
	}[metric]
}
