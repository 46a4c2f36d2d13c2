package core_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// causes returns the states and causes of conditions.
func causes(all []health.Health) (of []string) {
	for _, h := range all {
		of = append(of, h.State.String()+" "+h.Cause())
	}
	return of
}

// All conditions of a placement are listed from the worst: by state, then real ones before simulated ones, then the hardest to clear,
// then the earliest. Those that an operator ignores and those without effect are not.
func TestAllConditions(t *testing.T) {
	f := newLedgerFixture(t)
	f.observe(xidEvent(a, 94), xidEvent(a, 38)) // 38 has no effect
	f.wait(time.Second)
	simulated := xidEvent(a, 95)
	simulated.Simulated = true
	f.observe(simulated)
	f.wait(time.Second)
	f.observe(xidEvent(a, 119), xidEvent(a, 121))
	f.wait(time.Second)
	instance := xidEvent(gpu.Placement{GPU: a.GPU, GI: 1, CI: 0}, 94)
	f.observe(instance)

	want := []string{"unhealthy XID_119", "unhealthy XID_95", "degraded XID_94", "degraded XID_121"}
	if diff := gocmp.Diff(want, causes(f.ledger.All(a))); diff != "" {
		t.Error(diff)
	}
	want = []string{"unhealthy XID_119", "unhealthy XID_95", "degraded XID_94", "degraded XID_94", "degraded XID_121"}
	if diff := gocmp.Diff(want, causes(f.ledger.All(instance.At))); diff != "" {
		t.Error("of an instance, which has those of its GPU, too:", diff)
	}
	if all := f.ledger.All(b); all != nil {
		t.Error("of the other GPU:", causes(all))
	}
	for _, h := range f.ledger.All(a) {
		if h.Since.IsZero() || h.Action == "" {
			t.Errorf("%+v", h)
		}
	}
}

// Random faults: the first of all conditions is the health, each is at most as bad as the one before, and a healthy placement has none.
func TestFirstConditionIsHealth(t *testing.T) {
	codes := []uint64{13, 38, 63, 74, 79, 94, 95, 109, 119, 121, 154, 999}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7)) //nolint:gosec // reproducible
		l, now := health.Ledger{}, testStart
		s := coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb", "1g.10gb")
		for range 12 {
			at := s.Devices[r.IntN(len(s.Devices))].At
			if r.IntN(10) == 0 {
				at = gpu.Node
			}
			o := xidEvent(at, codes[r.IntN(len(codes))])
			o.Simulated = r.IntN(3) == 0
			now = now.Add(time.Duration(r.IntN(3)) * 20 * time.Second)
			l = l.Apply(health.DefaultPolicy(), now, o)
			inv := core.Build(s, l, core.DefaultConfig()).WithoutHost()
			for u := range inv.Units() {
				all := l.All(u.Device.At)
				worst := l.Health(u.Device.At)
				if (len(all) == 0) != (worst.State == health.Healthy) || len(all) > 0 && all[0] != worst {
					t.Fatalf("seed %d: health %v, all %v", seed, worst, causes(all))
				}
				if !slices.IsSortedFunc(all, func(x, y health.Health) int { return int(y.State) - int(x.State) }) {
					t.Fatalf("seed %d: %v", seed, causes(all))
				}
				if of := inv.Conditions(u); len(all) > 0 && (len(of) == 0 || of[0] != u.Health || len(of) > len(all)) {
					t.Fatalf("seed %d: unit has %v, placement %v", seed, causes(of), causes(all))
				}
			}
		}
	}
}

// The conditions of a unit are those of its device. What the node causes comes first and hides none of them; a mode that only observes
// makes all advisory.
func TestConditionsOfUnits(t *testing.T) {
	fault := func(n int, code uint64) health.Observation {
		return xidEvent(gpu.WholeGPU(coretest.GPU(n)), code)
	}
	l := health.Ledger{}.Apply(health.DefaultPolicy(), testStart, fault(0, 94), fault(0, 95), fault(1, 94))
	host := inventory.Host{Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu.Node, Earlier: true}}}
	for _, tc := range []struct {
		about string
		inv   *inventory.Allocatable
		want  [3][]string
	}{
		{"enforced", core.Build(coretest.GPUs(3), l, core.DefaultConfig()).WithoutHost(), [3][]string{{"unhealthy XID_95", "degraded XID_94"}, {"degraded XID_94"}, nil}},
		{"offered by another agent", core.Build(coretest.GPUs(3), l, core.DefaultConfig()).WithHost(host, inventory.OverlapRefuse),
			[3][]string{{"unhealthy XID_95", "degraded XID_94"}, {"unhealthy OVERLAP", "degraded XID_94"}, {"unhealthy OVERLAP"}}},
		{"withdrawn", core.Build(coretest.GPUs(0), health.Ledger{}, core.DefaultConfig()).WithoutHost().WithRetiring(core.Build(coretest.GPUs(3), l, core.DefaultConfig()).WithoutHost(), testStart, time.Minute),
			[3][]string{{"unhealthy WITHDRAWN"}, {"unhealthy WITHDRAWN"}, {"unhealthy WITHDRAWN"}}},
	} {
		n := 0
		for u := range tc.inv.Units() {
			if diff := gocmp.Diff(tc.want[n], causes(tc.inv.Conditions(u))); diff != "" {
				t.Errorf("%s, %s: %s", tc.about, u.ID, diff)
			}
			n++
		}
		if n != 3 {
			t.Errorf("%s: %d units", tc.about, n)
		}
	}
	observe := core.DefaultConfig()
	observe.Health.Mode = health.ModeObserve
	inv := core.Build(coretest.GPUs(1), l, observe).WithoutHost()
	for u := range inv.Units() {
		all := inv.Conditions(u)
		if len(all) != 2 || !all[0].Advisory || !all[0].Schedulable() || !all[1].Schedulable() {
			t.Errorf("observed only: %+v", all)
		}
	}
	if all := (&inventory.Allocatable{}).Conditions(inventory.Unit{}); all != nil {
		t.Error(all)
	}
}

