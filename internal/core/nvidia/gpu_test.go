//go:build gpu

package nvidia

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// These run where there is a GPU: go test -tags gpu -run Hardware ./internal/core/nvidia

func hardware(t *testing.T) *Session {
	t.Helper()
	s, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// smi asks nvidia-smi for one value per GPU.
func smi(t *testing.T, field string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nvidia-smi", "--query-gpu="+field, "--format=csv,noheader,nounits").Output()
	must(t, err)
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func TestHardwareSnapshotTwiceIsEqual(t *testing.T) {
	s := hardware(t)
	first, second := snapshot(t, s), snapshot(t, s)
	if !first.Equal(second) || len(first.Devices) == 0 {
		t.Errorf("%s\n%s", render(first), render(second))
	}
	t.Log("\n" + render(first))
}

func TestHardwareAgreesWithNvidiaSMI(t *testing.T) {
	var ids, names, addresses []string
	snap := snapshot(t, hardware(t))
	for _, d := range snap.Devices {
		if d.Profile == "" {
			ids, names, addresses = append(ids, string(d.ID)), append(names, d.Model), append(addresses, string(d.PCI))
		}
	}
	for _, c := range []struct {
		field string
		got   []string
	}{{"uuid", ids}, {"name", names}} {
		if want := smi(t, c.field); !slices.Equal(c.got, want) {
			t.Errorf("%s: %q, nvidia-smi says %q", c.field, c.got, want)
		}
	}
	for i, text := range smi(t, "pci.bus_id") {
		if want, err := core.ParsePCIAddress(text); err != nil || string(want) != addresses[i] {
			t.Errorf("GPU %d: %s, nvidia-smi says %s (%v)", i, addresses[i], text, err)
		}
	}
	if want := smi(t, "driver_version")[0]; snap.Driver.Version != want {
		t.Errorf("driver %s, nvidia-smi says %s", snap.Driver.Version, want)
	}
}

func TestHardwareProbeUsageAndWait(t *testing.T) {
	s := hardware(t)
	snap := snapshot(t, s)
	obs, err := s.Probe()
	must(t, err)
	for _, o := range obs {
		if o.Kind != core.Checked {
			t.Errorf("%+v", o)
		}
		t.Logf("%+v", o.Vitals)
	}
	usage, err := s.Usage()
	if err != nil || len(usage) != len(snap.Devices) {
		t.Fatalf("%d of %d, %v", len(usage), len(snap.Devices), err)
	}
	for _, u := range usage {
		if u.MemoryTotal.OK && u.MemoryUsed.Value > u.MemoryTotal.Value || u.GPU.Value > 100 ||
			u.Temperature.Value > 120 || u.PowerLimit.OK && u.Power.Value > 2*u.PowerLimit.Value {
			t.Errorf("%+v", u)
		}
		t.Logf("%+v", u)
	}
	started := time.Now()
	events, err := s.Wait(100 * time.Millisecond)
	if took := time.Since(started); err != nil || took > 5*time.Second {
		t.Errorf("%+v, %v after %v", events, err, took)
	}
}

func BenchmarkHardwareSnapshot(b *testing.B) {
	s, err := Open(Options{})
	must(b, err)
	b.Cleanup(func() { must(b, s.Close()) })
	snapshot(b, s)
	for b.Loop() {
		snapshot(b, s)
	}
}

func BenchmarkHardwareProbe(b *testing.B) {
	s, err := Open(Options{})
	must(b, err)
	b.Cleanup(func() { must(b, s.Close()) })
	snapshot(b, s)
	for b.Loop() {
		if _, err := s.Probe(); err != nil {
			b.Fatal(err)
		}
	}
}
