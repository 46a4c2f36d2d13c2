package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// From a rehearsed fault to Nomad and back, by an operator's hand.
func TestOperatorsVerbs(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	a := run(t, m, shortDir(t), map[string]any{"simulation": true})
	a.healthy(8, 8)
	id := m.UUID(3)

	a.says("XID_79", "simulate", "xid", "79", "--gpu", "3")
	a.healthy(8, 7)
	devices := a.devices()
	if d := devices[id]; d.Healthy || !strings.HasPrefix(d.HealthDesc, "simulated: lost: XID 79 ") || len(d.HealthDesc) > 200 {
		t.Errorf("the GPU is %+v", d)
	}
	if _, err := a.Reserve([]string{id}); err == nil || !strings.Contains(err.Error(), "simulated: ") {
		t.Errorf("Reserve: %v, want a refusal that says it is a rehearsal", err)
	}
	var r report.Report
	out, err := a.ask("inspect", "--json")
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err != nil || r.Source != report.FromAgent || len(r.Devices) != 8 || len(r.Conditions) != 1 {
		t.Errorf("%v\n%s", err, out)
	}
	a.says("ignored until", "ignore", "--gpu="+id[:len("GPU-")+8], "--cause=xid 79", "--until=1h")
	a.healthy(8, 8)
	a.says("cleared", "clear", "--gpu=3")
	if out, err := a.ask("clear", "--gpu=3"); err == nil || out != "nomad-gpu clear: no condition on GPU "+id+"\n" {
		t.Errorf("clear of nothing: %v: %s", err, out)
	}
	if out, err := a.ask("clear", "--gpu=x", "--verified-at=y"); err == nil || strings.Count(out, "nomad-gpu clear: ") != 2 {
		t.Errorf("two mistakes: %v: %s", err, out)
	}
	a.said("condition cleared by operator", id)
	a.client.Kill()
	left, err := filepath.Glob(a.dir + "/*.sock")
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	a.says("no agent is running: this is what an agent that starts now would offer", append(flags(m), "--state-dir="+a.dir)...)
}

func TestSimulationMustBeAllowed(t *testing.T) {
	a := run(t, simdriver.Start(t, "t4"), shortDir(t), nil)
	a.healthy(1, 1)
	if out, err := a.ask("simulate", "xid", "79", "--gpu=0"); err == nil || !strings.Contains(out, "simulation = true") {
		t.Errorf("%v: %s", err, out)
	}
}

// A restart heals nothing.
func TestHistoryOutlivesTheProcess(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*agent){
		"asked to end": func(a *agent) { a.client.Kill() },
		"killed": func(a *agent) {
			await(a, "the history on disk", patience, func() bool {
				text, err := os.ReadFile(filepath.Join(a.dir, "nomad-gpu.json"))
				return err == nil && strings.Contains(string(text), `"Code": 95`)
			})
			a.kill()
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, dir := simdriver.StartParallel(t, "h100x8"), shortDir(t)
			a := run(t, m, dir, nil)
			a.healthy(8, 8)
			if err := m.XID(2, 95); err != nil {
				t.Fatal(err)
			}
			a.healthy(8, 7)
			end(a)
			p, _, _ := start(t)
			configure(t, p, keys(m, dir))
			ch, err := p.Fingerprint(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			first := receive(t, ch)
			if len(first.Devices) != 1 || len(first.Devices[0].Devices) != 8 {
				t.Fatalf("the first fingerprint after a restart: %v", first.Devices)
			}
			for _, d := range first.Devices[0].Devices {
				if d.Healthy == (d.ID == m.UUID(2)) {
					t.Errorf("the first fingerprint after a restart: %+v", d)
				}
			}
		})
	}
}

// What is no hurry to write is written at the end.
func TestLastWord(t *testing.T) {
	m, dir := simdriver.Start(t, "t4"), shortDir(t)
	a := run(t, m, dir, nil)
	a.healthy(1, 1)
	if err := m.XID(0, 31); err != nil {
		t.Fatal(err)
	}
	counted := func(a *agent) func() bool {
		return func() bool {
			c := reportOf(a).Counts
			return len(c) == 1 && c[0].Cause == "XID_31" && c[0].Count == 1
		}
	}
	await(t, "count of XID 31", patience, counted(a))
	a.client.Kill()
	b := run(t, m, dir, nil)
	b.healthy(1, 1)
	await(t, "count of XID 31 in the next process", patience, counted(b))
}

