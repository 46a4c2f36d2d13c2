package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// healthyGPUs returns the ledger of n healthy GPUs, and the observations of one check of each.
func healthyGPUs(n int) (core.Ledger, []core.Observation) {
	checks := healthyChecks(coretest.GPUs(n))
	return core.Ledger{}.Apply(core.DefaultHealthPolicy(), testStart, append(checks, driverAvailable("580"))...), checks
}

// faultyGPUs returns a ledger with a condition on each GPU, and several on the first.
func faultyGPUs(n int) (core.Ledger, []core.Observation) {
	l, checks := healthyGPUs(n)
	var obs []core.Observation
	for i := range n {
		obs = append(obs, xidEvent(gpu(i), 119))
	}
	return l.Apply(core.DefaultHealthPolicy(), testStart, append(obs, xidEvent(gpu(0), 94), xidEvent(gpu(0), 54))...), checks
}

func BenchmarkApplyXID(b *testing.B) {
	p := core.DefaultHealthPolicy()
	l, _ := healthyGPUs(8)
	b.ReportAllocs()
	for b.Loop() {
		l.Apply(p, testStart, xidEvent(gpu(3), 95))
	}
}

func BenchmarkApplyChecks(b *testing.B) {
	p := core.DefaultHealthPolicy()
	for _, n := range []int{8, 64} {
		for name, begin := range map[string]func(int) (core.Ledger, []core.Observation){"well": healthyGPUs, "troubled": faultyGPUs} {
			l, checks := begin(n)
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					l.Apply(p, testStart, checks...)
				}
			})
		}
	}
}

// Time passes twice a second, also without observations.
func BenchmarkApplyNothing(b *testing.B) {
	p, now := core.DefaultHealthPolicy(), testStart.Add(time.Minute)
	for name, begin := range map[string]func(int) (core.Ledger, []core.Observation){"well": healthyGPUs, "troubled": faultyGPUs} {
		l, _ := begin(8)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				l.Apply(p, now)
			}
		})
	}
}

func BenchmarkHealth(b *testing.B) {
	for name, begin := range map[string]func(int) (core.Ledger, []core.Observation){"well": healthyGPUs, "troubled": faultyGPUs} {
		l, _ := begin(64)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				l.Health(gpu(63))
			}
		})
	}
}

// Without conditions, Apply without observations allocates nothing.
func TestApplyWithoutConditionsDoesNotAllocate(t *testing.T) {
	p := core.DefaultHealthPolicy()
	l, _ := healthyGPUs(64)
	if n := testing.AllocsPerRun(100, func() { l.Apply(p, testStart.Add(time.Hour)) }); n != 0 || l.NeedsTick() {
		t.Errorf("%v allocations for nothing; restless %t", n, l.NeedsTick())
	}
}
