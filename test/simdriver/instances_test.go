package simdriver_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// attributesOf is what each MIG device of a GPU has: multiprocessors, slices of the GPU and of compute, copy engines,
// decoders, encoders, JPEG decoders, OFAs, MiB of memory.
func attributesOf(t testing.TB, dev nvml.Device) map[string]string {
	t.Helper()
	all := map[string]string{}
	n, ret := dev.GetMaxMigDeviceCount()
	want(t, "max mig", ret, nvml.SUCCESS)
	for i := range n {
		mig, ret := dev.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		want(t, "mig handle", ret, nvml.SUCCESS)
		name, ret := mig.GetName()
		want(t, "name", ret, nvml.SUCCESS)
		_, profile, _ := strings.Cut(name, " MIG ")
		a, ret := mig.GetAttributes()
		want(t, "attributes", ret, nvml.SUCCESS)
		all[profile] = fmt.Sprint(a.MultiprocessorCount, a.GpuInstanceSliceCount, a.ComputeInstanceSliceCount,
			a.SharedCopyEngineCount, a.SharedDecoderCount, a.SharedEncoderCount, a.SharedJpegCount, a.SharedOfaCount, a.MemorySizeMB)
	}
	return all
}

// The numbers are those of `nvidia-smi mig -lgip` and of NVIDIA's MIG user guide.
func TestProfilesOfMachines(t *testing.T) {
	for machine, profiles := range map[string]map[string]string{
		"a100x16-mig": {"1g.5gb+me": "14 1 1 1 1 0 1 1 4864", "1g.10gb": "14 1 1 1 1 0 0 0 9856", "2g.10gb": "28 2 2 2 1 0 0 0 9856", "7g.40gb": "98 7 7 7 5 0 1 1 40192"},
		"a100-mig":    {"1g.20gb": "14 1 1 1 1 0 0 0 19968", "3g.40gb": "42 3 3 3 2 0 0 0 40192", "1c.3g.40gb": "14 3 1 3 2 0 0 0 40192"},
		"h100x8":      {"1g.10gb": "16 1 1 1 1 0 1 0 9984", "1g.20gb": "26 1 1 1 1 0 1 0 20096", "4g.40gb": "64 4 4 4 4 0 4 0 40448"},
		"h200":        {"1g.18gb+me": "16 1 1 1 1 0 1 1 16384", "2g.35gb": "32 2 2 2 2 0 2 0 33280", "7g.141gb": "132 7 7 8 7 0 7 1 143360"},
		"b200":        {"1g.23gb": "18 1 1 2 1 0 1 0 22528", "1g.45gb": "30 1 1 2 1 0 1 0 45312", "2g.45gb": "36 2 2 4 2 0 2 0 45312"},
		"a30":         {"1g.6gb": "14 1 1 1 1 0 0 0 5952", "2g.12gb+me": "28 2 2 2 2 0 1 1 11968", "4g.24gb": "56 4 4 4 4 0 1 1 24000"},
		"rtxpro6000":  {"1g.24gb+gfx": "46 1 1 1 1 1 1 0 24192", "1g.24gb-me": "46 1 1 1 0 0 0 0 24192", "2g.48gb+me.all": "94 2 2 2 4 4 4 1 48512"},
	} {
		t.Run(machine, func(t *testing.T) {
			d := open(t, machine)
			for profile, has := range profiles {
				ok(t, d.m.SetMIG(0, profile))
				same(t, profile, attributesOf(t, d.gpu(0))[profile], has)
			}
		})
	}
}

func TestLayouts(t *testing.T) {
	for _, tt := range []struct{ machine, profiles, places string }{
		{"h100x8", "1g.10gb 3g.40gb 2g.20gb", "[7@0 2@4 4@2]"},
		{"h100x8", "3g.40gb 3g.40gb", "[2@4 1@0]"},
		{"h100x8", "4g.40gb 3g.40gb", "[1@0 2@4]"},
		{"h100x8", "1g.20gb 1g.20gb 1g.20gb 1g.20gb", "[3@0 4@2 5@4 6@6]"},
		{"h100x8", "2g.20gb 2g.20gb 2g.20gb 1g.10gb", "[3@0 4@2 5@4 13@6]"},
		{"h100x8", "2g.20gb 2g.20gb 2g.20gb 2g.20gb", "MIG layout of GPU 0: no room for 2g.20gb: there are 3 already"},
		{"h100x8", "4g.40gb 3g.40gb 1g.10gb", "MIG layout of GPU 0: no room for 1g.10gb"},
		{"h100x8", "1g.10gb+me 1g.10gb+me", "MIG layout of GPU 0: no room for 1g.10gb+me: there are 1 already"},
		{"h100x8", "9g.80gb", "MIG layout of GPU 0: no [profile 9g.80gb]"},
		{"a30", "2g.12gb 1g.6gb 1g.6gb+me", "[1@0 5@2 6@3]"},
		{"a30", "4g.24gb", "[0@0]"},
		{"a30", "4g.24gb 1g.6gb", "MIG layout of GPU 0: no room for 1g.6gb"},
	} {
		t.Run(tt.machine+" "+tt.profiles, func(t *testing.T) {
			d := open(t, tt.machine)
			if err := d.m.SetMIG(0, strings.Fields(tt.profiles)...); err != nil {
				same(t, "layout", err.Error(), tt.places)
				return
			}
			var got []string
			for i := range strings.Fields(tt.profiles) {
				mig, ret := d.gpu(0).GetMigDeviceHandleByIndex(i)
				want(t, "mig", ret, nvml.SUCCESS)
				gi, ret := mig.GetGpuInstanceId()
				want(t, "gi", ret, nvml.SUCCESS)
				instance, ret := d.gpu(0).GetGpuInstanceById(gi)
				want(t, "instance", ret, nvml.SUCCESS)
				info, ret := instance.GetInfo()
				want(t, "info", ret, nvml.SUCCESS)
				got = append(got, fmt.Sprintf("%d@%d", gi, info.Placement.Start))
			}
			same(t, "layout", fmt.Sprint(got), tt.places)
		})
	}
}

