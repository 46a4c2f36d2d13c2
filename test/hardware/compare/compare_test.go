package compare

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// sample is the output of nvidia-smi on a machine: testdata has XML in the form of three versions, with values of public listings.
func sample(t *testing.T, name string, s SMI) Source {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".xml")
	if err != nil {
		t.Fatal(err)
	}
	s.XML = string(text)
	all, err := s.Source()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

const (
	first    = "GPU-00000000-0000-4000-8000-000000000001"
	second   = "GPU-00000000-0000-4000-8000-000000000002"
	instance = "MIG-00000000-0000-5000-8000-000000000001"
)

var a100 = SMI{
	List: "GPU 0: NVIDIA A100-SXM4-80GB (UUID: " + first + ")\n  MIG 2g.20gb     Device  0: (UUID: " + instance + ")\n" +
		"GPU 1: NVIDIA A100-SXM4-80GB (UUID: " + second + ")\n",
	Query:  first + ", 8.0\n" + second + ", 8.0\n",
	NVLink: "GPU 0: NVIDIA A100-SXM4-80GB (UUID: " + first + ")\n\t Link 0: 25 GB/s\n\t Link 1: <inactive>\n\t Link 2: 25 GB/s\n",
	Topo: "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \tNV12\tPXB\t0-31\t1\t\tN/A\n" +
		"GPU1\tNV12\t X \tSYS\t32-63\t0,2\t\tN/A\nNIC0\tPXB\tSYS\t X \t\t\t\t\n\nLegend:\n  X    = Self\n",
}

// The texts of each version of nvidia-smi are read as the same values.
func TestSMI(t *testing.T) {
	for _, c := range []struct {
		name    string
		smi     SMI
		machine Values
		devices map[string]Values
	}{
		{"a100-v12", a100, Values{DriverVersion: "535.54.03", CUDAVersion: "12.2", GPUCount: "2", Connection(0, 1): "NV12"}, map[string]Values{
			first: {
				Index: "0", PCIAddress: "0000:01:00.0", Name: "NVIDIA A100-SXM4-80GB", Brand: "NVIDIA", Architecture: "Ampere", Serial: "1000000000001",
				Minor: "0", VBIOS: "92.00.36.00.02", Display: "Enabled", Persistence: "Disabled", MIGMode: "Enabled", ECCMode: "Enabled",
				ComputeCapability: "8.0", NVLinks: "2", NUMANode: "1", Memory: "81920", MemoryUsed: "919", BAR1: "131072", BAR1Used: "1",
				MaxPCIeGeneration: "4", MaxPCIeWidth: "16", PCIeGeneration: "4", PCIeWidth: "16", PCIeBandwidth: "32768", PCIeReplays: "0",
				ECCMemory: "7", ECCUncorrected: "3", Temperature: "27", Power: "67.03", PowerLimit: "500", SMClock: "1275", MemoryClock: "1593",
				MaxGraphicsClock: "1410", MaxSMClock: "1410", MaxMemoryClock: "1593", Processes: "none",
			},
			second: {
				Index: "1", PCIAddress: "0000:41:00.0", Name: "NVIDIA A100-SXM4-80GB", Brand: "NVIDIA", Architecture: "Ampere", Serial: "1000000000002",
				Minor: "1", Display: "Enabled", Persistence: "Disabled", MIGMode: "Disabled", ComputeCapability: "8.0", Memory: "81920",
				MemoryUsed: "2369", RowsCorrectable: "1", RowsUncorrectable: "0", RowPending: "Yes", RowFailed: "No", Processes: "900",
			},
			instance: {
				PCIAddress: "0000:01:00.0", Profile: "2g.20gb", Instance: "0", Brand: "NVIDIA", Architecture: "Ampere", Serial: "1000000000001",
				ECCMode: "Enabled", Memory: "19968", MemoryUsed: "12", BAR1: "32767", Multiprocessors: "28", CopyEngines: "2", Decoders: "1",
				Encoders: "0", JPEGDecoders: "0", OFAs: "0", Processes: "4711",
			},
		}},
		{"rtxpro-v13", SMI{}, Values{DriverVersion: "590.44.01", CUDAVersion: "13.1", GPUCount: "1"}, map[string]Values{
			"GPU-00000000-0000-4000-8000-000000000003": {
				Index: "0", PCIAddress: "0000:61:00.0", Name: "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", Brand: "NVIDIA RTX",
				Architecture: "Blackwell", Minor: "0", Display: "Disabled", Persistence: "Enabled", ECCMode: "Disabled", Memory: "97887",
				MemoryUsed: "66357", MaxPCIeGeneration: "4", MaxPCIeWidth: "16", PCIeGeneration: "1", PCIeWidth: "16", PCIeBandwidth: "32768",
				Power: "3.97", PowerLimit: "300", RecoveryAction: "drain and reset", Processes: "none",
			},
		}},
		{"t4-v11", SMI{}, Values{DriverVersion: "470.57.02", CUDAVersion: "11.4", GPUCount: "1"}, map[string]Values{
			"GPU-00000000-0000-4000-8000-000000000004": {
				Index: "0", PCIAddress: "0000:00:1e.0", Name: "Tesla T4", Brand: "NVIDIA", Display: "Enabled", Persistence: "Disabled",
				Serial: "1000000000004", Memory: "15109", MemoryUsed: "3", MaxPCIeGeneration: "3", MaxPCIeWidth: "16", PCIeGeneration: "1",
				PCIeWidth: "8", PCIeBandwidth: "16384", ECCMemory: "4", ECCL2: "1", ECCUncorrected: "3", Power: "8.85", PowerLimit: "70",
				Processes: "none",
			},
		}},
	} {
		got := sample(t, c.name, c.smi)
		if !maps.Equal(got.Machine, c.machine) {
			t.Errorf("%s: %v", c.name, got.Machine)
		}
		if len(got.Devices) != len(c.devices) {
			t.Errorf("%s: %d devices", c.name, len(got.Devices))
		}
		for id, want := range c.devices {
			for _, name := range slices.Concat(slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(got.Devices[id]))) {
				if got := got.Devices[id][name]; got != want[name] {
					t.Errorf("%s: %s: %s is %q, want %q", c.name, id, name, got, want[name])
				}
			}
		}
	}
}

