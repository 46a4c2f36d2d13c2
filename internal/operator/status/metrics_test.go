package status

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/test/check"
)

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
	agent := read(cfg, gpu.NewSnapshot(snapshot)).observe(now,
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
	var err error
	agent.state, _, err = agent.state.Ignore(cfg, now, health.Command{GPU: coretest.GPU(0), Cause: "XID_999"}, now.Add(time.Hour))
	check.NoError(t, err)
	agent.stats = monitor.Stats{
		Checks: 3, CheckTime: 1500 * time.Millisecond, LastCheck: time.UnixMilli(1_700_000_000_250), Stuck: 2, EventsFail: true,
		Transitions: map[gpu.DeviceID]uint64{coretest.GPU(0): 7},
	}
	a, b := string(coretest.GPU(0)), string(coretest.GPU(1))
	has(t, agent.scrape(t),
		`tandem_device_condition{action="restart the application; reset when convenient",cause="XID_94",ci="0",gi="0",gpu="`+b+`",simulated="false",state="degraded"} 1`,
		`tandem_device_condition{action="restart the application; reset when convenient",cause="XID_94",ci="0",gi="1",gpu="`+b+`",simulated="false",state="degraded"} 1`,
		`tandem_device_condition{action="check the kernel log; report it to NVIDIA",cause="XID_999",ci="",gi="",gpu="`+a+`",simulated="false",state="unhealthy"} 0`,
		`tandem_device_condition{action="see the driver's log, reset the GPU",cause="PROBE_FAILED",ci="",gi="",gpu="`+b+`",simulated="false",state="healthy"} 0`,
		`tandem_device_condition{action="reboot the node",cause="XID_79",ci="",gi="",gpu="`+b+`",simulated="true",state="lost"} 1`,
		`tandem_device_condition{action="drain and reset the GPU",cause="EVENT_0x2000",ci="",gi="",gpu="`+a+`",simulated="false",state="unhealthy"} 1`,
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

// Unknown codes make no series but those of their conditions. Without a check the values of checks are 0.
func TestUnknownCodesMakeNoSeries(t *testing.T) {
	agent := read(core.DefaultConfig(), coretest.GPUs(1))
	before := agent.scrape(t)
	has(t, before, `tandem_health_check_duration_seconds_sum 0`, `tandem_health_check_duration_seconds_count 0`, `tandem_last_health_check_timestamp_seconds 0`)
	for code := range uint64(500) {
		agent = agent.observe(time.Unix(1, 0), health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 10_000 + code})
	}
	after := agent.scrape(t)
	if n := len(after) - len(series(after, "tandem_device_condition")); n != len(before) {
		t.Errorf("%d series, were %d", n, len(before))
	}
}

// A device has one series, also if it has many units.
func TestSharesMakeNoSeries(t *testing.T) {
	lines := read(replicated(100), coretest.GPUs(16)).scrape(t)
	if n, was := len(lines), len(read(core.DefaultConfig(), coretest.GPUs(16)).scrape(t)); n > was+12 { // of another resource
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
	agent := read(cfg, coretest.GPUs(2))
	agent.state = agent.state.WithHost(cfg, time.Unix(1, 0), inventory.Host{
		Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(1))}},
	})
	has(t, agent.scrape(t),
		`tandem_policy_warnings 1`, `tandem_device_overlaps 1`,
		`tandem_device_units{device="`+string(coretest.GPU(0))+`",resource="nvidia.com/gpu.shared",sharing="time-slicing"} 4`,
		`tandem_device_units{device="`+string(coretest.GPU(1))+`",resource="nvidia.com/gpu",sharing="exclusive"} 1`,
	)
}

// While a device changes from exclusive to shared, each series is there once.
func TestScrapeWhileThePolicyChanges(t *testing.T) {
	now := time.Unix(10, 0)
	agent := read(core.DefaultConfig(), coretest.GPUs(1))
	agent.cfg = replicated(2, 0)
	agent = agent.observe(now)
	id := string(coretest.GPU(0))
	has(t, agent.scrape(t),
		`tandem_device_units{device="`+id+`",resource="nvidia.com/gpu",sharing="exclusive"} 1`,
		`tandem_device_units{device="`+id+`",resource="nvidia.com/gpu.shared",sharing="time-slicing"} 2`,
		`tandem_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`,
	)
	if units := series(agent.observe(now.Add(time.Minute)).scrape(t), "tandem_device_units"); len(units) != 1 || strings.Contains(units[0], "exclusive") {
		t.Errorf("the exclusive device is still offered: %q", units)
	}
}

// Every device has a series from the start, so that an alert has one before the first node is missing; agents that pass no
// nodes, and nodes without any that is visible, have none.
func TestMissingDeviceNodesInMetrics(t *testing.T) {
	const metric = "tandem_device_nodes_missing"
	cfg := replicated(4, 0)
	lacking := coretest.GPUs(2)
	lacking.Nodes = slices.DeleteFunc(lacking.Nodes, func(n string) bool { return n == "/dev/nvidia-uvm" || n == "/dev/nvidia1" })
	if got := series(read(cfg, lacking).scrape(t), metric); len(got) > 0 {
		t.Errorf("no nodes are passed: %q", got)
	}
	cfg.Injection.Nodes = true
	a, b := metric+`{device="`+string(coretest.GPU(0))+`"} `, metric+`{device="`+string(coretest.GPU(1))+`"} `
	lines := read(cfg, lacking).scrape(t)
	has(t, lines, `tandem_devices{health="healthy",resource="nvidia.com/gpu.shared"} 4`)
	if got := series(lines, metric); !slices.Equal(got, []string{a + "1", b + "2"}) {
		t.Errorf("%q", got)
	}
	has(t, read(cfg, coretest.GPUs(1)).scrape(t), a+"0")
	lacking.Nodes = nil
	if got := series(read(cfg, lacking).scrape(t), metric); len(got) > 0 {
		t.Errorf("no node is visible: %q", got)
	}
}

// Devices are counted by the specification, whether or not it is usable; without a need for CDI there is no series.
func TestCDIInMetrics(t *testing.T) {
	const metric = "tandem_cdi_devices"
	cfg := core.DefaultConfig()
	if got := series(read(cfg, coretest.GPUs(2)).scrape(t), metric); len(got) > 0 {
		t.Errorf("CDI is not used: %q", got)
	}
	cfg.Injection.CDI = inventory.CDIAuto
	agent := read(cfg, coretest.GPUs(3))
	if got := series(agent.scrape(t), metric); len(got) > 0 {
		t.Errorf("not known yet: %q", got)
	}
	agent.state = agent.state.WithHost(cfg, time.Unix(1, 0), inventory.Host{
		CDI: &inventory.CDI{Incarnation: agent.state.Incarnation, Defined: []gpu.DeviceID{coretest.GPU(0), coretest.GPU(2)}},
	})
	has(t, agent.scrape(t), metric+`{state="defined"} 2`, metric+`{state="undefined"} 1`)
}
