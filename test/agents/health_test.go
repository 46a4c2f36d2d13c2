package agents

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/report"
)

const model = "NVIDIA H100 80GB HBM3"

// A simulated fault reaches the orchestrator, and an operator ends it.
func TestOperatorsCommands(t *testing.T) {
	both(t, "h100x8", map[string]string{"simulation": "true"}, func(a *agent) {
		a.start()
		a.healthy(8, 8)
		id := a.driver.UUID(3)
		a.prints("XID_79", "simulate", "xid", "79", "--gpu", "3")
		a.healthy(8, 7)
		if d := a.devices()[id]; d.Healthy || !strings.HasPrefix(d.Reason, "simulated: lost: XID 79 ") || len(d.Reason) > 200 {
			t.Errorf("the GPU is %+v", d)
		}
		if err := a.allocate(id); err == nil || !strings.Contains(err.Error(), "simulated: ") {
			a.Errorf("allocation: %v, want a refusal because of a simulated fault", err)
		}
		a.prints("simulated: lost", "inspect")
		var r report.Report
		out, err := a.command("inspect", "--json")
		if err := json.Unmarshal([]byte(out), &r); err != nil || r.Source != report.FromAgent || len(r.Devices) != 8 || len(r.Conditions) != 1 {
			a.Errorf("%v\n%s", err, out)
		}
		if err != nil || a.program == k8sGPU && a.kubelet.Page(a.ctx, "/inventory") != out {
			a.Errorf("%v: /inventory differs from inspect --json:\n%s", err, out)
		}
		a.metrics(`tandem_device_condition{cause="XID_79",ci="",gi="",gpu="`+id+`",simulated="true",state="lost"} 1`,
			`tandem_xid_errors_total{gpu="`+id+`",xid="79"} 0`) // a simulated fault is not counted

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
		a.end(ends[0])
		if left, err := filepath.Glob(a.setup.StateDir + "/*.sock"); err != nil || len(left) > 0 {
			a.Errorf("left behind: %v, %v", left, err)
		}
		a.prints("no agent is running: this is what an agent that starts now would offer", "inspect", "--driver-root", a.driver.Root)
	})
}

func TestSimulationMustBeEnabled(t *testing.T) {
	both(t, "t4", nil, func(a *agent) {
		a.start()
		a.healthy(1, 1)
		out, err := a.command("simulate", "xid", "79", "--gpu=0")
		if err == nil || !strings.Contains(out, "simulation = true") && !strings.Contains(out, "--simulation=true") {
			a.Errorf("%v: %s", err, out)
		}
	})
}

// A restart clears no fault and counts none twice: the first list of the next process has it.
func TestHistorySurvivesARestart(t *testing.T) {
	for _, e := range ends {
		t.Run(e.name, func(t *testing.T) {
			both(t, "h100x8", nil, func(a *agent) {
				a.start()
				a.healthy(8, 8)
				a.fault(2, 95)
				a.healthy(8, 7)
				a.metrics(`tandem_xid_errors_total{gpu="`+a.driver.UUID(2)+`",xid="95"} 1`, `tandem_health_source_up{source="history"} 1`)
				a.onDisk(`"Code": 95`)
				a.end(e)
				a.start()
				if ids := a.firstUnhealthy(8); !slices.Equal(ids, []string{a.driver.UUID(2)}) {
					a.Errorf("unhealthy in the first list: %v", ids)
				}
				a.counts("2:XID_95:1")
				a.metrics(`tandem_xid_errors_total{gpu="` + a.driver.UUID(2) + `",xid="95"} 1`)
			})
		})
	}
}

// onDisk waits until the history has text.
func (a *agent) onDisk(text string) {
	a.Helper()
	a.await("the history on disk", func() bool {
		file, err := os.ReadFile(filepath.Join(a.setup.StateDir, a.program+".json"))
		return err == nil && strings.Contains(string(file), text)
	})
}

// What need not be saved immediately is saved at the end.
func TestLastSave(t *testing.T) {
	both(t, "t4", nil, func(a *agent) {
		a.start()
		a.healthy(1, 1)
		a.fault(0, 31)
		a.counts("0:XID_31:1")
		a.end(ends[0])
		a.start()
		a.healthy(1, 1)
		a.counts("0:XID_31:1")
	})
}

// XIDs that NVML does not report come from the kernel log, without the names of processes.
func TestKernelLog(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		log := a.useKernelLog()
		a.start()
		a.healthy(8, 8)
		log.xid(4, 119, "pid=1582259, name=secret, Timeout after 6s of waiting for RPC response from GPU4 GSP!")
		a.healthy(8, 7)
		a.metrics(`tandem_xid_errors_total{gpu="`+a.driver.UUID(4)+`",xid="119"} 1`, `tandem_health_source_up{source="kernel_log"} 1`)
		if d := a.devices()[a.driver.UUID(4)]; !strings.Contains(d.Reason, "XID 119 ") || strings.Contains(d.Reason, "secret") {
			a.Errorf("want the text of the kernel without the process: %+v", d)
		}
		if out, err := a.command("inspect", "--json"); err != nil || !strings.Contains(out, "Timeout after 6s") || strings.Contains(out, "secret") {
			a.Errorf("want the text of the kernel without the process: %v\n%s", err, out)
		}
	})
}

