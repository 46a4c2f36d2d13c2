package simdriver_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// migDevices are the MIG devices of a GPU.
func migDevices(t testing.TB, dev nvml.Device) (all []nvml.Device) {
	t.Helper()
	for i := range of(dev.GetMaxMigDeviceCount()).get(t, "max mig") {
		mig, code := dev.GetMigDeviceHandleByIndex(i)
		if code != nvml.ERROR_NOT_FOUND {
			all = append(all, of(mig, code).get(t, "mig handle"))
		}
	}
	return all
}

// profileOf is the profile of a MIG device.
func profileOf(t testing.TB, mig nvml.Device) string {
	t.Helper()
	_, profile, _ := strings.Cut(of(mig.GetName()).get(t, "mig name"), " MIG ")
	return profile
}

// layout is "profile gi/ci" of each MIG device of a GPU.
func layout(t testing.TB, dev nvml.Device) (all []string) {
	t.Helper()
	for _, mig := range migDevices(t, dev) {
		gi, ci := of(mig.GetGpuInstanceId()).get(t, "gi"), of(mig.GetComputeInstanceId()).get(t, "ci")
		all = append(all, fmt.Sprintf("%s %d/%d", profileOf(t, mig), gi, ci))
	}
	return all
}

func TestMIGDevices(t *testing.T) {
	d := open(t, "a100-mig")
	same(t, "GPU 0", fmt.Sprint(layout(t, d.gpu(0))), "[]")
	same(t, "GPU 4", fmt.Sprint(layout(t, d.gpu(4))),
		"[1g.10gb 7/0 1g.10gb 8/0 1g.10gb 9/0 1g.10gb 10/0 1g.10gb 11/0 1g.10gb 12/0 1g.10gb 13/0]")
	same(t, "GPU 5", fmt.Sprint(layout(t, d.gpu(5))), "[3g.40gb 1/0 2g.20gb 3/0 1g.10gb 9/0 1g.10gb+me 10/0]")
	same(t, "GPU 7", fmt.Sprint(layout(t, d.gpu(7))), "[]")

	parent := d.gpu(5)
	mig := of(parent.GetMigDeviceHandleByIndex(0)).get(t, "mig")
	of(mig.IsMigDeviceHandle()).is(t, "is mig", true)
	of(mig.GetDeviceHandleFromMigDeviceHandle()).is(t, "parent", parent)
	id := of(mig.GetUUID()).get(t, "uuid")
	of(d.DeviceGetHandleByUUID(id)).is(t, "by uuid", mig)

	gi := of(parent.GetGpuInstanceById(1)).get(t, "gpu instance")
	info := of(gi.GetInfo()).get(t, "gpu instance info")
	same(t, "gpu instance", fmt.Sprint(info.Id, info.ProfileId, info.Placement), "1 9 {4 4}")
	ci := of(gi.GetComputeInstanceById(0)).get(t, "compute instance")
	same(t, "compute instance", of(ci.GetInfo()).get(t, "compute instance info").ProfileId, 2)
	profile := of(parent.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_3_SLICE)).get(t, "profile")
	same(t, "profile", fmt.Sprint(profile.Id, profile.MemorySizeMB), "9 40192")
}

func TestMIGLayoutChange(t *testing.T) {
	d := open(t, "a100-mig")
	old := of(d.gpu(4).GetMigDeviceHandleByIndex(0)).get(t, "mig")
	ok(t, d.m.SetMIG(4, "3g.40gb", "1g.10gb", "2g.20gb"))
	same(t, "layout", fmt.Sprint(layout(t, d.gpu(4))), "[3g.40gb 2/0 1g.10gb 7/0 2g.20gb 4/0]")
	of(old.GetUUID()).returns(t, "an instance that was destroyed", nvml.ERROR_INVALID_ARGUMENT)
	ids, err := d.m.Instances(4)
	ok(t, err)
	same(t, "instances", len(ids), 3)
	if err := d.m.SetMIG(4, "7g.80gb", "1g.10gb"); err == nil {
		t.Error("nine slices fit eight")
	}
	same(t, "layout after a refused one", len(layout(t, d.gpu(4))), 3)
	ok(t, d.m.MIGOff(4))
	same(t, "layout", len(layout(t, d.gpu(4))), 0)
}

// attributesOf is what each MIG device of a GPU has: multiprocessors, slices of the GPU and of compute, copy engines,
// decoders, encoders, JPEG decoders, OFAs, MiB of memory.
func attributesOf(t testing.TB, dev nvml.Device) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, mig := range migDevices(t, dev) {
		a := of(mig.GetAttributes()).get(t, "attributes")
		all[profileOf(t, mig)] = fmt.Sprint(a.MultiprocessorCount, a.GpuInstanceSliceCount, a.ComputeInstanceSliceCount,
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
				mig := of(d.gpu(0).GetMigDeviceHandleByIndex(i)).get(t, "mig")
				gi := of(mig.GetGpuInstanceId()).get(t, "gi")
				instance := of(d.gpu(0).GetGpuInstanceById(gi)).get(t, "instance")
				info := of(instance.GetInfo()).get(t, "info")
				got = append(got, fmt.Sprintf("%d@%d", gi, info.Placement.Start))
			}
			same(t, "layout", fmt.Sprint(got), tt.places)
		})
	}
}

