package simdriver_test

import (
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func one(t testing.TB, m *simdriver.Machine, call, says string) {
	t.Helper()
	all := violations(t, m)
	if len(all) != 1 || !strings.Contains(all[0], call+": ") || !strings.Contains(all[0], says) {
		t.Errorf("violations %q, want one of %s saying %q", all, call, says)
	}
}

func TestStaleHandle(t *testing.T) {
	d := open(t, "h200")
	dev := d.gpu(0)
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	want(t, "init", d.Init(), nvml.SUCCESS)
	_, ret := dev.GetUUID()
	want(t, "call", ret, nvml.ERROR_INVALID_ARGUMENT)
	one(t, d.m, "nvmlDeviceGetUUID", "stale handle")
	if d.gpu(0) == dev {
		t.Error("a handle came back after a new init")
	}
}

func TestCallAfterShutdown(t *testing.T) {
	d := open(t, "h200")
	dev := d.gpu(0)
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	_, ret := dev.GetUUID()
	want(t, "call", ret, nvml.ERROR_UNINITIALIZED)
	one(t, d.m, "nvmlDeviceGetUUID", "before init or after shutdown")
	want(t, "init", d.Init(), nvml.SUCCESS)
}

func TestFreedEventSet(t *testing.T) {
	d := open(t, "h200")
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	want(t, "free", set.Free(), nvml.SUCCESS)
	_, ret := set.Wait(1)
	want(t, "wait", ret, nvml.ERROR_INVALID_ARGUMENT)
	one(t, d.m, "nvmlEventSetWait_v2", "freed event set")
}

func TestShutdownDuringWait(t *testing.T) {
	d := open(t, "h200")
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	done := make(chan nvml.Return)
	go func() { _, ret := set.Wait(10_000); done <- ret }()
	entered(t, d.m, "nvmlEventSetWait_v2")
	want(t, "shutdown", d.Shutdown(), nvml.SUCCESS)
	if ret := <-done; ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("wait: %v", ret)
	}
	all := violations(t, d.m)
	if len(all) == 0 {
		t.Error("nothing recorded")
	}
	want(t, "init", d.Init(), nvml.SUCCESS)
}

func TestConcurrentCallsOnOneGPU(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(5)
	ok(t, d.m.Hang(simdriver.GPU(5), "nvmlDeviceGetTemperature"))
	done := make(chan nvml.Return)
	go func() { _, ret := dev.GetTemperature(nvml.TEMPERATURE_GPU); done <- ret }()
	entered(t, d.m, "nvmlDeviceGetTemperature")
	until(t, func() bool { // the count comes a moment before the call is inside
		_, ret := dev.GetPowerUsage()
		want(t, "second call", ret, nvml.SUCCESS)
		all, err := d.m.Violations()
		ok(t, err)
		return len(all) > 0
	})
	overlapped(t, d.m, "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature")
	ok(t, d.m.Heal())
	want(t, "first call", <-done, nvml.SUCCESS)
}

// overlapped checks that every recorded misuse is of two calls that were on one GPU at once, whichever came
// second.
func overlapped(t testing.TB, m *simdriver.Machine, a, b string) {
	t.Helper()
	all := violations(t, m)
	if len(all) == 0 {
		t.Error("no misuse was recorded")
	}
	for _, v := range all {
		if !strings.Contains(v, a) || !strings.Contains(v, b) || !strings.Contains(v, "is in progress") {
			t.Errorf("violation %q, want one of %s and %s at once", v, a, b)
		}
	}
}

// entered waits until a call has begun.
func entered(t testing.TB, m *simdriver.Machine, call string) {
	t.Helper()
	until(t, func() bool {
		calls, err := m.Calls()
		ok(t, err)
		return calls[call] > 0
	})
}

// until asks again and again; a condition that never comes fails the test.
func until(t testing.TB, condition func() bool) {
	t.Helper()
	deadline := time.After(5 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("never came true")
		}
	}
}
