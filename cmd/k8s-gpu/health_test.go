package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// ask runs a verb beside the agents of a state directory.
func ask(t *testing.T, stateDir string, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary(t), append(args, "--state-dir="+stateDir)...).CombinedOutput()
	return string(out), err
}

// says fails unless a verb succeeds and says all of want.
func says(t *testing.T, stateDir, want string, args ...string) {
	t.Helper()
	out, err := ask(t, stateDir, args...)
	if err != nil || !strings.Contains(out, want) {
		t.Errorf("%v: %v, want %q:\n%s", args, err, want, out)
	}
}

// From a rehearsed fault to the kubelet and back, by an operator's hand.
func TestOperatorsVerbs(t *testing.T) {
	t.Parallel()
	m, k, dir := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t)
	a := start(t, append(on(m.Root, k), "--state-dir="+dir, "--simulation")...)
	a.awaitHealthy(k, 8)
	a.said(`registered`)

	says(t, dir, "XID_79", "simulate", "xid", "79", "--gpu", "3")
	a.awaitHealthy(k, 7)
	if _, err := k.Allocate(a.ctx, gpu, m.UUID(3)); err == nil || !strings.Contains(err.Error(), "simulated: ") {
		t.Errorf("Allocate: %v, want a refusal that says it is a rehearsal", err)
	}
	says(t, dir, "simulated: lost", "inspect")
	var r report.Report
	out, err := ask(t, dir, "inspect", "--json")
	if err := json.Unmarshal([]byte(out), &r); err != nil || r.Source != report.FromAgent || len(r.Conditions) != 1 {
		t.Errorf("%v\n%s", err, out)
	}
	if _, page := a.get("/inventory"); err != nil || page != out {
		t.Errorf("/inventory says otherwise than inspect --json: %v\n%s", err, page)
	}
	a.metrics(`tandem_device_condition{cause="XID_79",ci="",gi="",gpu="`+m.UUID(3)+`",simulated="true",state="lost"} 1`,
		`tandem_xids_total{gpu="`+m.UUID(3)+`",xid="79"} 0`) // a rehearsal is not counted

	says(t, dir, "ignored until", "ignore", "--gpu="+m.UUID(3)[:len("GPU-")+8], "--cause=xid 79", "--until=1h")
	a.awaitHealthy(k, 8)
	says(t, dir, "cleared", "clear", "--gpu=3")
	if out, err := ask(t, dir, "clear", "--gpu=3"); err == nil || !strings.Contains(out, "k8s-gpu: no condition on GPU "+m.UUID(3)) {
		t.Errorf("clear of nothing: %v: %s", err, out)
	}
	a.metrics(`tandem_health_transitions_total{device="` + m.UUID(3) + `"} 2`)
}

func TestSimulationMustBeAllowed(t *testing.T) {
	m, k, dir := simdriver.Start(t, "t4"), startKubelet(t), shortDir(t)
	a := start(t, append(on(m.Root, k), "--state-dir="+dir)...)
	a.awaitHealthy(k, 1)
	out, err := ask(t, dir, "simulate", "xid", "79", "--gpu=0")
	if err == nil || !strings.Contains(out, "--simulation=true") {
		t.Errorf("%v: %s", err, out)
	}
}

// A restart heals nothing, and tells nothing twice.
func TestHistoryOutlivesTheAgent(t *testing.T) {
	t.Parallel()
	m, k, dir := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t)
	args := append(on(m.Root, k), "--state-dir="+dir)
	a := start(t, args...)
	a.awaitHealthy(k, 8)
	if err := m.XID(2, 95); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	a.metrics(`tandem_xids_total{gpu="`+m.UUID(2)+`",xid="95"} 1`, `tandem_health_source_up{source="history"} 1`)
	if err := a.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if code := a.ended(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	lists := len(k.Lists(gpu))
	a = start(t, args...)
	if err := k.Await(a.ctx, "a list of the next agent", func() bool { return len(k.Lists(gpu)) > lists }); err != nil {
		t.Fatal(err)
	}
	for _, d := range k.Lists(gpu)[lists] {
		if sick := d.GetHealth() != v1beta1.Healthy; sick != (d.GetID() == m.UUID(2)) {
			t.Errorf("the first list after a restart: %s is %s", d.GetID(), d.GetHealth())
		}
	}
	a.metrics(`tandem_xids_total{gpu="` + m.UUID(2) + `",xid="95"} 1`)
}

