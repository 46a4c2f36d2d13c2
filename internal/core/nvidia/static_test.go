package nvidia

import (
	"maps"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// staticCalls are those of readStatic.
var staticCalls = []string{
	"nvmlDeviceGetAddressingMode", "nvmlDeviceGetArchitecture", "nvmlDeviceGetBAR1MemoryInfo", "nvmlDeviceGetBrand", "nvmlDeviceGetCudaComputeCapability",
	"nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetSerial",
}

// countStatic counts the staticCalls that read makes.
func countStatic(t *testing.T, m *simdriver.Machine, read func()) map[string]uint64 {
	t.Helper()
	n := counted(t, m, read)
	maps.DeleteFunc(n, func(name string, _ uint64) bool { return !slices.Contains(staticCalls, name) })
	return n
}

// The calls of a Snapshot of eight known GPUs. The two calls about clocks have one name.
func TestCallsOfSnapshot(t *testing.T) {
	m, s := start(t, "h100x8", open)
	first := countStatic(t, m, func() { snapshot(t, s) })
	want := map[string]uint64{}
	for _, name := range staticCalls {
		want[name] = 8
	}
	want["nvmlDeviceGetMaxClockInfo"] = 16
	if !maps.Equal(first, want) {
		t.Errorf("at first: %v, want %v", first, want)
	}
	want = map[string]uint64{"nvmlDeviceGetCount_v2": 1, "nvmlSystemGetDriverVersion": 1, "nvmlSystemGetCudaDriverVersion_v2": 1}
	for _, name := range []string{
		"nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetIndex", "nvmlDeviceGetName", "nvmlDeviceGetMigMode",
		"nvmlDeviceGetMinorNumber", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetDisplayMode",
		"nvmlDeviceGetPersistenceMode", "nvmlDeviceGetEccMode",
	} {
		want[name] = 8
	}
	if got := counted(t, m, func() { snapshot(t, s) }); !maps.Equal(got, want) {
		t.Errorf("then: %s", gocmp.Diff(want, got))
	}
	// Links need many calls: they are read when the set of GPUs changes.
	const paths = "nvmlDeviceGetTopologyCommonAncestor"
	if n := calls(t, m)[paths]; n != 8*7/2 {
		t.Errorf("%d calls about the paths between 8 GPUs", n)
	}
	must(t, m.Lose(3))
	n := counted(t, m, func() {
		if snap := snapshot(t, s); len(snap.Links) != 7*6/2 {
			t.Errorf("%d links", len(snap.Links))
		}
	})
	if n[paths] != 7*6/2 {
		t.Errorf("%d calls about the paths between 7 GPUs", n[paths])
	}
}

// Static properties are read again when the GPU may be another one, and until all calls about them have succeeded.
func TestStaticPropertiesAreReadAgain(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(*testing.T, *simdriver.Machine, *Session)
		gpus uint64 // whose properties are read again
	}{
		{"no change", func(*testing.T, *simdriver.Machine, *Session) {}, 0},
		{"lost in a Snapshot", func(t *testing.T, m *simdriver.Machine, s *Session) {
			must(t, m.Lose(3))
			snapshot(t, s)
			must(t, m.Restore(3))
		}, 1},
		{"lost in a check", func(t *testing.T, m *simdriver.Machine, s *Session) {
			must(t, m.Lose(3))
			probe(t, s)
			must(t, m.Restore(3))
			probe(t, s)
		}, 1},
		{"driver bound again", func(t *testing.T, m *simdriver.Machine, s *Session) {
			must(t, m.Unbind(3), m.Bind(3))
			awaitEvent(t, s, health.Observation{At: gpu.WholeGPU(h100ID), Kind: health.DriverRebound})
			probe(t, s)
		}, 1},
		{"another handle", func(t *testing.T, m *simdriver.Machine, _ *Session) { must(t, m.Invalidate(3)) }, 1},
		{"MIG mode changed", func(t *testing.T, m *simdriver.Machine, _ *Session) { must(t, m.SetMIG(3)) }, 1},
		{"no GPU could be read", func(t *testing.T, m *simdriver.Machine, s *Session) {
			must(t, m.Fail(simdriver.All, "nvmlDeviceGetName", "UNKNOWN", simdriver.Always))
			snapshot(t, s)
			must(t, m.Heal())
		}, 8},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := start(t, "h100x8", openWithEvents)
			probe(t, s)
			must(t, m.Change(3, "serial = 42", "max_clock_graphics = 1000 MHz"))
			c.do(t, m, s)
			n := countStatic(t, m, func() { snapshot(t, s) })
			if n["nvmlDeviceGetSerial"] != c.gpus || n["nvmlDeviceGetBrand"] != c.gpus {
				t.Errorf("read again: %v, want of %d", n, c.gpus)
			}
			for _, d := range snapshot(t, s).Devices {
				if d.Index == 3 && (d.Serial == "42" && d.CoreClock == 1000) != (c.gpus > 0) {
					t.Errorf("%+v", d)
				}
			}
			if n := countStatic(t, m, func() { snapshot(t, s) }); len(n) > 0 {
				t.Errorf("and again: %v", n)
			}
		})
	}
}

