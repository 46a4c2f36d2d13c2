package nvidia

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// healthyH100 is the sample of a healthy GPU of the machine h100x8.
var healthyH100 = health.Sample{
	RecoveryAction: health.RecoveryNone,
	RemapPending:   health.No, RemapFailed: health.No, RepairPending: health.No, Unrepairable: health.No,
	SRAMThreshold: health.No, InfoROMCorrupt: health.No,
	Uncorrectable: gpu.OptionalUint64Of(0), Energy: gpu.OptionalUint64Of(1843200_000), Replays: gpu.OptionalUint64Of(0),
	ThermalSlowdown: gpu.OptionalUint64Of(0), PowerBrake: gpu.OptionalUint64Of(0),
	PCIeWidth: 16, PCIeMaxWidth: 16, PCIeGen: 5,
	LinksUp: gpu.OptionalUint64Of(18), Fabric: health.FabricHealthy, VGPU: health.No, Events: health.Yes,
}

// A signal that a GPU does not support is NotReported or unset, which is no fault.
func TestSamplesOfMachines(t *testing.T) {
	a100 := health.Sample{
		RecoveryAction: health.RecoveryNone, RemapPending: health.No, RemapFailed: health.No, RepairPending: health.No,
		SRAMThreshold: health.No, InfoROMCorrupt: health.No,
		Uncorrectable: gpu.OptionalUint64Of(0), Energy: gpu.OptionalUint64Of(1843200_000), Replays: gpu.OptionalUint64Of(0),
		ThermalSlowdown: gpu.OptionalUint64Of(0), PowerBrake: gpu.OptionalUint64Of(0),
		PCIeWidth: 16, PCIeMaxWidth: 16, PCIeGen: 4, LinksUp: gpu.OptionalUint64Of(12), VGPU: health.No, Events: health.Yes,
	}
	cut := a100
	cut.RemapPending, cut.RemapFailed, cut.LinksUp = health.NotReported, health.NotReported, gpu.OptionalUint64{}
	for _, c := range []struct {
		machine string
		slot    int
		want    health.Sample
	}{
		{"h100x8", 7, healthyH100},
		{"a100-mig", 0, a100},
		{"a100-mig", 5, cut},
		{"consumer", 0, health.Sample{
			RecoveryAction: health.RecoveryNone, Energy: gpu.OptionalUint64Of(90210_000), Replays: gpu.OptionalUint64Of(0), PCIeWidth: 16, PCIeMaxWidth: 16, PCIeGen: 1, VGPU: health.No, Events: health.Yes,
		}},
		{"t4", 0, health.Sample{
			RetirementPending: health.No, InfoROMCorrupt: health.No, Uncorrectable: gpu.OptionalUint64Of(0),
			Energy: gpu.OptionalUint64Of(41000_000), Replays: gpu.OptionalUint64Of(0), PCIeWidth: 8, PCIeMaxWidth: 16, PCIeGen: 1, VGPU: health.No, Events: health.Yes,
		}},
	} {
		s, at := openWithClock(t, simdriver.Start(t, c.machine))
		for _, since := range []time.Duration{0, 10 * time.Second} { // the second check makes fewer calls and has the same result
			o := at(since)(c.slot)
			if diff := gocmp.Diff(c.want, o.Sample); diff != "" || o.Kind != health.Checked {
				t.Errorf("%s %d after %v: %d %s\n%s", c.machine, c.slot, since, o.Kind, o.Detail, diff)
			}
		}
		must(t, s.Close())
	}
}

// Every signal of a sample is read.
func TestSampleOfFaultyGPU(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	_, at := openWithClock(t, m)
	must(t, m.Change(3, "recovery_action = 4", "remapped_pending = yes", "remapped_failed = yes", "channel_repair_pending = yes",
		"unrepairable_memory = yes", "sram_threshold_exceeded = yes", "inforom_corrupt = yes", "ecc_uncorrected_volatile = 7",
		"energy = 12 J", "pcie_replays = 9", "hw_thermal_slowdown_ns = 5000000000", "hw_power_brake_ns = 6", "pcie_width = 8",
		"pcie_gen = 4", "utilization_gpu = 97", "links_down = 0x5", "fabric_state = 2", "events = 0x2"))
	want := health.Sample{
		RecoveryAction: health.RecoveryDrainAndReset, RemapPending: health.Yes, RemapFailed: health.Yes, RepairPending: health.Yes,
		Unrepairable: health.Yes, SRAMThreshold: health.Yes, InfoROMCorrupt: health.Yes,
		Uncorrectable: gpu.OptionalUint64Of(7), Energy: gpu.OptionalUint64Of(12000), Replays: gpu.OptionalUint64Of(9),
		ThermalSlowdown: gpu.OptionalUint64Of(5_000_000_000), PowerBrake: gpu.OptionalUint64Of(6),
		PCIeWidth: 8, PCIeMaxWidth: 16, PCIeGen: 4, Busy: true, LinksUp: gpu.OptionalUint64Of(16), Fabric: health.FabricStarting,
		VGPU: health.No, Events: health.Yes,
	}
	if diff := gocmp.Diff(want, at(0)(3).Sample); diff != "" {
		t.Error(diff)
	}
	must(t, m.Change(3, "recovery_action = 0", "tpc_repair_pending = yes", "channel_repair_pending = no"))
	if v := at(time.Minute)(3).Sample; v.RecoveryAction != health.RecoveryNone || v.RepairPending != health.Yes {
		t.Errorf("%+v", v)
	}
}