// What the kernel logs while no agent runs, or in its last moments, counts once, when the next one starts. What was there before
// the first start, and what an operator has cleared, does not count again.
func TestXIDsLoggedWhileNoAgentRuns(t *testing.T) {
	for _, e := range ends {
		t.Run(e.name, func(t *testing.T) {
			both(t, "h100x8", nil, func(a *agent) {
				log := a.useKernelLog()
				log.xid(1, 119, "a fault")
				a.start()
				a.healthy(8, 8)
				log.xid(4, 119, "a fault")
				a.healthy(8, 7)
				a.prints("cleared", "clear", "--gpu=4")
				a.healthy(8, 8)
				a.fault(3, 95)
				a.healthy(8, 7)
				log.xid(3, 95, "a fault") // which the agent has from the driver
				a.onDisk(`"Code": 95`)
				a.end(e)
				log.xid(5, 119, "a fault")
				a.start()
				ids, want := a.firstUnhealthy(8), []string{a.driver.UUID(3), a.driver.UUID(5)}
				slices.Sort(ids)
				if slices.Sort(want); !slices.Equal(ids, want) {
					a.Errorf("unhealthy in the first list: %v, want %v", ids, want)
				}
				a.counts("3:XID_95:1 4:XID_119:1 5:XID_119:1")
				a.metrics(`tandem_xid_errors_total{gpu="`+a.driver.UUID(1)+`",xid="119"} 0`,
					`tandem_xid_errors_total{gpu="`+a.driver.UUID(4)+`",xid="119"} 1`, `tandem_xid_errors_total{gpu="`+a.driver.UUID(5)+`",xid="119"} 1`)
				a.end(e)
				a.start()
				log.xid(6, 119, "a fault")
				a.healthy(8, 5)
				a.counts("3:XID_95:1 4:XID_119:1 5:XID_119:1 6:XID_119:1")
			})
		})
	}
}

// An agent without state directory and kernel log works, and warns once of each.
func TestWithoutSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	both(t, "t4", map[string]string{"kernel_log": file + "/kmsg"}, func(a *agent) {
		if err := os.WriteFile(a.setup.StateDir, nil, 0o600); err != nil { // where the folder would be
			a.Fatal(err)
		}
		a.start()
		a.healthy(1, 1)
		a.logs("WARN", "kernel log unavailable: XIDs that NVML does not report are missed")
		a.logs("WARN", "control socket unavailable")
		a.logs("WARN", "health history not saved")
		a.metrics(`tandem_health_source_up{source="history"} 0`, `tandem_health_source_up{source="kernel_log"} 0`)
		if a.program == k8sGPU {
			if page := a.kubelet.Page(a.ctx, "/inventory"); !strings.Contains(page, "kernel log unavailable") || !strings.Contains(page, "health history: ") {
				a.Errorf("/inventory has no warnings:\n%s", page)
			}
		}
	})
}

// With health_mode = observe, faults are reported and withdraw nothing.
func TestObserveMode(t *testing.T) {
	both(t, "h100x8", map[string]string{"health_mode": "observe"}, func(a *agent) {
		a.start()
		a.healthy(8, 8)
		id := a.driver.UUID(1)
		lists := 0
		if a.program == k8sGPU {
			lists = len(a.kubelet.Lists(resource))
		}
		a.fault(1, 95)
		a.await("the reason", func() bool {
			return strings.HasPrefix(a.devices()[id].Reason, "observed, not enforced: unhealthy: XID 95 ")
		})
		a.metrics(`tandem_device_health{device="`+id+`",model="`+model+`",state="unhealthy"} 1`,
			`tandem_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`)
		a.healthy(8, 8)
		if err := a.allocate(id); err != nil {
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
			if err := a.allocate(a.driver.UUID(0)); err != nil {
				a.Fatal(err)
			}
			a.fault(0, 31)
			a.counts("0:XID_31:" + string(rune('1'+n)))
			a.metrics(`tandem_xid_errors_total{gpu="` + a.driver.UUID(0) + `",xid="31"} ` + string(rune('1'+n)))
		}
		if c := a.report().Conditions; len(c) != 1 || c[0].Cause != "WORKLOADS_FAILING" {
			a.Errorf("conditions: %+v", c)
		}
		a.metrics(`cause="WORKLOADS_FAILING"`)
		if a.program == nomadGPU {
			a.statistic(a.driver.UUID(0), "degraded: ")
		}
	})
}

// statistic checks the health of a device in Nomad's statistics.
func (a *agent) statistic(id, prefix string) {
	a.Helper()
	stats, err := a.nomad.Stats(a.ctx, time.Second)
	if err != nil {
		a.Fatal(err)
	}
	select {
	case s := <-stats:
		health := s.Groups[0].InstanceStats[id].Stats.Attributes["Health"]
		if health == nil || !strings.HasPrefix(*health.StringVal, prefix) {
			a.Errorf("the statistics have the health %+v", health)
		}
	case <-time.After(patience):
		a.Error("no statistics")
	}
}