func TestUnusable(t *testing.T) {
	for name, s := range map[string]SMI{
		"no XML":                {XML: "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."},
		"instance without UUID": {XML: "<nvidia_smi_log><gpu><uuid>GPU-1</uuid><mig_devices><mig_device><index>0</index></mig_device></mig_devices></gpu></nvidia_smi_log>"},
	} {
		if got, err := s.Source(); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// Each result of a comparison, in both directions of a tolerance.
func TestResults(t *testing.T) {
	for _, c := range []struct {
		value        Value
		ours, theirs string
		want         Result
	}{
		{Name, "NVIDIA A100", "NVIDIA A100", Equal},
		{Name, "NVIDIA A100", "NVIDIA A10", Differs},
		{RecoveryAction, "GPU_reset", "gpu_RESET", Equal},
		{PowerLimit, "500", "500.00", Equal},
		{PowerLimit, "499", "500", Within},
		{PowerLimit, "498", "500", Differs},
		{BAR1, "32768", "32767", Within},
		{MaxGraphicsClock, "1410", "1411", Differs},
		{Temperature, "32", "27", Within},
		{Temperature, "33", "27", Differs},
		{Power, "92", "67.03", Within},
		{Power, "92.1", "67.03", Differs},
		{Power, "590", "700", Within},
		{SMClock, "210", "1980", Within},
		{PCIeReplays, "4", "0", Differs},
		{ECCUncorrected, "1", "0", Differs},
		{Serial, "1000000000001", "", OnlyOurs},
		{VBIOS, "", "92.00.36.00.02", OnlySMI},
	} {
		ours, theirs := NewSource("inspect"), NewSource("nvidia-smi")
		ours.Device(first).set(c.value, c.ours)
		theirs.Device(first).set(c.value, c.theirs)
		rows := Compare([]Source{ours}, theirs)
		if len(rows) != 1 || rows[0].Result != c.want || rows[0].Bad() != (c.want == Differs) {
			t.Errorf("%s %q and %q: %+v", c.value, c.ours, c.theirs, rows)
		}
	}
}

// A device that only one lists is an error, but a GPU in MIG mode is not one of an agent's devices. Sources with one value are one row.
func TestCompare(t *testing.T) {
	smi := sample(t, "a100-v12", a100)
	d := report.Device{ID: second, GPU: second, Index: 1, Model: "NVIDIA A100-SXM4-80GB", PCI: "0000:41:00.0", MemoryBytes: 81920 << 20}
	index := 0
	mig := report.Device{ID: instance, GPU: first, Profile: "2g.20gb", Instance: &index, MemoryBytes: 19968 << 20, PCI: "0000:01:00.0"}
	all := report.Report{Devices: []report.Device{d, mig}}
	few := report.Report{Devices: []report.Device{mig, {ID: "GPU-5", GPU: "GPU-5"}}}
	bad := func(sources ...Source) (found []Row) {
		for _, row := range Compare(sources, smi) {
			if row.Bad() {
				found = append(found, row)
			}
		}
		return found
	}
	if rows := bad(OfReport("nomad-gpu", all), OfReport("k8s-gpu", all)); len(rows) > 0 {
		t.Errorf("%+v", rows)
	}
	want := []Row{
		{Device: second, Value: "device", Source: "k8s-gpu", Result: NotListed},
		{Device: "GPU-5", Value: "device", Source: "nvidia-smi", Result: NotListed},
	}
	if rows := bad(OfReport("nomad-gpu", all), OfReport("k8s-gpu", few)); !slices.Equal(rows, want) {
		t.Errorf("%+v", rows)
	}
	for _, row := range Compare([]Source{OfReport("nomad-gpu", all), OfReport("k8s-gpu", all)}, smi) {
		if row.Device == instance && row.Value == Profile && row.Source != "nomad-gpu, k8s-gpu" {
			t.Errorf("%+v", row)
		}
	}
}
