package simdriver_test

import (
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// one checks that one misuse of a function is recorded, for this reason.
func one(t testing.TB, m *simdriver.Machine, call, reason string) {
	t.Helper()
	all := violations(t, m)
	if len(all) != 1 || !strings.Contains(all[0], call+": ") || !strings.Contains(all[0], reason) {
		t.Errorf("violations %q, want one of %s: %q", all, call, reason)
	}
}

func TestStaleHandle(t *testing.T) {
	d := open(t, "h200")
	dev := d.gpu(0)
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	want(t, "init", d.Init(), nvml.SUCCESS)
	of(dev.GetUUID()).returns(t, "call", nvml.ERROR_INVALID_ARGUMENT)
	one(t, d.m, "nvmlDeviceGetUUID", "stale handle")
	if d.gpu(0) == dev {
		t.Error("a handle came back after a new init")
	}
}

func TestCallAfterShutdown(t *testing.T) {
	d := open(t, "h200")
	dev := d.gpu(0)
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	of(dev.GetUUID()).returns(t, "call", nvml.ERROR_UNINITIALIZED)
	one(t, d.m, "nvmlDeviceGetUUID", "before init or after shutdown")
	want(t, "init", d.Init(), nvml.SUCCESS)
}

func TestFreedEventSet(t *testing.T) {
	d := open(t, "h200")
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	want(t, "free", set.Free(), nvml.SUCCESS)
	of(set.Wait(1)).returns(t, "wait", nvml.ERROR_INVALID_ARGUMENT)
	one(t, d.m, "nvmlEventSetWait_v2", "freed event set")
}

func TestShutdownDuringWait(t *testing.T) {
	d := open(t, "h200")
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	wait := beginWait(set, 10_000)
	d.entered("nvmlEventSetWait_v2", 1)
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	want(t, "wait", <-wait, nvml.ERROR_UNINITIALIZED)
	if len(violations(t, d.m)) == 0 {
		t.Error("nothing recorded")
	}
	want(t, "init", d.Init(), nvml.SUCCESS)
}

func TestSetFreedDuringRegistration(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError)
	dev := d.gpu(5)
	ok(t, d.m.Hang(simdriver.GPU(5), "nvmlDeviceRegisterEvents"))
	register := begin(func() nvml.Return { return dev.RegisterEvents(nvml.EventTypeXidCriticalError, set) })
	d.entered("nvmlDeviceRegisterEvents", 1)
	want(t, "free", set.Free(), nvml.SUCCESS)
	one(t, d.m, "nvmlEventSetFree", "being registered")
	ok(t, d.m.Heal())
	want(t, "register", <-register, nvml.ERROR_INVALID_ARGUMENT)
	one(t, d.m, "nvmlDeviceRegisterEvents", "freed event set")
}

// Two calls on one GPU at once are a misuse, whichever came second. A lookup is a call on the GPU that it finds.
func TestConcurrentCallsOnOneGPU(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(5)
	for name, call := range map[string]func() nvml.Return{
		"nvmlDeviceGetTemperature":      func() nvml.Return { return of(dev.GetTemperature(nvml.TEMPERATURE_GPU)).code },
		"nvmlDeviceGetHandleByIndex_v2": func() nvml.Return { return of(d.DeviceGetHandleByIndex(5)).code },
	} {
		ok(t, d.m.Hang(simdriver.GPU(5), name))
		done := begin(call)
		until(t, func() bool {
			of(dev.GetPowerUsage()).returns(t, "second call", nvml.SUCCESS)
			all, err := d.m.Violations()
			ok(t, err)
			return len(all) > 0
		})
		for _, v := range violations(t, d.m) {
			if !strings.Contains(v, "nvmlDeviceGetPowerUsage") || !strings.Contains(v, name) || !strings.Contains(v, "is in progress") {
				t.Errorf("violation %q, want one of GetPowerUsage and %s at once", v, name)
			}
		}
		ok(t, d.m.Heal())
		want(t, name, <-done, nvml.SUCCESS)
	}
}

// BenchmarkCall measures what the simulated driver adds to a call: two stats and a mutex.
func BenchmarkCall(b *testing.B) {
	dev := open(b, "h100x8").gpu(0)
	b.ReportAllocs()
	for b.Loop() {
		of(dev.GetTemperature(nvml.TEMPERATURE_GPU)).returns(b, "temperature", nvml.SUCCESS)
	}
}
