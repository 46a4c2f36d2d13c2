package nvidia

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// machine64 has eight GPUs with seven MIG instances each: 64 devices.
func machine64(b *testing.B) *simdriver.Machine {
	b.Helper()
	m := simdriver.Start(b, "a100-mig")
	seven := strings.Fields(strings.Repeat("1g.10gb ", 7))
	for slot := range 8 {
		must(b, m.SetMIG(slot, seven...))
	}
	return m
}

func benchmarkSnapshot(b *testing.B, m *simdriver.Machine, devices int) {
	s := open(b, m)
	if n := len(snapshot(b, s).Devices); n != devices {
		b.Fatalf("%d devices", n)
	}
	before := total(calls(b, m))
	b.ReportAllocs()
	for b.Loop() {
		snapshot(b, s)
	}
	b.ReportMetric(float64(total(calls(b, m))-before)/float64(b.N), "calls/op")
}

// The benchmarks use the simulated driver: they measure this package and go-nvml, not NVIDIA's driver.
func BenchmarkSnapshot8(b *testing.B)  { benchmarkSnapshot(b, simdriver.Start(b, "h100x8"), 8) }
func BenchmarkSnapshot64(b *testing.B) { benchmarkSnapshot(b, machine64(b), 64) }

// BenchmarkSnapshot128 has sixteen GPUs and 112 instances.
func BenchmarkSnapshot128(b *testing.B) { benchmarkSnapshot(b, simdriver.Start(b, "a100x16-mig"), 128) }

// BenchmarkOpen opens a session and makes its first Snapshot, links included.
func BenchmarkOpen(b *testing.B) {
	m := simdriver.Start(b, "h100x8")
	b.ReportAllocs()
	for b.Loop() {
		s := open(b, m)
		snapshot(b, s)
		must(b, s.Close())
	}
}

// benchmarkProbe checks every GPU every 10 seconds, as the agents do, and reports the cost per minute beside the mean check.
// The CPU time is that of this process and the simulated driver.
func benchmarkProbe(b *testing.B, machine string, gpus int) {
	m := simdriver.Start(b, machine)
	now := time.Unix(0, 0)
	s := openWith(b, m, Options{Now: func() time.Time { return now }})
	snapshot(b, s)
	probe(b, s)
	before, began := total(calls(b, m)), cpuTime(b)
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(10 * time.Second)
		if obs, err := s.Probe(); err != nil || len(obs) != gpus {
			b.Fatal(len(obs), err)
		}
	}
	const checks = 6 // a minute
	each := func(n float64) float64 { return n * checks / float64(b.N) }
	b.ReportMetric(each(float64(total(calls(b, m))-before)), "calls/min")
	b.ReportMetric(each(float64((cpuTime(b) - began).Microseconds())), "µs-CPU/min")
}

func BenchmarkProbe1(b *testing.B) { benchmarkProbe(b, "h200", 1) }
func BenchmarkProbe8(b *testing.B) { benchmarkProbe(b, "h100x8", 8) }

// cpuTime is the CPU time of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchmarkUsage reads the usage of all devices once per operation.
func benchmarkUsage(b *testing.B, m *simdriver.Machine, devices int) {
	s := open(b, m)
	snapshot(b, s)
	before := total(calls(b, m))
	b.ReportAllocs()
	for b.Loop() {
		if usage, err := s.Usage(); err != nil || len(usage) != devices {
			b.Fatal(len(usage), err)
		}
	}
	b.ReportMetric(float64(total(calls(b, m))-before)/float64(b.N), "calls/op")
}

func BenchmarkUsage8(b *testing.B)  { benchmarkUsage(b, simdriver.Start(b, "h100x8"), 8) }
func BenchmarkUsage64(b *testing.B) { benchmarkUsage(b, machine64(b), 64) }

func BenchmarkUsage128(b *testing.B) { benchmarkUsage(b, simdriver.Start(b, "a100x16-mig"), 128) }
