package simdriver_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestLostGPU(t *testing.T) {
	d := open(t, "h100x8")
	dev, neighbour := d.gpu(3), d.gpu(4)
	ok(t, d.m.Lose(3))
	_, ret := dev.GetTemperature(nvml.TEMPERATURE_GPU)
	want(t, "call", ret, nvml.ERROR_GPU_IS_LOST)
	_, ret = d.DeviceGetHandleByIndex(3)
	want(t, "lookup by index", ret, nvml.ERROR_GPU_IS_LOST)
	_, ret = d.DeviceGetHandleByUUID(d.m.UUID(3))
	want(t, "lookup by uuid", ret, nvml.ERROR_GPU_IS_LOST)
	n, ret := d.DeviceGetCount()
	want(t, "count", ret, nvml.SUCCESS)
	same(t, "count", n, 8)
	_, ret = neighbour.GetTemperature(nvml.TEMPERATURE_GPU)
	want(t, "neighbour", ret, nvml.SUCCESS)
	_, ret = neighbour.GetTopologyCommonAncestor(dev)
	want(t, "topology towards it", ret, nvml.ERROR_GPU_IS_LOST)
	ok(t, d.m.Restore(3))
	_, ret = dev.GetTemperature(nvml.TEMPERATURE_GPU)
	want(t, "call after restore", ret, nvml.SUCCESS)
}

func TestFailingCalls(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(3)
	ok(t, d.m.Fail(simdriver.GPU(3), "nvmlDeviceGetMemoryInfo", "GPU_IS_LOST", 2))
	for _, expected := range []nvml.Return{nvml.ERROR_GPU_IS_LOST, nvml.ERROR_GPU_IS_LOST, nvml.SUCCESS} {
		_, ret := dev.GetMemoryInfo()
		want(t, "memory", ret, expected)
	}
	ok(t, d.m.Fail(simdriver.GPU(3), "*", "UNKNOWN", simdriver.Always))
	_, ret := dev.GetUUID()
	want(t, "every call", ret, nvml.ERROR_UNKNOWN)
	_, ret = d.DeviceGetHandleByIndex(3)
	want(t, "lookup, named without its version", ret, nvml.ERROR_UNKNOWN)
	_, ret = d.gpu(2).GetUUID()
	want(t, "another GPU", ret, nvml.SUCCESS)
	ok(t, d.m.Heal(simdriver.GPU(3)))
	_, ret = dev.GetUUID()
	want(t, "healed", ret, nvml.SUCCESS)

	ok(t, d.m.Fail(simdriver.All, "nvmlDeviceGetCount", "DRIVER_NOT_LOADED", simdriver.Always))
	_, ret = d.DeviceGetCount()
	want(t, "a call without a GPU", ret, nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, d.m.Heal())
	_, ret = d.DeviceGetCount()
	want(t, "count", ret, nvml.SUCCESS)
}

func TestHungCallReturnsWhenHealed(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(1)
	ok(t, d.m.Hang(simdriver.GPU(1), "nvmlDeviceGetTemperature"))
	var healed atomic.Bool
	early := make(chan bool)
	go func() {
		_, ret := dev.GetTemperature(nvml.TEMPERATURE_GPU)
		early <- ret != nvml.SUCCESS || !healed.Load()
	}()
	entered(t, d.m, "nvmlDeviceGetTemperature")
	_, ret := d.gpu(0).GetTemperature(nvml.TEMPERATURE_GPU)
	want(t, "another GPU", ret, nvml.SUCCESS)
	healed.Store(true)
	ok(t, d.m.Heal())
	if <-early {
		t.Error("the call returned before it was healed, or failed")
	}
}

func TestSlowCall(t *testing.T) {
	d := open(t, "h200")
	dev := d.gpu(0)
	ok(t, d.m.Slow(simdriver.GPU(0), "nvmlDeviceGetPowerUsage", 40*time.Millisecond))
	start := time.Now()
	_, ret := dev.GetPowerUsage()
	want(t, "power", ret, nvml.SUCCESS)
	if took := time.Since(start); took < 40*time.Millisecond {
		t.Errorf("took %v, want at least 40ms", took)
	}
}

func TestAddAndRemove(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(7)
	ok(t, d.m.Remove(2))
	n, _ := d.DeviceGetCount()
	same(t, "count", n, 7)
	same(t, "the last index", d.gpu(6), dev)
	index, ret := dev.GetIndex()
	want(t, "index", ret, nvml.SUCCESS)
	same(t, "index", index, 6)
	same(t, "links", countLinks(dev), 18)
	ok(t, d.m.Add(9, "minor = 9", "numa = 1"))
	n, _ = d.DeviceGetCount()
	same(t, "count", n, 8)
	id, ret := d.gpu(7).GetUUID()
	want(t, "uuid", ret, nvml.SUCCESS)
	same(t, "uuid", id, d.m.UUID(9))
	same(t, "links of the new GPU", countLinks(d.gpu(7)), 18)
	if err := d.m.Set(9, "temprature", "3"); err == nil || !strings.Contains(err.Error(), "temprature") {
		t.Errorf("a misspelled key: %v", err)
	}
}

func TestDriverReload(t *testing.T) {
	d := open(t, "h200")
	dev := d.gpu(0)
	ok(t, d.m.Unload())
	_, ret := dev.GetUUID()
	want(t, "call while unloaded", ret, nvml.ERROR_DRIVER_NOT_LOADED)
	want(t, "second init", d.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, d.m.Load())
	_, ret = dev.GetUUID()
	want(t, "call on the session from before", ret, nvml.ERROR_DRIVER_NOT_LOADED)
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	want(t, "init", d.Init(), nvml.SUCCESS)
	_, ret = d.gpu(0).GetUUID()
	want(t, "call", ret, nvml.SUCCESS)
	ok(t, d.m.SetDriver("600.1.2"))
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	want(t, "init with the old library", d.Init(), nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	ok(t, d.m.SetDriver("570.124.06"))
	want(t, "init", d.Init(), nvml.SUCCESS)
}

func TestReset(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(6)
	ok(t, d.m.Change(6, "lost = yes", "recovery_action = 1", "remapped_pending = yes", "ecc_uncorrected_volatile = 3"))
	_, ret := dev.GetUUID()
	want(t, "call", ret, nvml.ERROR_GPU_IS_LOST)
	ok(t, d.m.Reset(6))
	_, _, pending, _, ret := dev.GetRemappedRows()
	want(t, "remapped rows", ret, nvml.SUCCESS)
	same(t, "pending", pending, false)
	count, ret := dev.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	want(t, "ecc", ret, nvml.SUCCESS)
	same(t, "ecc", count, 0)
	_, ret = dev.GetRetiredPagesPendingStatus()
	want(t, "what an H100 cannot tell", ret, nvml.ERROR_NOT_SUPPORTED)
}