func TestRecoveryActions(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	_, at := openWithClock(t, m)
	for value, want := range map[string]health.RecoveryAction{
		"0": health.RecoveryNone, "1": health.RecoveryReset, "2": health.RecoveryReboot, "3": health.RecoveryDrainP2P,
		"4": health.RecoveryDrainAndReset, "5": health.RecoveryIMEX, "6": health.RecoveryBusReset, "7": health.RecoverySystemReboot,
		"8": health.RecoveryOther, "99": health.RecoveryOther,
	} {
		must(t, m.Set(2, "recovery_action", value))
		if o := at(0)(2); o.Kind != health.Checked || o.Sample.RecoveryAction != want || o.Sample.Partial {
			t.Errorf("%s: %+v", value, o)
		}
	}
}

// Where the driver can't determine the state of the GPU, NONE is an unknown recovery action.
func TestUnknownRecoveryAction(t *testing.T) {
	t.Run("vGPU guest", func(t *testing.T) {
		m := simdriver.Start(t, "h100x8")
		must(t, m.Set(2, "virtualization", "vgpu"))
		_, at := openWithClock(t, m)
		if v := at(0)(2).Sample; v.RecoveryAction != health.RecoveryUnknown || v.VGPU != health.Yes {
			t.Errorf("%+v", v)
		}
		if v := at(0)(3).Sample; v.RecoveryAction != health.RecoveryNone || v.VGPU != health.No {
			t.Errorf("%+v", v)
		}
		must(t, m.Set(2, "recovery_action", "1"))
		if v := at(0)(2).Sample.RecoveryAction; v != health.RecoveryReset {
			t.Error(v)
		}
	})
	t.Run("not reported", func(t *testing.T) {
		m := simdriver.Start(t, "h100x8")
		must(t, m.Set(2, "recovery_action", "none"))
		_, at := openWithClock(t, m)
		if v := at(0)(2).Sample; v.RecoveryAction != health.RecoveryUnknown || v.Partial {
			t.Errorf("%+v", v)
		}
	})
	t.Run("Tegra", func(t *testing.T) {
		m := simdriver.Start(t, "t4")
		must(t, m.Set(0, "recovery_action", "0xff"))
		soc := filepath.Join(m.Root, "sys/devices/soc0")
		must(t, os.MkdirAll(soc, 0o755), os.WriteFile(filepath.Join(soc, "family"), []byte("Tegra\n"), 0o644))
		_, at := openWithClock(t, m)
		if v := at(0)(0).Sample.RecoveryAction; v != health.RecoveryUnknown {
			t.Error(v)
		}
	})
}

// What a return code means, of the whole nvmlDeviceGetFieldValues or of the recovery action in it.
func TestReturnCodesOfCheck(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	for code, want := range map[string]health.Observation{
		"GPU_IS_LOST":        {Kind: health.Lost, Detail: "GPU is lost"},
		"UNKNOWN":            {Kind: health.ProbeFailed, Detail: "Unknown Error"},
		"TIMEOUT":            {Kind: health.ProbeFailed, Detail: "Timeout"},
		"IRQ_ISSUE":          {Kind: health.ProbeFailed, Detail: "Interrupt Request Issue"},
		"OPERATING_SYSTEM":   {Kind: health.ProbeFailed, Detail: "GPU access blocked by the operating system"},
		"INSUFFICIENT_POWER": {Kind: health.ProbeFailed, Detail: "Insufficient External Power"},
		"RESET_REQUIRED":     {Kind: health.Checked},
		"NOT_SUPPORTED":      {Kind: health.Checked}, // after an answer
		"NO_PERMISSION":      {Kind: health.Checked},
	} {
		for _, where := range []string{"call", "field"} {
			s, at := openWithClock(t, m)
			at(0)
			if where == "call" {
				must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceGetFieldValues", code, simdriver.Always))
			} else {
				must(t, m.Set(3, "field.230", "!"+code))
			}
			o := at(10 * time.Second)(3)
			if want.Detail != "" && o.Detail != "nvmlDeviceGetFieldValues: "+want.Detail || o.Kind != want.Kind {
				t.Errorf("%s of the %s: %+v", code, where, o)
			}
			reset := code == "RESET_REQUIRED"
			if o.Kind == health.Checked && ((o.Sample.RecoveryAction == health.RecoveryReset) != reset || !o.Sample.Partial) {
				t.Errorf("%s of the %s: %+v", code, where, o.Sample)
			}
			if o := at(20 * time.Second)(4); o.Sample != healthyH100 {
				t.Errorf("%s of the %s: another GPU: %+v", code, where, o)
			}
			if n := calls(t, m)["nvmlDeviceGetHandleByUUID"]; n > 0 {
				t.Errorf("%s of the %s: looked up by UUID", code, where)
			}
			must(t, m.Heal(), m.Set(3, "field.230", "0"), s.Close())
		}
	}
}