// A static property that fails is read again, and has its last value meanwhile.
func TestStaticPropertyThatFails(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceGetBrand", "UNKNOWN", 2))
	s := open(t, m)
	third := func() gpu.Device { return snapshot(t, s).Devices[3] }
	if d := third(); d.Brand != "" || d.Serial == "" || d.Architecture != "Hopper" {
		t.Errorf("%+v", d)
	}
	if n := countStatic(t, m, func() { third() }); n["nvmlDeviceGetBrand"] != 1 || n["nvmlDeviceGetSerial"] != 1 {
		t.Errorf("read again: %v", n)
	}
	if d := third(); d.Brand != "NVIDIA" {
		t.Errorf("%+v", d)
	}
	if n := countStatic(t, m, func() { third() }); len(n) > 0 {
		t.Errorf("read again after success: %v", n)
	}
	must(t, m.Invalidate(3), m.Fail(simdriver.GPU(3), "nvmlDeviceGet[SAB]*", "TIMEOUT", simdriver.Always))
	if d := third(); d.Brand != "NVIDIA" || d.Serial == "" || d.Architecture != "Hopper" || d.BAR1 == 0 {
		t.Errorf("while the calls fail: %+v", d)
	}
}

// The ECC mode changes at a reset, after which the handle may be the same.
func TestECCMode(t *testing.T) {
	m, s := start(t, "a100-mig", open)
	ecc := func(slot int) (all []gpu.Toggle) {
		for _, d := range snapshot(t, s).Devices {
			if d.At.GPU == gpu.DeviceID(m.UUID(slot)) {
				all = append(all, d.ECC)
			}
		}
		return all
	}
	must(t, m.Set(6, "ecc_pending", "no"))
	if got := ecc(6); !slices.Equal(got, []gpu.Toggle{gpu.Enabled, gpu.Enabled}) {
		t.Errorf("pending: %v", got)
	}
	must(t, m.Set(6, "ecc", "no"))
	if got := ecc(6); !slices.Equal(got, []gpu.Toggle{gpu.Disabled, gpu.Disabled}) {
		t.Errorf("off: %v", got)
	}
	must(t, m.Fail(simdriver.GPU(6), "nvmlDeviceGetEccMode", "UNKNOWN", simdriver.Always))
	if got := ecc(6); !slices.Equal(got, []gpu.Toggle{gpu.Disabled, gpu.Disabled}) {
		t.Errorf("unknown: %v", got)
	}
	must(t, m.Heal(), m.Set(6, "ecc", "none"))
	if got := ecc(6); !slices.Equal(got, []gpu.Toggle{gpu.Disabled, gpu.Disabled}) {
		t.Errorf("not supported after an answer: %v", got)
	}
	s = open(t, m)
	if got := ecc(6); !slices.Equal(got, []gpu.Toggle{gpu.ToggleUnknown, gpu.ToggleUnknown}) {
		t.Errorf("not supported: %v", got)
	}
}

// NVLinks are counted for the topology, and again when a check counts a different number.
func TestNVLinks(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s, at := openWithClock(t, m)
	links := func() (all, pair int) {
		snap := snapshot(t, s)
		for _, l := range snap.Links {
			if l.A == h100ID {
				pair = l.NVLinks
			}
		}
		return snap.Devices[3].NVLinks, pair
	}
	at(0)
	if n := counted(t, m, func() { links() }); n["nvmlDeviceGetNvLinkState"] > 0 {
		t.Errorf("the topology was read again: %v", n)
	}
	must(t, m.Set(3, "links_down", "0x3"))
	if all, pair := links(); all != 18 || pair != 18 {
		t.Errorf("before a check: %d, %d", all, pair)
	}
	at(5 * time.Minute)
	if all, pair := links(); all != 16 || pair != 16 {
		t.Errorf("after a check: %d, %d", all, pair)
	}
	must(t, m.Set(3, "links_down", "none"), m.Fail(simdriver.GPU(3), "nvmlDeviceGetNvLinkState", "UNKNOWN", simdriver.Always))
	at(10 * time.Minute)
	if all, _ := links(); all != 16 {
		t.Errorf("not readable: %d", all)
	}
	must(t, m.Heal())
	if all, pair := links(); all != 18 || pair != 18 {
		t.Errorf("up again: %d, %d", all, pair)
	}
	// If the two calls never agree, the topology is still not read every time.
	must(t, m.Change(3, "field.165.0 = 0", "field.165.1 = 0"))
	at(15 * time.Minute)
	first := counted(t, m, func() { links() })
	if again := counted(t, m, func() { links() }); first["nvmlDeviceGetNvLinkState"] == 0 || again["nvmlDeviceGetNvLinkState"] > 0 {
		t.Errorf("%v, then %v", first, again)
	}
}
