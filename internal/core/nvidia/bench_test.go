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

// The benchmarks use the simulated driver: they measure this package and go-nvml, not NVIDIA's driver. benchmarkReading makes
// one reading of a machine per operation.
func benchmarkReading(b *testing.B, m *simdriver.Machine, devices int, read func(*Session) (n int, err error)) {
	s := open(b, m)
	snapshot(b, s)
	before := total(calls(b, m))
	b.ReportAllocs()
	for b.Loop() {
		if n, err := read(s); err != nil || n != devices {
			b.Fatal(n, err)
		}
	}
	b.ReportMetric(float64(total(calls(b, m))-before)/float64(b.N), "calls/op")
}

func readSnapshot(s *Session) (int, error) {
	snap, err := s.Snapshot()
	return len(snap.Devices), err
}

func readUsage(s *Session) (int, error) {
	usage, err := s.Usage()
	return len(usage), err
}

// 128 devices are sixteen GPUs and 112 instances.
func BenchmarkSnapshot8(b *testing.B) {
	benchmarkReading(b, simdriver.Start(b, "h100x8"), 8, readSnapshot)
}
func BenchmarkSnapshot64(b *testing.B) { benchmarkReading(b, machine64(b), 64, readSnapshot) }
func BenchmarkSnapshot128(b *testing.B) {
	benchmarkReading(b, simdriver.Start(b, "a100x16-mig"), 128, readSnapshot)
}
func BenchmarkUsage8(b *testing.B)  { benchmarkReading(b, simdriver.Start(b, "h100x8"), 8, readUsage) }
func BenchmarkUsage64(b *testing.B) { benchmarkReading(b, machine64(b), 64, readUsage) }
func BenchmarkUsage128(b *testing.B) {
	benchmarkReading(b, simdriver.Start(b, "a100x16-mig"), 128, readUsage)
}

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
