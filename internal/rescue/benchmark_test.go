package rescue_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// BenchmarkDecision is a decision for 1,000 nodes of 8 GPUs, with the order and the index of the fleet: while nothing is faulty, with one fault whose
// work is to be moved, with 100 faults of as many causes, and with all GPUs faulty.
func BenchmarkDecision(b *testing.B) {
	for _, faults := range []int{0, 1, 100, 8000} {
		b.Run(fmt.Sprint(faults, "-faults"), func(b *testing.B) {
			w, clusters := bigFleet(faults)
			w.state = w.policy.Next(w.state, rescue.NewFleet(clusters...), w.now).State // what it has seen
			w.state.Ledger = rescue.NewLedger()
			w.state = w.state.Lead()
			var acts, waits int
			b.ReportAllocs()
			began := cpu(b)
			for b.Loop() {
				r := w.policy.Next(w.state, rescue.NewFleet(clusters...), w.now)
				acts, waits = len(r.Acts), len(r.Waits)
			}
			b.ReportMetric(float64(cpu(b)-began)/float64(b.N)/1e6, "cpu-ms/op") // of the process, where others use the CPUs
			b.ReportMetric(float64(acts), "acts")
			b.ReportMetric(float64(waits), "waits")
		})
	}
}

// cpu is the time that the process has had on CPUs.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// bigFleet is a Nomad region and a Kubernetes cluster of 500 nodes each, of which one GPU of each node is free, and faults on as many others.
func bigFleet(faults int) (*world, []rescue.Cluster) {
	w := &world{now: time.Date(2026, 11, 27, 9, 0, 0, 0, time.UTC), policy: rescue.Default()}
	w.state = rescue.State{Ledger: rescue.NewLedger()}.Lead()
	w.clusters = []*rescue.Cluster{newCluster("nomad", 500, 8), newCluster("kube", 500, 8)}
	for _, c := range w.clusters {
		for n := range c.Nodes {
			for g := range 7 {
				w.run(fmt.Sprint(c.Name, "-", n, "-", g), c.Name, n, g)
			}
		}
	}
	for i := range faults {
		c := w.clusters[i%2]
		n, g := i/2%500, i/1000%8
		f := xid(i)
		if faults > 1000 {
			f = xid(95)
		}
		f.Since = w.now.Add(-5 * time.Minute)
		w.fault(c.Name, n, g, f)
	}
	w.policy.QuorumNodes = 1000
	w.answering()
	w.show()
	var all []rescue.Cluster
	for _, c := range w.clusters {
		all = append(all, *c)
	}
	return w, all
}
