package nvidia

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

func chars(s string) (b [32]int8) {
	for i := range s {
		b[i] = int8(s[i])
	}
	return b
}

func TestPCIAddress(t *testing.T) {
	var short [16]int8
	legacy := chars("0000:3B:00.0")
	copy(short[:], legacy[:])
	for _, c := range []struct {
		name string
		info nvml.PciInfo
		want gpu.PCIAddress
	}{
		{"v3", nvml.PciInfo{BusId: chars("00000000:3B:00.0"), BusIdLegacy: short}, "0000:3b:00.0"},
		{"wide domain", nvml.PciInfo{BusId: chars("00010000:E1:00.0")}, "10000:e1:00.0"},
		{"v1 has the short form only", nvml.PciInfo{BusIdLegacy: short}, "0000:3b:00.0"},
	} {
		if got, err := pciAddress(c.info); got != c.want || err != nil {
			t.Errorf("%s: %q, %v, want %q", c.name, got, err, c.want)
		}
	}
	if got, err := pciAddress(nvml.PciInfo{}); err == nil {
		t.Errorf("an empty address is %q", got)
	}
}

func TestCUDAVersion(t *testing.T) {
	for v, want := range map[int]string{0: "", -1: "", 12080: "12.8", 13000: "13.0", 11040: "11.4"} {
		if got := cudaVersion(v); got != want {
			t.Errorf("%d: %q, want %q", v, got, want)
		}
	}
}

// The names with a profile are in TestProfileSpelling.
func TestNoProfileInName(t *testing.T) {
	for _, name := range []string{"NVIDIA A100-SXM4-40GB", "", " MIG 0g.5gb", "NVIDIA MIG 1g.5gb Edition"} {
		if got := profileInName(name); got != "" {
			t.Errorf("%q: %q", name, got)
		}
	}
}

// The sizes are those that drivers report, the names those of NVIDIA's profiles.
func TestProfileOf(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		gpu    uint64
		c, g   uint32
		memory uint64
		want   string
	}{
		{40536 * mib, 1, 1, 4864, "1g.5gb"},
		{40536 * mib, 2, 2, 9856, "2g.10gb"},
		{40536 * mib, 1, 3, 19968, "1c.3g.20gb"},
		{40536 * mib, 7, 7, 40192, "7g.40gb"},
		{81920 * mib, 1, 1, 9728, "1g.10gb"},
		{81559 * mib, 3, 3, 40448, "3g.40gb"},
		{143771 * mib, 1, 1, 16384, "1g.18gb"},
		{143771 * mib, 2, 2, 33280, "2g.35gb"},
		{143771 * mib, 3, 3, 71424, "3g.71gb"},
		{183359 * mib, 1, 1, 20992, "1g.23gb"},
		{183359 * mib, 1, 1, 22528, "1g.23gb"},
		{183359 * mib, 1, 1, 45312, "1g.45gb"},
		{183359 * mib, 7, 7, 182784, "7g.180gb"},
		{189471 * mib, 1, 1, 22528, "1g.23gb"},
		{189471 * mib, 2, 2, 46592, "2g.47gb"},
		{24576 * mib, 1, 1, 5952, "1g.6gb"},
		{24576 * mib, 2, 2, 11968, "2g.12gb"},
		{97887 * mib, 1, 1, 23680, "1g.24gb"},
		{97887 * mib, 1, 1, 24192, "1g.24gb"},
		{97887 * mib, 4, 4, 97280, "4g.96gb"},
		{95830 * mib, 3, 3, 47616, "3g.47gb"},
		{81920 * mib, 1, 0, 9728, ""},
		{0, 1, 1, 9728, ""},
		{81920 * mib, 1, 1, 0, ""},
	} {
		a := nvml.DeviceAttributes{ComputeInstanceSliceCount: c.c, GpuInstanceSliceCount: c.g, MemorySizeMB: c.memory}
		if got := profileOf(a, c.gpu); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

func TestPCIePathsAreOrdered(t *testing.T) {
	far := []nvml.GpuTopologyLevel{
		nvml.TOPOLOGY_SYSTEM, nvml.TOPOLOGY_NODE, nvml.TOPOLOGY_HOSTBRIDGE, nvml.TOPOLOGY_MULTIPLE,
		nvml.TOPOLOGY_SINGLE, nvml.TOPOLOGY_INTERNAL,
	}
	for i, level := range far {
		if got := pciePath[level]; got != gpu.PCIePath(i+1) {
			t.Errorf("%d: %d", level, got)
		}
	}
	if got := pciePath[99]; got != gpu.PathUnknown {
		t.Errorf("99: %d", got)
	}
}

// FuzzDriversText: any contents of NVML's fixed arrays give a string or an error, never a panic.
func FuzzDriversText(f *testing.F) {
	f.Add([]byte("00000000:3B:00.0\x00junk"), 12080)
	f.Add([]byte(""), -1)
	f.Add([]byte("\xff\xfe"), 1<<31-1)
	f.Fuzz(func(t *testing.T, text []byte, cuda int) {
		chars := make([]int8, len(text))
		for i, b := range text {
			chars[i] = int8(b)
		}
		want, _, _ := strings.Cut(string(text), "\x00")
		if got := cString(chars); got != want {
			t.Errorf("%q of %q", got, text)
		}
		if v := cudaVersion(cuda); v != "" {
			major, minor, ok := strings.Cut(v, ".")
			a, errA := strconv.Atoi(major)
			b, errB := strconv.Atoi(minor)
			if !ok || errA != nil || errB != nil || a*1000+b*10 > cuda || slices.Contains([]int{a, b}, -1) {
				t.Errorf("CUDA %q of %d", v, cuda)
			}
		}
	})
}
