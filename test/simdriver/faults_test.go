package simdriver_test

import (
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestLostGPU(t *testing.T) {
	d := open(t, "h100x8")
	dev, neighbour := d.gpu(3), d.gpu(4)
	ok(t, d.m.Lose(3))
	of(dev.GetTemperature(nvml.TEMPERATURE_GPU)).returns(t, "call", nvml.ERROR_GPU_IS_LOST)
	of(d.DeviceGetHandleByIndex(3)).returns(t, "lookup by index", nvml.ERROR_GPU_IS_LOST)
	of(d.DeviceGetHandleByUUID(d.m.UUID(3))).returns(t, "lookup by uuid", nvml.ERROR_GPU_IS_LOST)
	of(d.DeviceGetCount()).is(t, "count", 8)
	of(neighbour.GetTemperature(nvml.TEMPERATURE_GPU)).returns(t, "neighbour", nvml.SUCCESS)
	of(neighbour.GetTopologyCommonAncestor(dev)).returns(t, "topology towards it", nvml.ERROR_GPU_IS_LOST)
	ok(t, d.m.Restore(3))
	of(dev.GetTemperature(nvml.TEMPERATURE_GPU)).returns(t, "call after restore", nvml.SUCCESS)
}

func TestFailingCalls(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(3)
	ok(t, d.m.Fail(simdriver.GPU(3), "nvmlDeviceGetMemoryInfo", "GPU_IS_LOST", 2))
	for _, expected := range []nvml.Return{nvml.ERROR_GPU_IS_LOST, nvml.ERROR_GPU_IS_LOST, nvml.SUCCESS} {
		of(dev.GetMemoryInfo()).returns(t, "memory", expected)
	}
	ok(t, d.m.Fail(simdriver.GPU(3), "*", "UNKNOWN", simdriver.Always))
	of(dev.GetUUID()).returns(t, "every call", nvml.ERROR_UNKNOWN)
	of(d.DeviceGetHandleByIndex(3)).returns(t, "lookup, named without its version", nvml.ERROR_UNKNOWN)
	of(d.gpu(2).GetUUID()).returns(t, "another GPU", nvml.SUCCESS)
	ok(t, d.m.Heal(simdriver.GPU(3)))
	of(dev.GetUUID()).returns(t, "healed", nvml.SUCCESS)

	ok(t, d.m.Fail(simdriver.All, "nvmlDeviceGetCount", "DRIVER_NOT_LOADED", simdriver.Always))
	of(d.DeviceGetCount()).returns(t, "a call without a GPU", nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, d.m.Heal())
	of(d.DeviceGetCount()).returns(t, "count", nvml.SUCCESS)
}

func TestAddAndRemove(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(7)
	ok(t, d.m.Remove(2))
	of(d.DeviceGetCount()).is(t, "count", 7)
	same(t, "the last index", d.gpu(6), dev)
	of(dev.GetIndex()).is(t, "index", 6)
	same(t, "links", countLinks(dev), 18)
	ok(t, d.m.Add(9, "minor = 9", "numa = 1"))
	of(d.DeviceGetCount()).is(t, "count", 8)
	of(d.gpu(7).GetUUID()).is(t, "uuid", d.m.UUID(9))
	same(t, "links of the new GPU", countLinks(d.gpu(7)), 18)
	if err := d.m.Set(9, "temprature", "3"); err == nil || !strings.Contains(err.Error(), "temprature") {
		t.Errorf("a misspelled key: %v", err)
	}
}

func TestDriverReload(t *testing.T) {
	d := open(t, "h200")
	dev := d.gpu(0)
	ok(t, d.m.Unload())
	of(dev.GetUUID()).returns(t, "call while unloaded", nvml.ERROR_DRIVER_NOT_LOADED)
	want(t, "second init", d.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, d.m.Load())
	of(dev.GetUUID()).returns(t, "call on the session from before", nvml.ERROR_DRIVER_NOT_LOADED)
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	want(t, "init", d.Init(), nvml.SUCCESS)
	of(d.gpu(0).GetUUID()).returns(t, "call", nvml.SUCCESS)
	ok(t, d.m.SetDriver("600.1.2"))
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	want(t, "init with the old library", d.Init(), nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	ok(t, d.m.SetDriver("570.124.06"))
	want(t, "init", d.Init(), nvml.SUCCESS)
	if err := d.m.ReplaceLibrary(strings.Repeat("1", 96)); err == nil {
		t.Error("a version that is too long was accepted")
	}
}

func TestReset(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(6)
	ok(t, d.m.Change(6, "lost = yes", "recovery_action = 1", "remapped_pending = yes", "ecc_uncorrected_volatile = 3"))
	of(dev.GetUUID()).returns(t, "call", nvml.ERROR_GPU_IS_LOST)
	ok(t, d.m.Reset(6))
	_, _, pending, _, code := dev.GetRemappedRows()
	of(pending, code).is(t, "pending", false)
	of(dev.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)).is(t, "ecc", 0)
	of(dev.GetRetiredPagesPendingStatus()).returns(t, "what an H100 does not report", nvml.ERROR_NOT_SUPPORTED)
}

func TestInvalidHandles(t *testing.T) {
	d := open(t, "a100-mig")
	dev, other := d.gpu(5), d.gpu(6)
	instance := of(dev.GetMigDeviceHandleByIndex(0)).get(t, "instance")
	ok(t, d.m.Invalidate(5))
	for _, h := range []nvml.Device{dev, instance} {
		of(h.GetUUID()).returns(t, "a handle from before", nvml.ERROR_INVALID_ARGUMENT)
	}
	of(other.GetUUID()).returns(t, "another GPU", nvml.SUCCESS)
	again := d.gpu(5)
	of(again.GetUUID()).is(t, "uuid", d.m.UUID(5))
	if again == dev {
		t.Error("it is the same handle")
	}
	of(again.GetMigDeviceHandleByIndex(0)).returns(t, "instance", nvml.SUCCESS)
}

func TestOneGPUUnbound(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(2)
	ok(t, d.m.Set(2, "recovery_action", "1"))
	ok(t, d.m.Unbind(2))
	of(dev.GetUUID()).returns(t, "unbound", nvml.ERROR_GPU_IS_LOST)
	ok(t, d.m.Bind(2))
	field(t, dev, nvml.FI_DEV_GET_GPU_RECOVERY_ACTION).is(t, "recovery action", 0)
}

func TestFabricVersions(t *testing.T) {
	d := open(t, "h100x8")
	ok(t, d.m.Change(0, "fabric_version = 2", "fabric_health_summary = 2"))
	of(d.gpu(0).GetGpuFabricInfoV().V3()).returns(t, "v3", nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	of(d.gpu(0).GetGpuFabricInfoV().V2()).returns(t, "v2", nvml.SUCCESS)
	same(t, "summary of another GPU", of(d.gpu(1).GetGpuFabricInfoV().V3()).get(t, "v3").HealthSummary, 0)
}

// While there are instances the fields report no remapping, as nvmlDeviceGetRemappedRows does not.
func TestRemappingUnderMIG(t *testing.T) {
	d := open(t, "a100-mig")
	for slot, expected := range map[int]nvml.Return{0: nvml.SUCCESS, 5: nvml.ERROR_NOT_SUPPORTED} {
		field(t, d.gpu(slot), nvml.FI_DEV_REMAPPED_PENDING).returns(t, "remap pending", expected)
	}
}

func TestStorm(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError, 0, 1)
	ok(t, d.m.Storm(1, 31, 1000))
	ok(t, d.m.XID(0, 48))
	n := map[uint64]int{}
	for range 1001 {
		n[of(set.Wait(1000)).get(t, "wait").EventData]++
	}
	if n[31] != 1000 || n[48] != 1 {
		t.Error(n)
	}
	want(t, "free", set.Free(), nvml.SUCCESS)
}
