package core_test

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

func TestPlacementCovers(t *testing.T) {
	whole := gpu.WholeGPU("GPU-a")
	gi := gpu.Placement{GPU: "GPU-a", GI: 3, CI: gpu.Whole}
	ci := gpu.Placement{GPU: "GPU-a", GI: 3, CI: 1}
	other := gpu.Placement{GPU: "GPU-b", GI: 3, CI: 1}
	for _, tc := range []struct {
		name string
		p, q gpu.Placement
		want bool
	}{
		{"node covers GPU", gpu.Node, whole, true},
		{"node covers CI", gpu.Node, ci, true},
		{"GPU covers itself", whole, whole, true},
		{"GPU covers its GI", whole, gi, true},
		{"GPU covers its CI", whole, ci, true},
		{"GI covers its CI", gi, ci, true},
		{"GI does not cover its GPU", gi, whole, false},
		{"CI does not cover its GI", ci, gi, false},
		{"GPU does not cover another GPU's CI", whole, other, false},
		{"CI does not cover the same numbers elsewhere", ci, other, false},
		{"GPU does not cover the node", whole, gpu.Node, false},
	} {
		if got := tc.p.Covers(tc.q); got != tc.want {
			t.Errorf("%s: %v.Covers(%v) = %v", tc.name, tc.p, tc.q, got)
		}
	}
}

func TestParsePCIAddress(t *testing.T) {
	for in, want := range map[string]gpu.PCIAddress{
		"00000000:3B:00.0\x00\x00": "0000:3b:00.0", // NVML's busId, with trailing NULs
		"0000:3b:00.0":             "0000:3b:00.0",
		"3b:00.0":                  "0000:3b:00.0",
		"00010000:E1:1F.7":         "10000:e1:1f.7", // VMD: sysfs prints five digits
		"0009:01:00.0":             "0009:01:00.0",  // Grace systems have several domains
	} {
		if got, err := gpu.ParsePCIAddress(in); err != nil || got != want {
			t.Errorf("ParsePCIAddress(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "\x00", "3b", "3b:00", "0000:3b:00", "0000:3b:20.0", "0000:3b:00.8", "0000:100:00.0", "x:3b:00.0", "0:0:0:0.0", "-1:3b:00.0", "100000000:3b:00.0"} {
		if got, err := gpu.ParsePCIAddress(in); err == nil {
			t.Errorf("ParsePCIAddress(%q) = %q; want an error", in, got)
		}
	}
}

// Parsing the canonical form of an address returns it unchanged.
func FuzzParsePCIAddress(f *testing.F) {
	for _, s := range []string{"00000000:3B:00.0\x00", "3b:00.0", "10000:e1:00.0", ":::.", "0000:3b:00."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := gpu.ParsePCIAddress(s)
		if err != nil {
			return
		}
		if b, err := gpu.ParsePCIAddress(string(a)); err != nil || a != b {
			t.Errorf("ParsePCIAddress(%q) = %q, and that parses as %q, %v", s, a, b, err)
		}
	})
}

func TestPCIBandwidth(t *testing.T) {
	for _, tc := range []struct{ gen, width, want int }{
		{3, 16, 16384}, {4, 16, 32768}, {5, 16, 65536}, {6, 16, 131072}, {1, 1, 256}, {2, 8, 4096},
		{0, 16, 0}, {3, 0, 0}, {7, 16, 0},
	} {
		d := gpu.Device{PCIeGen: tc.gen, PCIeWidth: tc.width}
		if got := d.PCIBandwidth(); got != tc.want {
			t.Errorf("generation %d x%d = %d MB/s; want %d", tc.gen, tc.width, got, tc.want)
		}
	}
}