// Two inventories that differ in a condition that the worst one hides are not equal: each is a taint of its own.
func TestHiddenConditionsAreCompared(t *testing.T) {
	fault := func(code uint64) health.Observation { return xidEvent(gpu.WholeGPU(coretest.GPU(0)), code) }
	l := health.Ledger{}.Apply(health.DefaultPolicy(), testStart, fault(95))
	more := l.Apply(health.DefaultPolicy(), testStart, fault(94))
	x, y := core.Build(coretest.GPUs(1), l, core.DefaultConfig()).WithoutHost(), core.Build(coretest.GPUs(1), more, core.DefaultConfig()).WithoutHost()
	if x.Equal(y) || !y.Equal(core.Build(coretest.GPUs(1), more, core.DefaultConfig()).WithoutHost()) {
		t.Error("an inventory does not differ by a hidden condition")
	}
}

// faults cause one condition each.
var faults = map[string]func(*ledgerFixture){
	"XID_48":            func(s *ledgerFixture) { s.reportXIDs(48) },
	"XID_119":           func(s *ledgerFixture) { s.reportXIDs(119) },
	"XID_54":            func(s *ledgerFixture) { s.reportXIDs(54) },
	"XID_94":            func(s *ledgerFixture) { s.reportXIDs(94) },
	"XID_157":           func(s *ledgerFixture) { s.reportXIDs(157) },
	"ROW_REMAP_FAILED":  func(s *ledgerFixture) { s.setSample(func(v *health.Sample) { v.RemapFailed = health.Yes }) },
	"ROW_REMAP_PENDING": func(s *ledgerFixture) { s.setSample(func(v *health.Sample) { v.RemapPending = health.Yes }) },
	"FABRIC_UNHEALTHY":  func(s *ledgerFixture) { s.setSample(func(v *health.Sample) { v.Fabric = health.FabricUnhealthy }) },
	"RECOVERY_ACTION_NODE_REBOOT": func(s *ledgerFixture) {
		s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReboot })
	},
	"RECOVERY_ACTION_GPU_RESET": func(s *ledgerFixture) {
		s.setSample(func(v *health.Sample) { v.RecoveryAction = health.RecoveryReset })
	},
	"LOST": func(s *ledgerFixture) { s.observe(health.Observation{At: a, Kind: health.Lost}) },
}

// Of equally bad conditions the one that is hardest to clear is the health of the GPU, whichever came first, and also if an operator has to
// clear each: what only an operator clears, then what a reboot clears, then what a reset clears. Each keeps its own action.
func TestHardestFaultToClearIsTheHealth(t *testing.T) {
	for _, order := range [][]string{ // the health, then what it hides
		{"ROW_REMAP_FAILED", "XID_48"},
		{"ROW_REMAP_FAILED", "XID_54"},
		{"ROW_REMAP_FAILED", "RECOVERY_ACTION_NODE_REBOOT"},
		{"XID_54", "XID_119"},
		{"RECOVERY_ACTION_NODE_REBOOT", "XID_48"},
		{"XID_119", "FABRIC_UNHEALTHY"},
		{"XID_157", "XID_94"},
		{"XID_157", "ROW_REMAP_PENDING"},
		{"XID_48", "XID_157"}, // that it takes no work is worse than that it must be replaced some day
		{"LOST", "XID_54"},
	} {
		for _, manual := range []bool{false, true} {
			for _, causes := range [][]string{order, {order[1], order[0]}} {
				s := newLedgerFixture(t, func(p *health.Policy) { p.ManualRecovery = manual })
				for _, cause := range causes {
					faults[cause](s)
					s.wait(time.Second)
					if !slices.Contains(causes, "LOST") {
						s.check(3)
					}
				}
				var got []string
				for _, h := range s.ledger.All(a) {
					got = append(got, h.Cause())
					if alone := s.condition(h.Cause()); h.Action != alone.Action() || h.Clears != alone.Clears() {
						t.Errorf("%v: %+v", causes, h)
					}
				}
				if !slices.Equal(got, order) || s.ledger.Health(a).Cause() != order[0] {
					t.Errorf("manual recovery %t, %v: %v, health %s", manual, causes, got, s.ledger.Health(a))
				}
			}
		}
	}
}

// Equal effort: the earlier one may be the cause of the later one.
func TestEarliestOfEqualFaultsIsTheHealth(t *testing.T) {
	s := newLedgerFixture(t)
	s.reportXIDs(119)
	s.wait(time.Second)
	s.reportXIDs(48)
	faults["RECOVERY_ACTION_GPU_RESET"](s)
	s.check(1)
	s.expect("three faults that a reset clears", health.Unhealthy, "XID_119")
}
