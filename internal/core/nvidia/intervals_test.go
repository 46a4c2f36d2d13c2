package nvidia

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestIntervals counts the calls of checks of eight GPUs: the numbers in the documentation.
func TestIntervals(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	_, at := openWithClock(t, m)
	const gpus = 8
	fast := map[string]uint64{"nvmlDeviceGetUUID": gpus, "nvmlDeviceGetFieldValues": gpus}
	with := func(names ...string) map[string]uint64 {
		all := maps.Clone(fast)
		for _, name := range names {
			all[name] += gpus
		}
		return all
	}
	fabric := []string{"nvmlDeviceGetGpuFabricInfoV"}
	slow := []string{
		"nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRepairStatus", "nvmlDeviceGetUnrepairableMemoryFlag_v1",
		"nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetCurrPcieLinkGeneration",
		"nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetUtilizationRates",
	}
	for _, c := range []struct {
		name string
		at   time.Duration
		want map[string]uint64
	}{
		{"first", 0, with(append(slices.Concat(fabric, slow), "nvmlDeviceGetVirtualizationMode", "nvmlDeviceValidateInforom")...)},
		{"fast", 10 * time.Second, fast},
		{"fast", 20 * time.Second, fast},
		{"fabric", 30 * time.Second, with(fabric...)},
		{"fast", 50 * time.Second, fast},
		{"slow", 60 * time.Second, with(slices.Concat(fabric, slow)...)},
		{"fast", 70 * time.Second, fast},
		{"links", 300 * time.Second, with(slices.Concat(fabric, slow)...)},
	} {
		got := counted(t, m, func() { at(c.at) })
		if !maps.Equal(got, c.want) {
			t.Errorf("%s at %v: %v, want %v", c.name, c.at, got, c.want)
		}
		t.Logf("%s: %d calls a GPU", c.name, total(got)/gpus)
	}
}

// The state of NVLinks is read with the other fields, at its own interval.
func TestIntervalOfLinks(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	_, at := openWithClock(t, m)
	at(0)
	must(t, m.Set(3, "links_down", "0x3"))
	if up := at(299 * time.Second)(3).Sample.LinksUp; up != gpu.OptionalUint64Of(18) {
		t.Errorf("too early: %+v", up)
	}
	if up := at(300 * time.Second)(3).Sample.LinksUp; up != gpu.OptionalUint64Of(16) {
		t.Errorf("%+v", up)
	}
}

// After an event of a GPU its slow signals are read, at most once a second.
func TestEventReadsSlowSignals(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s, at := openWithClock(t, m)
	at(0)
	must(t, m.Set(3, "tpc_repair_pending", "yes"), m.Set(4, "tpc_repair_pending", "yes"), m.Event(3, simdriver.EventRecoveryAction, 0))
	awaitEvent(t, s, health.Observation{At: gpu.WholeGPU(h100ID), Detail: "event 0x8000"})
	if v := at(minEventInterval - 1)(3).Sample; v.RepairPending != health.No {
		t.Errorf("less than a second after the last: %+v", v)
	}
	of := at(minEventInterval)
	if v := of(3).Sample; v.RepairPending != health.Yes {
		t.Errorf("%+v", v)
	}
	if v := of(4).Sample; v.RepairPending != health.No {
		t.Errorf("another GPU: %+v", v)
	}
	n := counted(t, m, func() { at(3 * minEventInterval) })
	if n["nvmlDeviceGetTotalEccErrors"] != 0 || n["nvmlDeviceValidateInforom"] != 0 {
		t.Errorf("an event counts once: %v", n)
	}
}

// After a GPU did not answer, all its signals are read.
func TestCheckAfterLossReadsAll(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	_, at := openWithClock(t, m)
	at(0)
	must(t, m.Lose(3))
	at(time.Second)
	must(t, m.Change(3, "inforom_corrupt = yes", "lost = no"))
	n := counted(t, m, func() {
		if v := at(2 * time.Second)(3).Sample; v.InfoROMCorrupt != health.Yes {
			t.Errorf("%+v", v)
		}
	})
	if n["nvmlDeviceValidateInforom"] != 1 || n["nvmlDeviceGetTotalEccErrors"] != 1 || total(n) != 2*8+11 {
		t.Errorf("%d calls: %v", total(n), n)
	}
}

// When MIG mode changes, all signals are tried again.
func TestMIGModeChangeResetsSupport(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	s, at := openWithClock(t, m)
	if v := at(0)(0).Sample; v.RemapPending != health.No {
		t.Errorf("%+v", v)
	}
	must(t, m.SetMIG(0, "7g.80gb"))
	snapshot(t, s)
	if v := at(time.Second)(0).Sample; v.RemapPending != health.NotReported || v.Partial {
		t.Errorf("with MIG: %+v", v)
	}
	must(t, m.MIGOff(0))
	snapshot(t, s)
	if v := at(2 * time.Second)(0).Sample; v.RemapPending != health.No || v.Partial {
		t.Errorf("without: %+v", v)
	}
}

