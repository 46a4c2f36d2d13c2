package core_test

import (
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// sharedHost is a host of 16 GPUs whose devices are shared.
type sharedHost struct {
	name     string
	snapshot core.Snapshot
	replicas int // 0 = not shared
}

// sharedHosts are the largest ones: 112 instances, the same with 10 replicas, and 16 GPUs with 100 replicas.
func sharedHosts() []sharedHost {
	whole := coretest.GPUs(16)
	cut := whole
	for n := range 16 {
		cut = coretest.WithMIG(cut, n, slices.Repeat([]string{"1g.10gb"}, 7)...)
	}
	return []sharedHost{{"16x7", cut, 0}, {"16x7x10", cut, 10}, {"16x100", whole, 100}}
}

func (c sharedHost) config() core.Config {
	cfg := core.DefaultConfig()
	cfg.MIG = core.MIGMixed
	if c.replicas > 0 {
		cfg.Policy.Rules = []core.Rule{{Sharing: new(sliced(c.replicas))}}
	}
	return cfg
}

func (c sharedHost) build() *core.Inventory { return core.Build(c.snapshot, core.Ledger{}, c.config()) }

// benchmarkHosts measures the function that f returns for each host.
func benchmarkHosts(b *testing.B, make func(sharedHost) (f func())) {
	b.Helper()
	for _, c := range sharedHosts() {
		b.Run(c.name, func(b *testing.B) {
			f := make(c)
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
		})
	}
}

func BenchmarkCrowdBuild(b *testing.B) {
	benchmarkHosts(b, func(c sharedHost) func() { return func() { c.build() } })
}

// The cost of one observation between ledger and adapters.
func BenchmarkCrowdOffer(b *testing.B) {
	benchmarkHosts(b, func(c sharedHost) func() {
		prev, now := c.build(), time.Now()
		return func() { c.build().WithHost(core.Host{}, core.OverlapWarn).WithRetiring(prev, now, time.Second) }
	})
}

func BenchmarkCrowdEqual(b *testing.B) {
	benchmarkHosts(b, func(c sharedHost) func() {
		one, two := c.build(), c.build()
		return func() {
			if !one.Equal(two) {
				b.Fatal("not equal")
			}
		}
	})
}

func BenchmarkCrowdPrefer(b *testing.B) {
	for _, n := range []int{1, 8, 56} {
		b.Run(map[int]string{1: "1", 8: "8", 56: "56"}[n], func(b *testing.B) {
			benchmarkHosts(b, func(c sharedHost) func() {
				inv := c.build()
				ids := unitIDs(inv)
				return func() {
					if got := inv.Prefer(ids, nil, n); len(got) != n {
						b.Fatal(got)
					}
				}
			})
		})
	}
}

func BenchmarkCrowdReserve(b *testing.B) {
	benchmarkHosts(b, func(c sharedHost) func() {
		inv := c.build()
		ids := unitIDs(inv)
		return func() {
			if _, err := inv.Reserve(ids[3], ids[90], ids[91], ids[17]); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// The memory of a published inventory, per unit.
func BenchmarkCrowdMemory(b *testing.B) {
	for _, c := range sharedHosts() {
		b.Run(c.name, func(b *testing.B) {
			const keep = 20
			var kept [keep]*core.Inventory
			for b.Loop() {
				before := heapBytes()
				for i := range kept {
					kept[i] = c.build()
				}
				grown := heapBytes() - before
				b.ReportMetric(float64(grown)/float64(keep*kept[0].Len()), "B/unit")
				b.ReportMetric(float64(unsafe.Sizeof(core.Unit{})), "B/Unit{}")
				clear(kept[:])
			}
		})
	}
}

func heapBytes() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
