package agents

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

const model = "NVIDIA H100 80GB HBM3"

// A simulated fault reaches the orchestrator, and an operator ends it.
func TestOperatorsCommands(t *testing.T) {
	both(t, "h100x8", map[string]any{"simulation": "true"}, func(a *agent) {
		a.start()
		a.healthy(8, 8)
		id := a.driver.UUID(3)
		a.prints("XID_79", "simulate", "xid", "79", "--gpu", "3")
		a.healthy(8, 7)
		if d := a.devices()[id]; d.Healthy || !strings.HasPrefix(a.words(d), "simulated: lost: XID 79 ") || len(a.words(d)) > 200 {
			t.Errorf("the GPU is %+v", d)
		}
		if _, err := a.allocate(id); err == nil || !strings.Contains(err.Error(), "simulated: ") {
			a.Errorf("allocation: %v, want a refusal because of a simulated fault", err)
		}
		a.prints("simulated: lost", "inspect")
		var r report.Report
		out, err := a.command("inspect", "--json")
		if err := json.Unmarshal([]byte(out), &r); err != nil || r.Source != report.FromAgent || len(r.Devices) != 8 || len(r.Conditions) != 1 {
			a.Errorf("%v\n%s", err, out)
		}
		if _, page := a.get("/inventory"); err != nil || a.program == k8sGPU && page != out {
			a.Errorf("%v: /inventory differs from inspect --json:\n%s", err, out)
		}
		a.metrics(`tandem_device_condition{action="reboot the node",cause="XID_79",ci="",gi="",gpu="`+id+`",simulated="true",state="lost"} 1`,
			`tandem_xid_errors_total{gpu="`+id+`",xid="79"} 0`, // a simulated fault is not counted
			`tandem_allocation_errors_total{resource="nvidia.com/gpu"} 1`)

		a.prints("ignored until", "ignore", "--gpu="+id[:len("GPU-")+8], "--cause=xid 79", "--until=1h")
		a.healthy(8, 8)
		a.prints("cleared", "clear", "--gpu=3")
		if out, err := a.command("clear", "--gpu=3"); err == nil || !strings.HasPrefix(out, a.program+": no condition ") || !strings.Contains(out, id) {
			a.Errorf("clear of nothing: %v: %s", err, out)
		}
		if out, err := a.command("clear", "--gpu=x", "--verified-at=y"); err == nil || strings.Count(out, a.program+": ") != 2 {
			a.Errorf("two problems: %v: %s", err, out)
		}
		a.logs("WARN", "condition cleared by operator")
		a.metrics(`tandem_health_transitions_total{device="` + id + `"} 2`)
		a.stop()
		a.prints("no agent is running: this is what an agent that starts now would offer", "inspect", "--driver-root", a.driver.Root)
	})
}

// What need not be saved immediately is saved at the end.
func TestLastSave(t *testing.T) {
	both(t, "t4", nil, func(a *agent) {
		a.start()
		a.healthy(1, 1)
		a.xid(0, 31)
		a.counts("0:XID_31:1")
		a.stop()
		a.start()
		a.healthy(1, 1)
		a.counts("0:XID_31:1")
	})
}

// An agent without state directory and kernel log works, and warns once of each.
func TestWithoutSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	both(t, "t4", map[string]any{"kernel_log": file + "/kmsg"}, func(a *agent) {
		if err := os.WriteFile(a.state, nil, 0o600); err != nil { // where the folder would be
			a.Fatal(err)
		}
		a.start()
		a.healthy(1, 1)
		a.logs("WARN", "kernel log unavailable: XIDs that NVML does not report, such as 62, 79")
		a.logs("WARN", "control socket unavailable")
		a.logs("WARN", "health history not saved")
		a.metrics(`tandem_health_source_up{source="history"} 0`, `tandem_health_source_up{source="kernel_log"} 0`)
		a.shows("/inventory", "kernel log unavailable", "health history: ")
	})
}

// With health_mode = observe, faults are reported and withdraw nothing.
func TestObserveMode(t *testing.T) {
	both(t, "h100x8", map[string]any{"health_mode": "observe"}, func(a *agent) {
		a.start()
		a.healthy(8, 8)
		id, lists := a.driver.UUID(1), 0
		if a.program == k8sGPU {
			lists = len(a.kubelet.Lists(resource))
		}
		a.xid(1, 95)
		a.await("the reason", func() bool {
			return strings.HasPrefix(a.words(a.devices()[id]), "observed, not enforced: unhealthy: XID 95 ")
		})
		a.metrics(`tandem_device_health{device="`+id+`",model="`+model+`",state="unhealthy"} 1`,
			`tandem_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`)
		a.healthy(8, 8)
		if _, err := a.allocate(id); err != nil {
			a.Errorf("allocation: %v", err)
		}
		if a.program == k8sGPU && len(a.kubelet.Lists(resource)) != lists {
			a.Errorf("%d lists because of a fault that is only observed", len(a.kubelet.Lists(resource))-lists)
		}
	})
}

// Several workloads that fail on one GPU degrade it: the agent counts allocations.
func TestFailingWorkloads(t *testing.T) {
	both(t, "t4", nil, func(a *agent) {
		a.start()
		a.healthy(1, 1)
		for n := range 3 {
			a.allocates(0)
			a.xid(0, 31)
			a.counts("0:XID_31:" + string(rune('1'+n)))
			a.metrics(`tandem_xid_errors_total{gpu="` + a.driver.UUID(0) + `",xid="31"} ` + string(rune('1'+n)))
		}
		if c := a.report().Conditions; len(c) != 1 || c[0].Cause != "WORKLOADS_FAILING" {
			a.Errorf("conditions: %+v", c)
		}
		a.metrics(`cause="WORKLOADS_FAILING"`, `tandem_allocations_total{resource="nvidia.com/gpu"} 3`)
		if a.program == nomadGPU {
			a.statistic(a.driver.UUID(0), "degraded: ")
		}
	})
}

// statistic waits for the health of a device in Nomad's statistics.
func (a *agent) statistic(id, prefix string) {
	a.Helper()
	a.await("statistics", func() bool {
		groups := a.nomad.Statistics()
		if len(groups) == 0 {
			return false
		}
		health := groups[0].InstanceStats[id].Stats.Attributes["Health"]
		return health != nil && strings.HasPrefix(*health.StringVal, prefix)
	})
}
