package nvidia

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// benchMachines are the machines of the benchmarks: H100s, and GPUs of seven MIG instances each, which are devices too.
var benchMachines = []struct {
	name    string
	devices int
	start   func(*testing.B) *simdriver.Machine
}{
	{"gpus=1", 1, h100s(1)},
	{"gpus=8", 8, h100s(8)},
	{"gpus=16", 16, h100s(16)},
	{"gpus=8/instances=56", 64, func(b *testing.B) *simdriver.Machine {
		m := simdriver.Start(b, "a100-mig")
		for slot := range 8 {
			must(b, m.SetMIG(slot, strings.Fields(strings.Repeat("1g.10gb ", 7))...))
		}
		return m
	}},
	{"gpus=16/instances=112", 128, func(b *testing.B) *simdriver.Machine { return simdriver.Start(b, "a100x16-mig") }},
}

// h100s starts a machine of n H100s.
func h100s(n int) func(*testing.B) *simdriver.Machine {
	return func(b *testing.B) *simdriver.Machine {
		m := simdriver.Start(b, "h100x8")
		for slot := n; slot < 8; slot++ {
			must(b, m.Remove(slot))
		}
		for slot := 8; slot < n; slot++ {
			must(b, m.Add(slot))
		}
		return m
	}
}

// onMachines makes one reading of each machine per operation. The driver is simulated: this measures this package and go-nvml,
// not NVIDIA's driver.
func onMachines(b *testing.B, read func(*Session) (n int, err error)) {
	for _, machine := range benchMachines {
		b.Run(machine.name, func(b *testing.B) {
			m := machine.start(b)
			s := open(b, m)
			snapshot(b, s)
			before := total(calls(b, m))
			b.ReportAllocs()
			for b.Loop() {
				if n, err := read(s); err != nil || n != machine.devices {
					b.Fatal(n, err)
				}
			}
			b.ReportMetric(float64(total(calls(b, m))-before)/float64(b.N), "calls/op")
		})
	}
}

func BenchmarkSnapshot(b *testing.B) {
	onMachines(b, func(s *Session) (int, error) {
		snap, err := s.Snapshot()
		return len(snap.Devices), err
	})
}

func BenchmarkUsage(b *testing.B) {
	onMachines(b, func(s *Session) (int, error) {
		usage, err := s.Usage()
		return len(usage), err
	})
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

// BenchmarkProbe checks every GPU every 10 seconds, as the agents do, and reports the cost per minute beside the mean check.
// The CPU time is that of this process and the simulated driver.
func BenchmarkProbe(b *testing.B) {
	for _, c := range []struct {
		name      string
		gpus      int
		processes bool // are read, one of each GPU
	}{{"gpus=1", 1, false}, {"gpus=8", 8, false}, {"gpus=16", 16, false}, {"gpus=8/processes", 8, true}} {
		n := c.gpus
		b.Run(c.name, func(b *testing.B) {
			m := h100s(n)(b)
			for slot := 0; c.processes && slot < n; slot++ {
				must(b, m.StartProcess(slot, 1000+slot, 512))
			}
			now := time.Unix(0, 0)
			s := openWith(b, m, Options{Now: func() time.Time { return now }, Processes: c.processes})
			snapshot(b, s)
			probe(b, s)
			before, began := total(calls(b, m)), cpuTime(b)
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(10 * time.Second)
				if obs, err := s.Probe(); err != nil || len(obs) != n {
					b.Fatal(len(obs), err)
				}
			}
			const checks = 6 // a minute
			each := func(n float64) float64 { return n * checks / float64(b.N) }
			b.ReportMetric(each(float64(total(calls(b, m))-before)), "calls/min")
			b.ReportMetric(each(float64((cpuTime(b) - began).Microseconds())), "µs-CPU/min")
		})
	}
}

// cpuTime is the CPU time of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
