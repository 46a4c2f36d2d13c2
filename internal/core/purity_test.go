package core_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// Equal arguments give equal results, and no argument is changed.
func TestPurity(t *testing.T) {
	machine, pristine := migMachine(), migMachine()
	obs := core.Observation{At: core.WholeGPU("GPU-m"), Kind: core.XID, Code: 48}
	run := func() string {
		snapshot, seen := core.Reconcile(machine, without(machine, "MIG-1"))
		l := core.Ledger{}.Apply(core.DefaultHealthPolicy(), time.Unix(0, 0), append(seen, obs)...)
		cfg := core.DefaultConfig()
		cfg.MIG = core.MIGMixed
		history, _ := l.History("GPU-m")
		inv := core.Build(snapshot, l, cfg)
		plan, err := inv.Reserve("MIG-2", core.UnitID(coretest.GPU(0)))
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
				core.Build(s, core.Ledger{}, core.DefaultConfig())
			}
		})
	}
}

func BenchmarkReserve(b *testing.B) {
	for _, n := range []int{8, 64} {
		inv := core.Build(coretest.GPUs(n), core.Ledger{}, core.DefaultConfig())
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := inv.Reserve(core.UnitID(coretest.GPU(1)), core.UnitID(coretest.GPU(5))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkPrefer(b *testing.B) {
	for _, n := range []int{8, 64} {
		inv := core.Build(coretest.GPUs(n), core.Ledger{}, core.DefaultConfig())
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