// Which calls accept the handle of an instance (nvml.h).
func TestCallsOfAnInstance(t *testing.T) {
	d := open(t, "a100-mig")
	gpu := d.gpu(5)
	mig := of(gpu.GetMigDeviceHandleByIndex(0)).get(t, "mig") // 3g.40gb: half of the memory
	id := of(mig.GetUUID()).get(t, "uuid")
	ok(t, d.m.SetInstance(id, "used=4096MiB", "bar1_used=12MiB", "ecc_uncorrected=3"))
	memory := of(mig.GetMemoryInfo()).get(t, "memory")
	same(t, "memory", fmt.Sprint(memory.Used>>20, memory.Total>>20), "4096 40192")
	bar1 := of(mig.GetBAR1MemoryInfo()).get(t, "BAR1")
	same(t, "BAR1", fmt.Sprint(bar1.Bar1Used>>20, bar1.Bar1Total>>20), "12 65536")
	of(mig.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC, nvml.MEMORY_LOCATION_SRAM)).is(t, "errors", 3)
	for what, call := range map[string]func(nvml.Device) nvml.Return{
		"corrected errors": func(h nvml.Device) nvml.Return {
			return of(h.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC, nvml.MEMORY_LOCATION_L2_CACHE)).code
		},
		"power":       func(h nvml.Device) nvml.Return { return of(h.GetPowerUsage()).code },
		"temperature": func(h nvml.Device) nvml.Return { return of(h.GetTemperature(nvml.TEMPERATURE_GPU)).code },
		"serial":      func(h nvml.Device) nvml.Return { return of(h.GetSerial()).code },
		"brand":       func(h nvml.Device) nvml.Return { return of(h.GetBrand()).code },
		"ECC mode":    func(h nvml.Device) nvml.Return { return of2(h.GetEccMode()).code },
		"NVLink":      func(h nvml.Device) nvml.Return { return of(h.GetNvLinkState(0)).code },
		"MIG mode":    func(h nvml.Device) nvml.Return { return of2(h.GetMigMode()).code },
	} {
		want(t, what+" of an instance", call(mig), nvml.ERROR_NOT_SUPPORTED)
		want(t, what+" of a GPU in MIG mode", call(gpu), nvml.SUCCESS)
	}
	for what, call := range map[string]func(nvml.Device) nvml.Return{
		"utilization": func(h nvml.Device) nvml.Return { return of(h.GetUtilizationRates()).code },
		"encoder":     func(h nvml.Device) nvml.Return { return of2(h.GetEncoderUtilization()).code },
		"decoder":     func(h nvml.Device) nvml.Return { return of2(h.GetDecoderUtilization()).code },
		"cores":       func(h nvml.Device) nvml.Return { return of(h.GetNumGpuCores()).code },
	} {
		want(t, what+" of an instance", call(mig), nvml.ERROR_NOT_SUPPORTED)
		want(t, what+" of a GPU in MIG mode", call(gpu), nvml.ERROR_NOT_SUPPORTED)
		want(t, what+" of a GPU", call(d.gpu(0)), nvml.SUCCESS)
	}
	of(mig.GetMigDeviceHandleByIndex(0)).returns(t, "an instance of an instance", nvml.ERROR_INVALID_ARGUMENT)
	of(gpu.GetDeviceHandleFromMigDeviceHandle()).returns(t, "the GPU of a GPU", nvml.ERROR_INVALID_ARGUMENT)
	of(gpu.GetAttributes()).returns(t, "attributes of a GPU", nvml.ERROR_NOT_SUPPORTED)
}

// Instances have numbers with gaps when one in the middle was destroyed.
func TestIndexOfAnInstance(t *testing.T) {
	d := open(t, "a30")
	ids, err := d.m.Instances(1)
	ok(t, err)
	ok(t, d.m.SetInstance(ids[2], "index=3"))
	of(d.gpu(1).GetMigDeviceHandleByIndex(2)).returns(t, "a gap", nvml.ERROR_NOT_FOUND)
	of(of(d.gpu(1).GetMigDeviceHandleByIndex(3)).get(t, "mig").GetIndex()).is(t, "index", 3)
	for _, word := range []string{"gi=4", "used=1 MiB", "used"} {
		if err := d.m.SetInstance(ids[2], word); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %v", word, err)
		}
	}
	if err := d.m.SetInstance("MIG-none", "used=1MiB"); err == nil {
		t.Error("an instance that is not there was changed")
	}
}