// XIDs that NVML keeps to itself come from the kernel log.
func TestKernelLog(t *testing.T) {
	t.Parallel()
	m, k := simdriver.StartParallel(t, "h100x8"), startKubelet(t)
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a := start(t, append(on(m.Root, k), "--kernel-log="+path)...)
	a.awaitHealthy(k, 8)
	pci, err := m.Get(4, "pci")
	if err != nil {
		t.Fatal(err)
	}
	record := "4,77,9000000,-;NVRM: Xid (PCI:" + strings.TrimSuffix(pci, ".0") +
		"): 119, pid=1582259, name=secret, Timeout after 6s of waiting for RPC response from GPU4 GSP!\n"
	if err := os.WriteFile(path, []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	a.metrics(`tandem_xids_total{gpu="`+m.UUID(4)+`",xid="119"} 1`, `tandem_health_source_up{source="kernel_log"} 1`)
	if _, page := a.get("/inventory"); !strings.Contains(page, "Timeout after 6s") || strings.Contains(page, "secret") {
		t.Errorf("want the kernel's words without the process:\n%s", page)
	}
}

// What the agent can't have, it says once and does without.
func TestWorksWithoutItsSources(t *testing.T) {
	m, k := simdriver.Start(t, "t4"), startKubelet(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a := start(t, append(on(m.Root, k), "--state-dir="+filepath.Join(file, "state"), "--kernel-log="+file+"/kmsg")...)
	a.awaitHealthy(k, 1)
	a.said(`level=WARN msg="XIDs that only the kernel log has are not seen"`)
	a.said(`level=WARN msg="control socket unavailable"`)
	a.metrics(`tandem_health_source_up{source="history"} 0`, `tandem_health_source_up{source="kernel_log"} 0`)
	if _, page := a.get("/inventory"); !strings.Contains(page, `"warnings"`) {
		t.Errorf("/inventory has no warning:\n%s", page)
	}
}

// Observed faults are shown and withdraw nothing.
func TestObserveMode(t *testing.T) {
	m, k := simdriver.Start(t, "h100x8"), startKubelet(t)
	a := start(t, append(on(m.Root, k), "--health-mode=observe")...)
	a.awaitHealthy(k, 8)
	lists := len(k.Lists(gpu))
	if err := m.XID(1, 95); err != nil {
		t.Fatal(err)
	}
	a.metrics(`tandem_device_health{device="`+m.UUID(1)+`",model="NVIDIA H100 80GB HBM3",state="unhealthy"} 1`,
		`tandem_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`)
	if _, err := k.Allocate(a.ctx, gpu, m.UUID(1)); err != nil {
		t.Errorf("Allocate: %v", err)
	}
	if n := len(k.Lists(gpu)); n != lists {
		t.Errorf("%d lists because of what is only observed", n-lists)
	}
	if _, page := a.get("/inventory"); !strings.Contains(page, "observed, not enforced: unhealthy: XID 95") {
		t.Errorf("/inventory:\n%s", page)
	}
}

// Different workloads that fail on one GPU make it suspect: the agent counts what it hands out.
func TestAllocationsAreCounted(t *testing.T) {
	m, k := simdriver.Start(t, "t4"), startKubelet(t)
	a := start(t, on(m.Root, k)...)
	a.awaitHealthy(k, 1)
	for n := range 3 {
		if _, err := k.Allocate(a.ctx, gpu, m.UUID(0)); err != nil {
			t.Fatal(err)
		}
		if err := m.XID(0, 31); err != nil {
			t.Fatal(err)
		}
		a.metrics(`tandem_xids_total{gpu="` + m.UUID(0) + `",xid="31"} ` + string(rune('1'+n)))
	}
	a.metrics(`cause="WORKLOADS_FAILING"`)
}

// metrics waits until /metrics has every line.
func (a *agent) metrics(lines ...string) {
	a.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		_, page := a.get("/metrics")
		missing := ""
		for _, line := range lines {
			if !strings.Contains(page, line) {
				missing = line
			}
		}
		if missing == "" {
			return
		}
		select {
		case <-tick.C:
		case <-a.ctx.Done():
			a.Fatalf("/metrics never has %s:\n%s", missing, page)
		}
	}
}
