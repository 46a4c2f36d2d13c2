//go:build gpu

package nvidia

import (
	"encoding/xml"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// These tests need a GPU: go test -tags gpu -run Hardware ./internal/core/nvidia

func hardware(t *testing.T) *Session {
	t.Helper()
	s, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// smi is one value per GPU from nvidia-smi.
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
			t.Errorf("%s: %q, nvidia-smi reports %q", c.field, c.got, want)
		}
	}
	for i, text := range smi(t, "pci.bus_id") {
		if want, err := gpu.ParsePCIAddress(text); err != nil || string(want) != addresses[i] {
			t.Errorf("GPU %d: %s, nvidia-smi reports %s (%v)", i, addresses[i], text, err)
		}
	}
	if want := smi(t, "driver_version")[0]; snap.Driver.Version != want {
		t.Errorf("driver %s, nvidia-smi reports %s", snap.Driver.Version, want)
	}
}

// smiReport is the part of `nvidia-smi -q -x` that is compared.
type smiReport struct {
	GPUs []struct {
		UUID         string `xml:"uuid"`
		Serial       string `xml:"serial"`
		Architecture string `xml:"product_architecture"`
		Brand        string `xml:"product_brand"`
		ECC          string `xml:"ecc_mode>current_ecc"`
		Instances    []struct {
			Index           int    `xml:"index"`
			GI              uint32 `xml:"gpu_instance_id"`
			CI              uint32 `xml:"compute_instance_id"`
			Multiprocessors int    `xml:"device_attributes>shared>multiprocessor_count"`
			CopyEngines     int    `xml:"device_attributes>shared>copy_engine_count"`
			Decoders        int    `xml:"device_attributes>shared>decoder_count"`
			Encoders        int    `xml:"device_attributes>shared>encoder_count"`
			JPEGDecoders    int    `xml:"device_attributes>shared>jpg_count"`
			OFAs            int    `xml:"device_attributes>shared>ofa_count"`
		} `xml:"mig_devices>mig_device"`
	} `xml:"gpu"`
}

// TestHardwareFacts compares the properties of devices with the report of nvidia-smi.
func TestHardwareFacts(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "nvidia-smi", "-q", "-x").Output()
	must(t, err)
	var want smiReport
	must(t, xml.Unmarshal(out, &want))
	devices := map[gpu.Placement]gpu.Device{}
	for _, d := range snapshot(t, hardware(t)).Devices {
		devices[d.At] = d
	}
	known := func(text string) string {
		if text == "N/A" || text == "Unknown" || strings.HasPrefix(text, "[") {
			return ""
		}
		return text
	}
	for _, g := range want.GPUs {
		at := gpu.WholeGPU(gpu.DeviceID(g.UUID))
		d := devices[at]
		got := []string{d.Serial, d.Architecture, d.Brand, d.ECC.String()}
		want := []string{known(g.Serial), known(g.Architecture), known(g.Brand), known(g.ECC)}
		if d.ID == "" || !slices.Equal(got, want) {
			t.Errorf("%s: %q, nvidia-smi reports %q", g.UUID, got, want)
		}
		links, err := exec.CommandContext(t.Context(), "nvidia-smi", "nvlink", "-s", "-i", g.UUID).Output()
		if active := strings.Count(string(links), "GB/s"); err == nil && d.NVLinks != active {
			t.Errorf("%s: %d NVLinks, nvidia-smi reports %d", g.UUID, d.NVLinks, active)
		}
		for _, i := range g.Instances {
			at.GI, at.CI = i.GI, i.CI
			d := devices[at]
			want := gpu.Slices{
				GPU: d.Slices.GPU, Compute: d.Slices.Compute, Multiprocessors: i.Multiprocessors, CopyEngines: i.CopyEngines,
				Decoders: i.Decoders, Encoders: i.Encoders, JPEGDecoders: i.JPEGDecoders, OFAs: i.OFAs,
			}
			if d.ID == "" || d.Slices != want || d.Instance != i.Index || d.Slices.GPU == 0 || d.Slices.Compute > d.Slices.GPU {
				t.Errorf("%s: number %d, %+v, nvidia-smi reports %+v", at, d.Instance, d.Slices, i)
			}
		}
	}
	if len(want.GPUs) == 0 {
		t.Error("nvidia-smi reports no GPU")
	}
}

func TestHardwareProbeUsageAndWait(t *testing.T) {
	s := hardware(t)
	snap := snapshot(t, s)
	obs, err := s.Probe()
	must(t, err)
	for _, o := range obs {
		if o.Kind != health.Checked {
			t.Errorf("%+v", o)
		}
		t.Logf("%+v", o.Sample)
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
