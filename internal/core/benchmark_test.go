package core_test

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// healthyGPUs returns the ledger of n healthy GPUs, and the observations of one check of each.
func healthyGPUs(n int) (health.Ledger, []health.Observation) {
	checks := healthyChecks(coretest.GPUs(n))
	return health.Ledger{}.Apply(health.DefaultPolicy(), testStart, append(checks, driverAvailable("580"))...), checks
}

// faultyGPUs returns a ledger with a condition on each GPU, and several on the first.
func faultyGPUs(n int) (health.Ledger, []health.Observation) {
	l, checks := healthyGPUs(n)
	var obs []health.Observation
	for i := range n {
		obs = append(obs, xidEvent(gpuAt(i), 119))
	}
	return l.Apply(health.DefaultPolicy(), testStart, append(obs, xidEvent(gpuAt(0), 94), xidEvent(gpuAt(0), 54))...), checks
}

func BenchmarkApplyXID(b *testing.B) {
	p := health.DefaultPolicy()
	l, _ := healthyGPUs(8)
	b.ReportAllocs()
	for b.Loop() {
		l.Apply(p, testStart, xidEvent(gpuAt(3), 95))
	}
}

func BenchmarkApplyChecks(b *testing.B) {
	p := health.DefaultPolicy()
	for _, n := range []int{8, 64} {
		for name, begin := range map[string]func(int) (health.Ledger, []health.Observation){"well": healthyGPUs, "troubled": faultyGPUs} {
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
	p, now := health.DefaultPolicy(), testStart.Add(time.Minute)
	for name, begin := range map[string]func(int) (health.Ledger, []health.Observation){"well": healthyGPUs, "troubled": faultyGPUs} {
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
	for name, begin := range map[string]func(int) (health.Ledger, []health.Observation){"well": healthyGPUs, "troubled": faultyGPUs} {
		l, _ := begin(64)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				l.Health(gpuAt(63))
			}
		})
	}
}

// Without conditions, Apply without observations allocates nothing.
func TestApplyWithoutConditionsDoesNotAllocate(t *testing.T) {
	p := health.DefaultPolicy()
	l, _ := healthyGPUs(64)
	if n := testing.AllocsPerRun(100, func() { l.Apply(p, testStart.Add(time.Hour)) }); n != 0 || l.NeedsTick() {
		t.Errorf("%v allocations for nothing; restless %t", n, l.NeedsTick())
	}
}

// sharedHost is a host of 16 GPUs whose devices are shared.
type sharedHost struct {
	name     string
	snapshot gpu.Snapshot
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
	cfg.MIG = inventory.MIGMixed
	if c.replicas > 0 {
		cfg.Policy.Rules = []inventory.Rule{{Sharing: new(sliced(c.replicas))}}
	}
	return cfg
}

func (c sharedHost) build() *inventory.Inventory {
	return core.Build(c.snapshot, health.Ledger{}, c.config())
}

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
		return func() {
			c.build().WithHost(inventory.Host{}, inventory.OverlapWarn).WithRetiring(prev, now, time.Second)
		}
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
			var kept [keep]*inventory.Inventory
			for b.Loop() {
				before := heapBytes()
				for i := range kept {
					kept[i] = c.build()
				}
				grown := heapBytes() - before
				b.ReportMetric(float64(grown)/float64(keep*kept[0].Len()), "B/unit")
				b.ReportMetric(float64(unsafe.Sizeof(inventory.Unit{})), "B/Unit{}")
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

// Equal arguments give equal results, and no argument is changed.
func TestPurity(t *testing.T) {
	machine, pristine := migMachine(), migMachine()
	obs := health.Observation{At: gpu.WholeGPU("GPU-m"), Kind: health.XID, Code: 48}
	run := func() string {
		snapshot, seen := core.Reconcile(machine, without(machine, "MIG-1"))
		l := health.Ledger{}.Apply(health.DefaultPolicy(), time.Unix(0, 0), append(seen, obs)...)
		cfg := core.DefaultConfig()
		cfg.MIG = inventory.MIGMixed
		history, _ := l.History("GPU-m")
		inv := core.Build(snapshot, l, cfg)
		plan, err := inv.Reserve("MIG-2", inventory.UnitID(coretest.GPU(0)))
		return fmt.Sprint(snapshot, seen, l.Conditions(), history, unitIDs(inv), inv.Excluded(), plan, err, inv.Prefer(unitIDs(inv), nil, 2))
	}
	first := run()
	for range 100 {
		if again := run(); again != first {
			t.Fatalf("differs:\n%s\n%s", first, again)
		}
	}
	if diff := cmp.Diff(pristine, machine); diff != "" {
		t.Errorf("an argument was changed: %s", diff)
	}
}

func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{8, 64} {
		s := coretest.GPUs(n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				core.Build(s, health.Ledger{}, core.DefaultConfig())
			}
		})
	}
}

func BenchmarkReserve(b *testing.B) {
	for _, n := range []int{8, 64} {
		inv := core.Build(coretest.GPUs(n), health.Ledger{}, core.DefaultConfig())
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := inv.Reserve(inventory.UnitID(coretest.GPU(1)), inventory.UnitID(coretest.GPU(5))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkPrefer(b *testing.B) {
	for _, n := range []int{8, 64} {
		inv := core.Build(coretest.GPUs(n), health.Ledger{}, core.DefaultConfig())
		ids := unitIDs(inv)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if got := inv.Prefer(ids, nil, 4); len(got) != 4 {
					b.Fatal(got)
				}
			}
		})
	}
}
