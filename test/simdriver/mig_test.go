package simdriver_test

import (
	"fmt"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// layout is "profile gi/ci" of each MIG device of a GPU.
func layout(t testing.TB, dev nvml.Device) []string {
	t.Helper()
	n, ret := dev.GetMaxMigDeviceCount()
	want(t, "max mig", ret, nvml.SUCCESS)
	var all []string
	for i := range n {
		mig, ret := dev.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		want(t, "mig handle", ret, nvml.SUCCESS)
		name, ret := mig.GetName()
		want(t, "mig name", ret, nvml.SUCCESS)
		gi, ret := mig.GetGpuInstanceId()
		want(t, "gi", ret, nvml.SUCCESS)
		ci, ret := mig.GetComputeInstanceId()
		want(t, "ci", ret, nvml.SUCCESS)
		all = append(all, fmt.Sprintf("%s %d/%d", name[len("NVIDIA A100-SXM4-80GB MIG "):], gi, ci))
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
	mig, ret := parent.GetMigDeviceHandleByIndex(0)
	want(t, "mig", ret, nvml.SUCCESS)
	is, ret := mig.IsMigDeviceHandle()
	want(t, "is mig", ret, nvml.SUCCESS)
	same(t, "is mig", is, true)
	back, ret := mig.GetDeviceHandleFromMigDeviceHandle()
	want(t, "parent", ret, nvml.SUCCESS)
	same(t, "parent", back, parent)
	id, ret := mig.GetUUID()
	want(t, "uuid", ret, nvml.SUCCESS)
	again, ret := d.DeviceGetHandleByUUID(id)
	want(t, "by uuid", ret, nvml.SUCCESS)
	same(t, "by uuid", again, mig)
	attributes, ret := mig.GetAttributes()
	want(t, "attributes", ret, nvml.SUCCESS)
	same(t, "attributes", fmt.Sprint(attributes.MultiprocessorCount, attributes.GpuInstanceSliceCount, attributes.MemorySizeMB), "42 3 40192")
	memory, ret := mig.GetMemoryInfo()
	want(t, "memory", ret, nvml.SUCCESS)
	same(t, "memory", memory.Total>>20, 40192)
	_, ret = mig.GetPowerUsage()
	want(t, "power of an instance", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = parent.GetUtilizationRates()
	want(t, "utilization under MIG", ret, nvml.ERROR_NOT_SUPPORTED)

	gi, ret := parent.GetGpuInstanceById(1)
	want(t, "gpu instance", ret, nvml.SUCCESS)
	info, ret := gi.GetInfo()
	want(t, "gpu instance info", ret, nvml.SUCCESS)
	same(t, "gpu instance", fmt.Sprint(info.Id, info.ProfileId, info.Placement), "1 9 {4 4}")
	ci, ret := gi.GetComputeInstanceById(0)
	want(t, "compute instance", ret, nvml.SUCCESS)
	ciInfo, ret := ci.GetInfo()
	want(t, "compute instance info", ret, nvml.SUCCESS)
	same(t, "compute instance", ciInfo.ProfileId, 2)
	profile, ret := parent.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_3_SLICE)
	want(t, "profile", ret, nvml.SUCCESS)
	same(t, "profile", fmt.Sprint(profile.Id, profile.MemorySizeMB), "9 40192")
}

func TestMIGLayoutChange(t *testing.T) {
	d := open(t, "a100-mig")
	old, ret := d.gpu(4).GetMigDeviceHandleByIndex(0)
	want(t, "mig", ret, nvml.SUCCESS)
	ok(t, d.m.SetMIG(4, "3g.40gb", "1g.10gb", "2g.20gb"))
	same(t, "layout", fmt.Sprint(layout(t, d.gpu(4))), "[3g.40gb 2/0 1g.10gb 7/0 2g.20gb 4/0]")
	_, ret = old.GetUUID()
	want(t, "an instance that was destroyed", ret, nvml.ERROR_INVALID_ARGUMENT)
	ids, err := d.m.Instances(4)
	ok(t, err)
	same(t, "instances", len(ids), 3)
	if err := d.m.SetMIG(4, "7g.80gb", "1g.10gb"); err == nil {
		t.Error("eight slices took nine")
	}
	same(t, "layout after a refused one", len(layout(t, d.gpu(4))), 3)
	ok(t, d.m.MIGOff(4))
	same(t, "layout", len(layout(t, d.gpu(4))), 0)
}
