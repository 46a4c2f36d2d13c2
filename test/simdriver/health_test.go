package simdriver_test

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestInvalidHandles(t *testing.T) {
	d := open(t, "a100-mig")
	dev, other := d.gpu(5), d.gpu(6)
	instance, ret := dev.GetMigDeviceHandleByIndex(0)
	want(t, "instance", ret, nvml.SUCCESS)
	ok(t, d.m.Invalidate(5))
	for _, h := range []nvml.Device{dev, instance} {
		_, ret := h.GetUUID()
		want(t, "a handle from before", ret, nvml.ERROR_INVALID_ARGUMENT)
	}
	_, ret = other.GetUUID()
	want(t, "another GPU", ret, nvml.SUCCESS)
	again := d.gpu(5)
	id, ret := again.GetUUID()
	want(t, "a handle from after", ret, nvml.SUCCESS)
	same(t, "uuid", id, d.m.UUID(5))
	if again == dev {
		t.Error("it is the same handle")
	}
	_, ret = again.GetMigDeviceHandleByIndex(0)
	want(t, "instance", ret, nvml.SUCCESS)
}

func TestOneGPUUnbound(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(2)
	ok(t, d.m.Set(2, "recovery_action", "1"))
	ok(t, d.m.Unbind(2))
	_, ret := dev.GetUUID()
	want(t, "unbound", ret, nvml.ERROR_GPU_IS_LOST)
	ok(t, d.m.Bind(2))
	verdict := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	want(t, "bound", dev.GetFieldValues(verdict), nvml.SUCCESS)
	same(t, "verdict", verdict[0].Value[0], 0)
}

// A lookup is a call on the GPU that it finds.
func TestConcurrentLookup(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(5)
	ok(t, d.m.Hang(simdriver.GPU(5), "nvmlDeviceGetHandleByIndex"))
	done := make(chan nvml.Return)
	go func() { _, ret := d.DeviceGetHandleByIndex(5); done <- ret }()
	until(t, func() bool {
		_, ret := dev.GetPowerUsage()
		want(t, "second call", ret, nvml.SUCCESS)
		all, err := d.m.Violations()
		ok(t, err)
		return len(all) > 0
	})
	overlapped(t, d.m, "nvmlDeviceGetPowerUsage", "nvmlDeviceGetHandleByIndex_v2")
	ok(t, d.m.Heal())
	want(t, "lookup", <-done, nvml.SUCCESS)
}

func TestSetFreedDuringRegistration(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError)
	dev := d.gpu(5)
	ok(t, d.m.Hang(simdriver.GPU(5), "nvmlDeviceRegisterEvents"))
	done := make(chan nvml.Return)
	go func() { done <- dev.RegisterEvents(nvml.EventTypeXidCriticalError, set) }()
	entered(t, d.m, "nvmlDeviceRegisterEvents")
	want(t, "free", set.Free(), nvml.SUCCESS)
	one(t, d.m, "nvmlEventSetFree", "being registered")
	ok(t, d.m.Heal())
	want(t, "register", <-done, nvml.ERROR_INVALID_ARGUMENT)
	one(t, d.m, "nvmlDeviceRegisterEvents", "freed event set")
}

func TestFabricVersions(t *testing.T) {
	d := open(t, "h100x8")
	ok(t, d.m.Change(0, "fabric_version = 2", "fabric_health_summary = 2"))
	_, ret := d.gpu(0).GetGpuFabricInfoV().V3()
	want(t, "v3", ret, nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	_, ret = d.gpu(0).GetGpuFabricInfoV().V2()
	want(t, "v2", ret, nvml.SUCCESS)
	info, ret := d.gpu(1).GetGpuFabricInfoV().V3()
	want(t, "v3 of another", ret, nvml.SUCCESS)
	same(t, "summary", info.HealthSummary, 0)
}

// What nvmlDeviceGetRemappedRows does not say while there are instances, the fields do not say either.
func TestRemappingUnderMIG(t *testing.T) {
	d := open(t, "a100-mig")
	for slot, expected := range map[int]nvml.Return{0: nvml.SUCCESS, 5: nvml.ERROR_NOT_SUPPORTED} {
		v := []nvml.FieldValue{{FieldId: nvml.FI_DEV_REMAPPED_PENDING}}
		want(t, "fields", d.gpu(slot).GetFieldValues(v), nvml.SUCCESS)
		same(t, "remap pending", nvml.Return(v[0].NvmlReturn), expected)
	}
}

func TestStorm(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError, 0, 1)
	ok(t, d.m.Storm(1, 31, 1000))
	ok(t, d.m.XID(0, 48))
	n := map[uint64]int{}
	for range 1001 {
		e, ret := set.Wait(1000)
		want(t, "wait", ret, nvml.SUCCESS)
		n[e.EventData]++
	}
	if n[31] != 1000 || n[48] != 1 {
		t.Error(n)
	}
	want(t, "free", set.Free(), nvml.SUCCESS)
}