// A signal that can no longer be read has its last value, and the sample is partial. One that was never read is missing.
func TestUnreadableSignals(t *testing.T) {
	unreadable := map[string]func(*testing.T, *simdriver.Machine) error{
		"a field": func(_ *testing.T, m *simdriver.Machine) error { return m.Set(3, "field.94", "!UNKNOWN") },
		"a link":  func(_ *testing.T, m *simdriver.Machine) error { return m.Set(3, "field.165.4", "!UNKNOWN") },
		"a call": func(_ *testing.T, m *simdriver.Machine) error {
			return m.Fail(simdriver.GPU(3), "nvmlDeviceGetTotalEccErrors", "TIMEOUT", simdriver.Always)
		},
		"the fabric": func(_ *testing.T, m *simdriver.Machine) error {
			return m.Fail(simdriver.GPU(3), "nvmlDeviceGetGpuFabricInfoV", "UNKNOWN", simdriver.Always)
		},
	}
	for name, fail := range unreadable {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			must(t, m.Change(3, "pcie_replays = 5", "ecc_uncorrected_volatile = 6"))
			_, at := openWithClock(t, m)
			want := healthyH100
			want.Replays, want.Uncorrectable = gpu.OptionalUint64Of(5), gpu.OptionalUint64Of(6)
			if o := at(0)(3); o.Sample != want {
				t.Errorf("%+v", o)
			}
			must(t, fail(t, m))
			partial := want
			partial.Partial = true
			for _, since := range []time.Duration{300 * time.Second, 310 * time.Second} { // also if no slow signal is due
				if o := at(since)(3); o.Kind != health.Checked || o.Sample != partial {
					t.Errorf("after %v: %+v", since, o)
				}
			}
			must(t, m.Heal(), m.Set(3, "field.94", "5"), m.Set(3, "field.165.4", "1"))
			if o := at(320 * time.Second)(3); o.Sample != want {
				t.Errorf("healed: %+v", o)
			}
		})
		t.Run("never-"+strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			m := simdriver.Start(t, "h100x8")
			must(t, fail(t, m))
			_, at := openWithClock(t, m)
			if o := at(0)(3); o.Kind != health.Checked || o.Sample.Partial || o.Sample == healthyH100 {
				t.Errorf("%+v", o)
			}
		})
	}
}

// The fabric state is read by the newest call that the driver supports.
func TestFabricOfOlderDrivers(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Change(3, "fabric_version = 2", "fabric_health_mask = 0x200"), m.Change(4, "fabric_health_summary = 3"),
		m.Change(5, "unsupported = nvmlDeviceGetGpuFabricInfoV", "fabric_status = 999"))
	_, at := openWithClock(t, m)
	of := at(0)
	for slot, want := range map[int]health.Fabric{
		2: health.FabricHealthy, 3: health.FabricMisconfigured, 4: health.FabricLimited, 5: health.FabricUnhealthy,
	} {
		if v := of(slot).Sample; v.Fabric != want || v.Partial {
			t.Errorf("GPU %d: %+v", slot, v)
		}
	}
	n := counted(t, m, func() { at(30 * time.Second) })
	if n["nvmlDeviceGetGpuFabricInfoV"] != 7 || n["nvmlDeviceGetGpuFabricInfo"] != 1 {
		t.Errorf("unsupported calls were repeated: %v", n)
	}
}