// XIDs that NVML keeps to itself come from the kernel log.
func TestKernelLog(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a := run(t, m, shortDir(t), map[string]any{"kernel_log": path})
	a.healthy(8, 8)
	pci, err := m.Get(4, "pci")
	if err != nil {
		t.Fatal(err)
	}
	record := "4,77,9000000,-;NVRM: Xid (PCI:" + strings.TrimSuffix(pci, ".0") +
		"): 119, pid=1582259, name=secret, Timeout after 6s of waiting for RPC response from GPU4 GSP!\n"
	if err := os.WriteFile(path, []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	a.healthy(8, 7)
	devices := a.devices()
	if d := devices[m.UUID(4)]; !strings.Contains(d.HealthDesc, "XID 119 ") || strings.Contains(d.HealthDesc, "secret") {
		t.Errorf("want the kernel's words without the process: %+v", d)
	}
}

// What the plugin can't have, it says once and does without. By default nobody minds a missing kernel log.
func TestWorksWithoutItsSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a := run(t, simdriver.Start(t, "t4"), filepath.Join(file, "state"), map[string]any{"kernel_log": file + "/kmsg"})
	a.healthy(1, 1)
	a.said("[WARN]", "XIDs that only the kernel log has are not seen")
	a.said("[WARN]", "control socket unavailable")
	a.said("[WARN]", "health history not saved")
}

// Nothing is on disk before Nomad asks about devices: most processes are started to be told the
// configuration, and end.
func TestConfigurationLeavesNoTrace(t *testing.T) {
	m, dir := simdriver.Start(t, "t4"), filepath.Join(shortDir(t), "state")
	p, client, _ := start(t)
	for range 2 {
		configure(t, p, keys(m, dir))
	}
	client.Kill()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want nothing", dir, err)
	}
}

// Two processes for a moment: the second one takes orders as soon as the first is gone.
func TestNextProcessTakesOrders(t *testing.T) {
	m, dir := simdriver.Start(t, "t4"), shortDir(t)
	a := run(t, m, dir, nil)
	a.healthy(1, 1)
	await(t, "an answer", patience, func() bool { return reportOf(a).Source == report.FromAgent })
	b := run(t, m, dir, nil)
	b.healthy(1, 1)
	b.said("[INFO]", "control socket unavailable")
	a.kill() // and its socket stays
	await(t, "an answer of the second process", patience, func() bool { return reportOf(b).Source == report.FromAgent })
	if n := strings.Count(b.log.String(), "control socket unavailable"); n != 1 {
		t.Errorf("said %d times that it waits", n)
	}
}

// Observed faults are told and withdraw nothing.
func TestObserveMode(t *testing.T) {
	t.Parallel()
	m := simdriver.StartParallel(t, "h100x8")
	a := run(t, m, shortDir(t), map[string]any{"health_mode": "observe"})
	a.healthy(8, 8)
	if err := m.XID(1, 95); err != nil {
		t.Fatal(err)
	}
	await(t, "description", patience, func() bool {
		devices := a.devices()
		return strings.HasPrefix(devices[m.UUID(1)].HealthDesc, "observed, not enforced: unhealthy: XID 95 ")
	})
	a.healthy(8, 8)
	if _, err := a.Reserve([]string{m.UUID(1)}); err != nil {
		t.Errorf("Reserve: %v", err)
	}
}

// Different workloads that fail on one GPU make it suspect: the plugin counts what it hands out.
func TestReservationsAreCounted(t *testing.T) {
	m := simdriver.Start(t, "t4")
	a := run(t, m, shortDir(t), nil)
	a.healthy(1, 1)
	for n := range uint64(3) {
		if _, err := a.Reserve([]string{m.UUID(0)}); err != nil {
			t.Fatal(err)
		}
		if err := m.XID(0, 31); err != nil {
			t.Fatal(err)
		}
		await(t, "count of XID 31", patience, func() bool {
			r := reportOf(a)
			return len(r.Counts) == 1 && r.Counts[0].Cause == "XID_31" && r.Counts[0].Count == n+1
		})
	}
	if c := reportOf(a).Conditions; len(c) != 1 || c[0].Cause != "WORKLOADS_FAILING" {
		t.Errorf("conditions: %+v", c)
	}
	stats, err := a.Stats(t.Context(), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	health := receive(t, stats).Groups[0].InstanceStats[m.UUID(0)].Stats.Attributes["Health"]
	if health == nil || !strings.HasPrefix(*health.StringVal, "degraded: ") {
		t.Errorf("statistics say of the health: %+v", health)
	}
}
