package nvidia

import (
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func callCounts() map[string]gpu.CallCount {
	counts := map[string]gpu.CallCount{}
	for _, c := range DriverCalls() {
		counts[c.Function] = c
	}
	return counts
}

// The counters have every call that has returned, with its duration. Of the failures they have those that are none of a missing value.
// While a call hangs they can be read, and the call is counted when it returns.
func TestCallCounts(t *testing.T) {
	const temperature, power, limit = "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"
	m := simdriver.Start(t, "h100x8")
	s := openWith(t, m, Options{Deadline: 200 * time.Millisecond})
	snapshot(t, s)
	usage := func() {
		t.Helper()
		_, err := s.Usage()
		must(t, err)
	}
	before := callCounts()
	must(t, m.Fail(simdriver.GPU(1), temperature, "TIMEOUT", 1), m.Fail(simdriver.GPU(2), temperature, "NOT_SUPPORTED", simdriver.Always),
		m.Slow(simdriver.GPU(3), power, 20*time.Millisecond))
	made := counted(t, m, usage)
	after := callCounts()
	for name, n := range made {
		if got := after[name].Calls - before[name].Calls; got != n {
			t.Errorf("%s: %d counted, %d made", name, got, n)
		}
	}
	if got := after[temperature].Errors - before[temperature].Errors; got != 1 {
		t.Errorf("%d errors, want that of GPU 1", got)
	}
	if took := after[power].Time - before[power].Time; took < 20*time.Millisecond || took > 10*time.Second {
		t.Errorf("%v", took)
	}
	const wait = "nvmlEventSetWait"
	for range 3 {
		_, err := s.Wait(0)
		must(t, err)
	}
	if waits := callCounts()[wait]; waits.Calls <= before[wait].Calls || waits.Errors != before[wait].Errors {
		t.Errorf("waits without an event: %+v, before %+v", waits, before[wait])
	}
	must(t, m.Hang(simdriver.GPU(5), limit))
	usage()
	if got := callCounts()[limit].Calls - after[limit].Calls; got != 7 {
		t.Errorf("%d calls have returned, want 7", got)
	}
	must(t, m.Heal())
	eventually(t, func() (any, bool) {
		got := callCounts()[limit].Calls - after[limit].Calls
		return got, got == 8
	})
}

// BenchmarkCount is what counting adds to a call: the counters, and one more reading of the clock.
func BenchmarkCount(b *testing.B) {
	l := &library{}
	l.calls.Store("nvmlDeviceGetMemoryInfo", &function{found: true})
	began := time.Now()
	for b.Loop() {
		l.function("nvmlDeviceGetMemoryInfo").count(time.Since(began), nvml.SUCCESS)
	}
}