// What NVML takes the handle of an instance for, and what it does not (nvml.h).
func TestCallsOfAnInstance(t *testing.T) {
	d := open(t, "a100-mig")
	gpu := d.gpu(5)
	mig, ret := gpu.GetMigDeviceHandleByIndex(0) // 3g.40gb: half of the memory
	want(t, "mig", ret, nvml.SUCCESS)
	id, ret := mig.GetUUID()
	want(t, "uuid", ret, nvml.SUCCESS)
	ok(t, d.m.SetInstance(id, "used=4096MiB", "bar1_used=12MiB", "ecc_uncorrected=3"))
	memory, ret := mig.GetMemoryInfo()
	want(t, "memory", ret, nvml.SUCCESS)
	same(t, "memory", fmt.Sprint(memory.Used>>20, memory.Total>>20), "4096 40192")
	bar1, ret := mig.GetBAR1MemoryInfo()
	want(t, "BAR1", ret, nvml.SUCCESS)
	same(t, "BAR1", fmt.Sprint(bar1.Bar1Used>>20, bar1.Bar1Total>>20), "12 65536")
	errors, ret := mig.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC, nvml.MEMORY_LOCATION_SRAM)
	want(t, "errors", ret, nvml.SUCCESS)
	same(t, "errors", errors, 3)
	for what, call := range map[string]func(nvml.Device) nvml.Return{
		"corrected errors": func(h nvml.Device) nvml.Return {
			_, ret := h.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC, nvml.MEMORY_LOCATION_L2_CACHE)
			return ret
		},
		"power":       func(h nvml.Device) nvml.Return { _, ret := h.GetPowerUsage(); return ret },
		"temperature": func(h nvml.Device) nvml.Return { _, ret := h.GetTemperature(nvml.TEMPERATURE_GPU); return ret },
		"serial":      func(h nvml.Device) nvml.Return { _, ret := h.GetSerial(); return ret },
		"brand":       func(h nvml.Device) nvml.Return { _, ret := h.GetBrand(); return ret },
		"ECC mode":    func(h nvml.Device) nvml.Return { _, _, ret := h.GetEccMode(); return ret },
		"NVLink":      func(h nvml.Device) nvml.Return { _, ret := h.GetNvLinkState(0); return ret },
		"MIG mode":    func(h nvml.Device) nvml.Return { _, _, ret := h.GetMigMode(); return ret },
	} {
		want(t, what+" of an instance", call(mig), nvml.ERROR_NOT_SUPPORTED)
		want(t, what+" of a GPU in MIG mode", call(gpu), nvml.SUCCESS)
	}
	for what, call := range map[string]func(nvml.Device) nvml.Return{
		"utilization": func(h nvml.Device) nvml.Return { _, ret := h.GetUtilizationRates(); return ret },
		"encoder":     func(h nvml.Device) nvml.Return { _, _, ret := h.GetEncoderUtilization(); return ret },
		"decoder":     func(h nvml.Device) nvml.Return { _, _, ret := h.GetDecoderUtilization(); return ret },
		"cores":       func(h nvml.Device) nvml.Return { _, ret := h.GetNumGpuCores(); return ret },
	} {
		want(t, what+" of an instance", call(mig), nvml.ERROR_NOT_SUPPORTED)
		want(t, what+" of a GPU in MIG mode", call(gpu), nvml.ERROR_NOT_SUPPORTED)
		want(t, what+" of a GPU", call(d.gpu(0)), nvml.SUCCESS)
	}
	_, ret = mig.GetMigDeviceHandleByIndex(0)
	want(t, "an instance of an instance", ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = gpu.GetDeviceHandleFromMigDeviceHandle()
	want(t, "the GPU of a GPU", ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = gpu.GetAttributes()
	want(t, "attributes of a GPU", ret, nvml.ERROR_NOT_SUPPORTED)
}

// Instances have numbers with gaps when one in the middle was destroyed.
func TestIndexOfAnInstance(t *testing.T) {
	d := open(t, "a30")
	ids, err := d.m.Instances(1)
	ok(t, err)
	ok(t, d.m.SetInstance(ids[2], "index=3"))
	_, ret := d.gpu(1).GetMigDeviceHandleByIndex(2)
	want(t, "a gap", ret, nvml.ERROR_NOT_FOUND)
	mig, ret := d.gpu(1).GetMigDeviceHandleByIndex(3)
	want(t, "mig", ret, nvml.SUCCESS)
	index, ret := mig.GetIndex()
	want(t, "index", ret, nvml.SUCCESS)
	same(t, "index", index, 3)
	for _, word := range []string{"gi=4", "used=1 MiB", "used"} {
		if err := d.m.SetInstance(ids[2], word); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %v", word, err)
		}
	}
	if err := d.m.SetInstance("MIG-none", "used=1MiB"); err == nil {
		t.Error("an instance that is not there was changed")
	}
}