// One answer that a GPU lacks a signal may be wrong: it is read again with the slow signals. A GPU that does lack it costs no more calls.
// A signal that was read before keeps its value, and is read again by the next check.
func TestUnsupportedSignalIsReadAgain(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	const fieldValues, inforom, fabric = "nvmlDeviceGetFieldValues", "nvmlDeviceValidateInforom", "nvmlDeviceGetGpuFabricInfoV"
	for _, code := range []string{"FUNCTION_NOT_FOUND", "NOT_SUPPORTED"} {
		s, at := openWithClock(t, m)
		gpu := simdriver.GPU(3)
		must(t, m.Fail(gpu, fieldValues, code, 1), m.Fail(gpu, inforom, code, 1), m.Fail(gpu, "nvmlDeviceGetRepairStatus", code, 1))
		if v := at(0)(3).Sample; v.RecoveryAction != health.RecoveryUnknown || v.InfoROMCorrupt != health.NotReported || v.RepairPending != health.NotReported {
			t.Errorf("%s once: %+v", code, v)
		}
		must(t, m.Set(3, "recovery_action", "1"))
		want := healthyH100
		want.RecoveryAction, want.LinksUp = health.RecoveryReset, at(10*time.Second)(3).Sample.LinksUp
		if o := at(60 * time.Second)(3); o.Sample != want {
			t.Errorf("%s once, a minute later: %+v", code, o)
		}

		must(t, m.Fail(gpu, fieldValues, code, simdriver.Always), m.Fail(gpu, fabric, code, simdriver.Always))
		want.Partial = true
		n := counted(t, m, func() {
			if o := at(120 * time.Second)(3); o.Sample != want {
				t.Errorf("%s after an answer: %+v, want %+v", code, o.Sample, want)
			}
		})
		if n[fabric] != 8 {
			t.Errorf("%s after an answer: another version was read: %v", code, n)
		}
		if n := counted(t, m, func() { at(125 * time.Second) }); n[fieldValues] != 8 || n[fabric] != 1 {
			t.Errorf("%s after an answer: not read again by the next check: %v", code, n)
		}
		want.Partial = false
		must(t, m.Heal())
		if o := at(130 * time.Second)(3); o.Sample != want {
			t.Errorf("%s: healed: %+v, want %+v", code, o.Sample, want)
		}

		s2, at := openWithClock(t, m)
		must(t, m.Fail(gpu, fieldValues, code, simdriver.Always), m.Fail(gpu, fabric, code, simdriver.Always))
		fabricRead := at(0)(3).Sample.Fabric // by the older call
		for _, since := range []time.Duration{10 * time.Second, 50 * time.Second} {
			if n := counted(t, m, func() { at(since) }); n[fieldValues] != 7 || n[fabric] > 7 {
				t.Errorf("%s always: read after %v: %v", code, since, n)
			}
		}
		n = counted(t, m, func() {
			if o := at(60 * time.Second)(3); o.Sample.Fabric != fabricRead || fabricRead == health.FabricNotReported || o.Sample.Partial {
				t.Errorf("%s always: %+v, before %v", code, o, fabricRead)
			}
		})
		if n[fieldValues] != 8 || n[fabric] != 2 { // two versions, although the fabric is not due
			t.Errorf("%s always: after another minute: %v", code, n)
		}
		must(t, s2.Close())
		must(t, m.Heal(), m.Set(3, "recovery_action", "0"), s.Close())
	}
}

// A value counts in every check until it is read again: a signal that changes is read again by the next check, as one reading
// may be wrong.
func TestChangedSignalIsReadAgain(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	_, at := openWithClock(t, m)
	at(0)
	must(t, m.Set(3, "unrepairable_memory", "yes"))
	if a := at(60 * time.Second)(3).Sample.Unrepairable; a != health.Yes {
		t.Fatalf("unrepairable: %v", a)
	}
	must(t, m.Set(3, "unrepairable_memory", "no"))
	if a := at(70 * time.Second)(3).Sample.Unrepairable; a != health.No {
		t.Errorf("a check later: %v", a)
	}
	n := counted(t, m, func() { at(80 * time.Second) })
	if n["nvmlDeviceGetUnrepairableMemoryFlag_v1"] != 1 { // the change back is a change too
		t.Errorf("read: %v", n)
	}
	if n := counted(t, m, func() { at(90 * time.Second) }); n["nvmlDeviceGetUnrepairableMemoryFlag_v1"] != 0 {
		t.Errorf("read again without a change: %v", n)
	}
}

// What changes with the load is read for each Usage, the power limit, the clocks and the counters every ten seconds. A reading that failed
// is repeated at the next one.
func TestIntervalOfUsage(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s, at := openWithClock(t, m)
	read := func() (u gpu.Usage) {
		t.Helper()
		usage, err := s.Usage()
		must(t, err)
		return usage[3]
	}
	at(0)
	must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceGetPowerManagementLimit", "UNKNOWN", 1), m.Fail(simdriver.GPU(3), "nvmlDeviceGetEnforcedPowerLimit", "UNKNOWN", 1))
	if u := read(); u.PowerLimit.OK {
		t.Errorf("%+v", u.PowerLimit)
	}
	for _, c := range []struct {
		seconds, power, limit, slow uint64 // slow = GPUs whose values that change slowly are read
	}{{1, 100, 700, 1}, {2, 200, 700, 0}, {10, 300, 700, 7}, {11, 400, 410, 1}} {
		must(t, m.Set(3, "power_usage", fmt.Sprint(c.power, " W")))
		at(time.Duration(c.seconds) * time.Second)
		var u gpu.Usage
		got := counted(t, m, func() { u = read() })
		if want := 8*7 + 7*c.slow; u.Power.Value != c.power*1000 || u.PowerLimit.Value != c.limit*1000 || total(got) != want {
			t.Errorf("after %d s: %+v; %d calls, want %d: %v", c.seconds, u, total(got), want, got)
		}
		must(t, m.Set(3, "power_limit", fmt.Sprint(400+c.seconds, " W")))
	}
}

// A number of NVLinks that has changed is read again by the next check.
func TestChangedNVLinksAreReadAgain(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	_, at := openWithClock(t, m)
	at(0)
	must(t, m.Set(3, "links_down", "0x3"))
	if v := at(5 * time.Minute)(3).Sample.LinksUp; v.Value != 16 {
		t.Fatalf("links up: %v", v)
	}
	must(t, m.Set(3, "links_down", "none"))
	if v := at(5*time.Minute + 10*time.Second)(3).Sample.LinksUp; v.Value != 18 {
		t.Errorf("a check later: %v", v)
	}
}
