package core_test

import (
	"fmt"
	"runtime"
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

// The cost of an XID, of a check of each GPU, of time without observations (twice a second), and of reading a health.
func BenchmarkLedger(b *testing.B) {
	p := health.DefaultPolicy()
	for _, n := range []int{1, 8, 16, 64} {
		for name, begin := range map[string]func(int) (health.Ledger, []health.Observation){"healthy": healthyGPUs, "faulty": faultyGPUs} {
			l, checks := begin(n)
			for call, f := range map[string]func(){
				"xid":     func() { l.Apply(p, testStart, xidEvent(gpuAt(n-1), 95)) },
				"checks":  func() { l.Apply(p, testStart, checks...) },
				"nothing": func() { l.Apply(p, testStart.Add(time.Minute)) },
				"health":  func() { l.Health(gpuAt(n - 1)) },
			} {
				b.Run(fmt.Sprintf("%s/%s/gpus=%d", call, name, n), func(b *testing.B) { benchmark(b, f) })
			}
		}
	}
}

func benchmark(b *testing.B, f func()) {
	b.Helper()
	b.ReportAllocs()
	for b.Loop() {
		f()
	}
}

// Without conditions, Apply without observations allocates nothing.
func TestApplyWithoutConditionsDoesNotAllocate(t *testing.T) {
	p := health.DefaultPolicy()
	l, _ := healthyGPUs(64)
	if n := testing.AllocsPerRun(100, func() { l.Apply(p, testStart.Add(time.Hour)) }); n != 0 || l.NeedsTick() {
		t.Errorf("%v allocations for nothing; needs a tick: %t", n, l.NeedsTick())
	}
}

// BenchmarkState measures all that the core does with the checks of all GPUs and with a reading: fold, Build, node, device nodes and
// retiring units.
func BenchmarkState(b *testing.B) {
	for _, h := range coretest.Hosts() {
		checks := healthyChecks(h.Snapshot)
		healthy := core.NewState(h.Config).Read(h.Config, testStart, h.Snapshot, checks...)
		lost := healthy
		for _, c := range checks {
			lost = lost.Observe(h.Config, testStart, health.Observation{At: c.At, Kind: health.Lost})
		}
		for name, s := range map[string]core.State{"healthy": healthy, "lost": lost} {
			for call, f := range map[string]func(){
				"checks":  func() { s.Observe(h.Config, testStart.Add(time.Second), checks...) },
				"reading": func() { s.Read(h.Config, testStart.Add(time.Second), h.Snapshot, checks...) },
			} {
				b.Run(fmt.Sprintf("%s/%s/units=%d", call, name, h.Units), func(b *testing.B) { benchmark(b, f) })
			}
		}
	}
}

// BenchmarkInventory measures an inventory.
func BenchmarkInventory(b *testing.B) {
	for _, h := range coretest.Hosts() {
		inv, again := h.Allocatable(), h.Allocatable()
		ids := unitIDs(inv)
		last := len(ids) - 1
		prefer := func(n int) func() {
			return func() {
				if got := inv.Prefer(ids, nil, n); len(got) != n {
					b.Fatal(got)
				}
			}
		}
		for call, f := range map[string]func(){
			"Build": func() { h.Allocatable() },
			"Equal": func() {
				if !inv.Equal(again) {
					b.Fatal("not equal")
				}
			},
			"Prefer4": prefer(4), "Prefer8": prefer(8), "PreferHalf": prefer(len(ids) / 2),
			"Reserve4": func() {
				if _, err := inv.Reserve(ids[1], ids[last], ids[last/2], ids[last/3]); err != nil {
					b.Fatal(err)
				}
			},
		} {
			b.Run(fmt.Sprintf("%s/units=%d", call, h.Units), func(b *testing.B) { benchmark(b, f) })
		}
	}
}

// The memory of a published inventory, per unit.
func BenchmarkMemory(b *testing.B) {
	for _, h := range coretest.Hosts() {
		b.Run(fmt.Sprintf("units=%d", h.Units), func(b *testing.B) {
			const keep = 20
			var kept [keep]*inventory.Allocatable
			for b.Loop() {
				before := heapBytes()
				for i := range kept {
					kept[i] = h.Allocatable()
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
		inv := core.Build(snapshot, l, cfg).WithoutHost()
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
