package status

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// offering is an adapter that offers what an inventory has.
type offering struct {
	idleAdapter
	inv *inventory.Inventory
}

func (o offering) Stats() (stats []kubeadapter.ResourceStats) {
	for r := range kubeadapter.Resources(o.inv) {
		stats = append(stats, kubeadapter.ResourceStats{Resource: r})
	}
	return stats
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

func scraped(t *testing.T, cfg core.Config, state core.State) []string {
	t.Helper()
	return scrape(t, Options{Agent: fixedAgent{state: state}, Adapter: offering{inv: state.Inventory}, Config: cfg})
}

// A device is a series, however many share it; what counts units says so.
func TestSharesMakeNoSeries(t *testing.T) {
	cfg := replicated(100)
	alone, shared := core.DefaultConfig(), read(cfg, coretest.GPUs(16))
	lines := scraped(t, cfg, shared)
	if n, was := len(lines), len(scraped(t, alone, read(alone, coretest.GPUs(16)))); n > was+12 { // of another resource
		t.Errorf("%d lines for 1600 units, %d for 16", n, was)
	}
	id := string(coretest.GPU(3))
	has(t, lines,
		`tandem_device_units{device="`+id+`",resource="nvidia.com/gpu.shared",sharing="time-slicing"} 100`,
		`tandem_device_health{device="`+id+`",model="NVIDIA H100 80GB HBM3",state="healthy"} 1`,
		`tandem_health_transitions_total{device="`+id+`"} 0`,
		`tandem_devices{health="healthy",resource="nvidia.com/gpu.shared"} 1600`,
		`tandem_policy_warnings 0`, `tandem_device_overlaps 0`,
	)
	for _, line := range lines {
		if strings.Contains(line, "::") {
			t.Errorf("a unit has a series: %s", line)
		}
	}
}

func TestPolicyInMetrics(t *testing.T) {
	cfg := replicated(4, 0, 9)
	cfg.Policy.Rules = append(cfg.Policy.Rules, inventory.Rule{Select: inventory.Selector{IDs: []gpu.DeviceID{"GPU-x"}}})
	state := read(cfg, coretest.GPUs(2)).WithHost(cfg, time.Unix(1, 0), inventory.Host{
		Claims: []inventory.Claim{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(1))}},
	})
	has(t, scraped(t, cfg, state),
		`tandem_policy_warnings 1`, `tandem_device_overlaps 1`,
		`tandem_device_units{device="`+string(coretest.GPU(0))+`",resource="nvidia.com/gpu.shared",sharing="time-slicing"} 4`,
		`tandem_device_units{device="`+string(coretest.GPU(1))+`",resource="nvidia.com/gpu",sharing="exclusive"} 1`,
	)
}

// While shares come and the GPU itself goes, a scrape still has each series once.
func TestScrapeWhileThePolicyChanges(t *testing.T) {
	was, is := core.DefaultConfig(), replicated(2, 0)
	now := time.Unix(10, 0)
	state := read(was, coretest.GPUs(1)).Observe(is, now)
	id := string(coretest.GPU(0))
	lines := scraped(t, is, state)
	has(t, lines,
		`tandem_device_units{device="`+id+`",resource="nvidia.com/gpu",sharing="exclusive"} 1`,
		`tandem_device_units{device="`+id+`",resource="nvidia.com/gpu.shared",sharing="time-slicing"} 2`,
		`tandem_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`,
	)
	after := scraped(t, is, state.Observe(is, now.Add(time.Minute)))
	if slices.ContainsFunc(after, func(l string) bool {
		return strings.HasPrefix(l, "tandem_device_units{") && strings.Contains(l, "exclusive")
	}) {
		t.Error("the GPU itself is still offered")
	}
}
