package fleet_test

import (
	"fmt"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

// BenchmarkPass is a whole pass of the leader, with all but the clusters' reading: 1,000 nodes of 8 GPUs in two clusters, with 7,000 workloads, while nothing
// is faulty, with one fault, with 100 and with all GPUs faulty. The mode is report: nothing changes by what is decided.
func BenchmarkPass(b *testing.B) {
	for _, faults := range []int{0, 1, 100, 8000} {
		b.Run(fmt.Sprint(faults, "-faults"), func(b *testing.B) {
			c := newChance(1)
			p := &process{chance: c, identity: "a", kill: func() {}}
			var clusters []fleet.Cluster
			for i, name := range []string{"nomad", "kube"} {
				clusters = append(clusters, bigClient(b, c, p, name, (faults+1-i)/2))
			}
			policy := rescue.Default()
			policy.QuorumNodes, policy.Delay = 1000, 0
			one := fleet.New(fleet.Options{
				Identity: "a", Policy: policy, Clusters: clusters, Store: store{newBank(), p}, Leader: &always{}, Log: slog.New(slog.DiscardHandler),
			})
			go fleet.Hold(one, b.Context())
			for !one.View().Load().Leads {
				fleet.Decide(one, b.Context())
			}
			b.ReportAllocs()
			began := cpu(b)
			for b.Loop() {
				fleet.Decide(one, b.Context())
			}
			b.ReportMetric(float64(cpu(b)-began)/float64(b.N)/1e6, "cpu-ms/op") // of the process, where others use the CPUs
			b.ReportMetric(float64(len(one.View().Load().Result.Waits)), "waits")
		})
	}
}

// bigClient shows a cluster of 500 nodes with 8 GPUs, of which 7 have work and a number is faulty.
func bigClient(b *testing.B, c *chance, p *process, name string, faults int) *client {
	r := newRegion(b, c, name, 500, 8)
	r.c.Mode = rescue.ModeReport
	for n := range 500 {
		for g := range 7 {
			r.run(fmt.Sprintf("%s-%d-%d", name, n, g), n, g)
		}
	}
	for i := range faults {
		r.strike(i%500, i/500, 95)
	}
	one := newClient(r, p)
	shown := r.snapshot()
	shown.ReadAt = time.Now().Add(50 * time.Second) // for as long as the benchmark lasts
	for i := range shown.Nodes {
		shown.Nodes[i].ReportedAt = shown.ReadAt
	}
	one.shown.Store(shown)
	return one
}

// cpu is the time that the process has had on CPUs.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