// A loss is confirmed through the PCI address: with another handle the GPU may answer.
func TestLossIsConfirmed(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	for _, c := range []struct {
		name, call, code string
		want             health.ObservationKind
	}{
		{"answers with another handle", "", "", health.Checked},
		{"lost", handleByPCI, "GPU_IS_LOST", health.Lost},
		{"not listed", handleByPCI, "NOT_FOUND", health.Lost},
		{"lookup not permitted", handleByPCI, "NO_PERMISSION", health.Lost},
		{"lookup fails", handleByPCI, "UNKNOWN", health.ProbeFailed},
	} {
		s, at := openWithClock(t, m)
		must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceGetFieldValues", "GPU_IS_LOST", 1))
		if c.call != "" {
			must(t, m.Fail(simdriver.GPU(3), c.call, c.code, simdriver.Always))
		}
		if o := at(0)(3); o.Kind != c.want {
			t.Errorf("%s: %+v", c.name, o)
		}
		must(t, m.Heal(), s.Close())
	}
}

// A handle from before a reset is replaced by the next Snapshot.
func TestInvalidHandle(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s, at := openWithClock(t, m)
	at(0)
	must(t, m.Invalidate(3))
	if o := at(time.Second)(3); o.Kind != health.ProbeFailed || o.Detail != errNoAnswer.Error() {
		t.Errorf("%+v", o)
	}
	snapshot(t, s)
	if o := at(2 * time.Second)(3); o.Sample != healthyH100 {
		t.Errorf("%+v", o)
	}
	must(t, m.Set(3, "uuid", "GPU-00000000-0000-0000-0000-000000000001"))
	if o := at(3 * time.Second); o(3).Kind != 0 || o(4).Sample != healthyH100 {
		t.Errorf("replaced: %+v", o(3))
	}
}

func TestFabric(t *testing.T) {
	const none, starting, running, done = 0, 1, 2, 3
	for _, c := range []struct {
		name    string
		ret     nvml.Return
		state   uint8
		status  nvml.Return
		mask    uint32
		summary uint8
		want    health.Fabric
	}{
		{"no such call", nvml.ERROR_NOT_SUPPORTED, done, 0, 0, 0, health.FabricNotReported},
		{"no part of one", 0, none, 0, 0, 0, health.FabricNotReported},
		{"not started", 0, starting, nvml.ERROR_NOT_FOUND, 0, 0, health.FabricStarting},
		{"in progress", 0, running, nvml.ERROR_NOT_FOUND, 0, 2, health.FabricStarting},
		{"an H100: no summary", 0, done, 0, 0, 0, health.FabricHealthy},
		{"healthy", 0, done, 0, 0b10 | 1<<8, 1, health.FabricHealthy},
		{"completed with an error", 0, done, nvml.ERROR_UNKNOWN, 0, 1, health.FabricUnhealthy},
		{"unhealthy", 0, done, 0, 0, 2, health.FabricUnhealthy},
		{"limited capacity", 0, done, 0, 0, 3, health.FabricLimited},
		{"degraded bandwidth", 0, done, 0, 0b01, 0, health.FabricLimited},
		{"bandwidth not degraded", 0, done, 0, 0b10, 0, health.FabricHealthy},
		{"wrong system GUID", 0, done, 0, 2 << 8, 2, health.FabricMisconfigured},
		{"GPU state invalid", 0, done, 0, 8 << 8, 0, health.FabricMisconfigured},
		{"a state of another time", 0, 9, 0, 0, 2, health.FabricNotReported},
	} {
		i := nvml.GpuFabricInfo_v3{State: c.state, Status: uint32(c.status), HealthMask: c.mask, HealthSummary: c.summary}
		if got := fabricState(c.ret, i); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestFieldValue(t *testing.T) {
	var raw [8]byte
	binary.NativeEndian.PutUint64(raw[:], 0x1122334455667788)
	low32, low16 := uint64(0x55667788), uint64(0x7788)
	for kind, want := range map[nvml.ValueType]uint64{
		nvml.VALUE_TYPE_UNSIGNED_LONG_LONG: 0x1122334455667788, nvml.VALUE_TYPE_UNSIGNED_LONG: 0x1122334455667788,
		nvml.VALUE_TYPE_UNSIGNED_INT: low32, nvml.VALUE_TYPE_SIGNED_INT: low32, nvml.VALUE_TYPE_UNSIGNED_SHORT: low16,
	} {
		if got := fieldValue(nvml.FieldValue{ValueType: uint32(kind), Value: raw}); got != want {
			t.Errorf("type %d: %#x, want %#x", kind, got, want)
		}
	}
}
