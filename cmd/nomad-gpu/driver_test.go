package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/inspect"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func install(t testing.TB, machine string) *simdriver.Machine {
	t.Helper()
	m, err := simdriver.Install(t.Context(), t.TempDir(), machine)
	if err != nil {
		t.Skip("SKIPPED: no simulated driver: ", err)
	}
	return m
}

// keys is the config block for a simulated machine.
func keys(m *simdriver.Machine) map[string]any {
	return map[string]any{
		"driver_root": m.Root,
		"sysfs_root":  filepath.Join(m.Root, "sys"),
		"procfs_root": filepath.Join(m.Root, "proc"),
	}
}

func flags(m *simdriver.Machine, more ...string) []string {
	return append([]string{
		"inspect", "--driver-root", m.Root,
		"--sysfs-root", filepath.Join(m.Root, "sys"), "--procfs-root", filepath.Join(m.Root, "proc"),
	}, more...)
}

func TestInspect(t *testing.T) {
	m := install(t, "h100x8")
	if err := m.Fail(simdriver.GPU(3), "*", "UNKNOWN", 0); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(binary, flags(m, "--json")...).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got inspect.Report
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got.Driver.State != "ready" || len(got.Devices) != 7 || len(got.Excluded) != 1 {
		t.Fatalf("got %+v, want 7 devices and 1 exclusion", got)
	}
	if e := got.Excluded[0]; e.Index != 3 || e.Reason == "" {
		t.Errorf("excluded: %+v", e)
	}
	for _, d := range got.Devices {
		if !d.Schedulable || d.MemoryBytes == 0 || d.Model == "" || d.NUMANode < 0 {
			t.Errorf("%+v", d)
		}
		if _, err := os.Stat(filepath.Join(m.Root, "sys/bus/pci/devices", string(d.PCI))); err != nil {
			t.Error(err)
		}
	}
	table, err := exec.Command(binary, flags(m)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"driver ready ", string(got.Devices[6].ID), "not offered", got.Excluded[0].Reason} {
		if !strings.Contains(string(table), want) {
			t.Errorf("%q is not in\n%s", want, table)
		}
	}
}

// Nomad kills what has not ended two seconds after it was asked to.
func TestEndsInTime(t *testing.T) {
	for name, hang := range map[string]string{
		"well":           "",
		"init hangs":     "nvmlInit",
		"reading hangs":  "nvmlDeviceGetName",
		"shutdown hangs": "nvmlShutdown",
	} {
		t.Run(name, func(t *testing.T) {
			m := install(t, "h100x8")
			if hang != "" {
				if err := m.Hang(simdriver.All, hang); err != nil {
					t.Fatal(err)
				}
			}
			p, client, cmd := start(t)
			configure(t, p, keys(m))
			f, err1 := p.Fingerprint(t.Context())
			s, err2 := p.Stats(t.Context(), time.Second)
			if err1 != nil || err2 != nil {
				t.Fatal(err1, err2)
			}
			receive(t, f)
			receive(t, s)
			begin := time.Now()
			client.Kill()
			if d := time.Since(begin); d >= 2*time.Second {
				t.Errorf("the end took %s", d)
			}
			if !cmd.ProcessState.Success() {
				t.Errorf("ended with %s", cmd.ProcessState)
			}
		})
	}
}

// The numbers for the README: go test -v -run TestResidentMemory ./cmd/nomad-gpu
func TestResidentMemory(t *testing.T) {
	const limit = 24 // MiB; nomad-device-nvidia takes 35 on a machine of this kind
	m := install(t, "h100x8")
	p, _, cmd := start(t)
	configure(t, p, keys(m))
	f, err1 := p.Fingerprint(t.Context())
	s, err2 := p.Stats(t.Context(), time.Second)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	var ids []string
	for _, g := range receive(t, f).Devices {
		for _, d := range g.Devices {
			ids = append(ids, d.ID)
		}
	}
	if len(ids) != 8 {
		t.Fatalf("%d devices", len(ids))
	}
	for range 10 {
		receive(t, s)
		for range 100 {
			if _, err := p.Reserve(ids); err != nil {
				t.Fatal(err)
			}
		}
	}
	total, anonymous := resident(t, cmd.Process.Pid)
	t.Logf("8 GPUs, 10 samples and 1000 reservations later: %.1f MiB resident, %.1f of them anonymous", total, anonymous)
	if total > limit {
		t.Errorf("want %d MiB or less", limit)
	}
}

func resident(t *testing.T, pid int) (total, anonymous float64) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		for key, to := range map[string]*float64{"VmRSS:": &total, "RssAnon:": &anonymous} {
			if rest, ok := strings.CutPrefix(line, key); ok {
				if _, err := fmt.Sscan(rest, to); err != nil {
					t.Fatal(err)
				}
				*to /= 1024
			}
		}
	}
	return total, anonymous
}
