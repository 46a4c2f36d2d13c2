package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The placement that a fault affects: a reset, and a fault that requires one, affects all instances; others affect
// their own placement.
func TestScope(t *testing.T) {
	for _, tc := range []struct {
		name string
		o    health.Observation
		want map[gpu.Placement]bool // the affected placements
	}{
		{"contained on a GI", xidEvent(gi(1), 94), map[gpu.Placement]bool{ci(1, 0): true, ci(1, 1): true}},
		{"contained on a CI", xidEvent(ci(1, 0), 94), map[gpu.Placement]bool{ci(1, 0): true}},
		{"contained on the GPU", xidEvent(a, 94), map[gpu.Placement]bool{a: true, ci(1, 0): true, ci(1, 1): true, ci(2, 0): true}},
		{"suspect on a GI", xidEvent(gi(2), 500), map[gpu.Placement]bool{ci(2, 0): true}},
		{"reset on a CI", xidEvent(ci(1, 0), 48), map[gpu.Placement]bool{a: true, ci(1, 0): true, ci(1, 1): true, ci(2, 0): true}},
		{"node on a GI", xidEvent(gi(1), 54), map[gpu.Placement]bool{a: true, ci(1, 0): true, ci(1, 1): true, ci(2, 0): true}},
		{"fabric on a GI", xidEvent(gi(1), 74), map[gpu.Placement]bool{a: true, ci(1, 0): true, ci(1, 1): true, ci(2, 0): true}},
		{"event of class reset", health.Observation{At: gi(1), Kind: health.Event, Code: 0x2000}, map[gpu.Placement]bool{a: true, ci(1, 0): true, ci(1, 1): true, ci(2, 0): true}},
		{"application", xidEvent(ci(1, 0), 31), nil},
	} {
		s := newLedgerFixture(t)
		s.observe(tc.o)
		for _, at := range []gpu.Placement{a, ci(1, 0), ci(1, 1), ci(2, 0)} {
			if h := s.ledger.Health(at); (h.State > health.Healthy) != tc.want[at] {
				t.Errorf("%s: %v is %s", tc.name, at, h)
			}
		}
		if h := s.ledger.Health(b); h.State != health.Healthy {
			t.Errorf("%s: the neighbour is %s", tc.name, h)
		}
	}
}

// newMIGState returns a MIG node after one snapshot; "GPU-m" has the instances GI 1 and 2.
func newMIGState(t *testing.T, tune ...func(*health.Policy)) (core.State, core.Config, gpu.Snapshot) {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	for _, f := range tune {
		f(&cfg.Health)
	}
	machine := migMachine()
	return core.NewState(cfg).Read(cfg, testStart, machine, healthyChecks(machine)...), cfg, machine
}

// Removing an instance repairs nothing, and the next instance is not faulty.
func TestRemovedInstance(t *testing.T) {
	whole, one, two := gpu.WholeGPU("GPU-m"), gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}, gpu.Placement{GPU: "GPU-m", GI: 2, CI: 0}
	severe := func(p *health.Policy) { p.XIDs = map[uint64]xid.Effect{94: xid.Withdraws} }
	state, cfg, machine := newMIGState(t, severe)
	state = state.Observe(cfg, testStart, xidEvent(one, 94))
	if h := state.Ledger.Health(one); h.State != health.Unhealthy || state.Ledger.Health(two).State != health.Healthy {
		t.Fatalf("before: %s", h)
	}
	now := testStart.Add(checkInterval)
	for range 3 {
		now = now.Add(checkInterval)
		state = state.Read(cfg, now, without(machine, "MIG-1"), healthyChecks(machine, func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })...)
		if h := state.Ledger.Health(two); h.State != health.Degraded || h.Cause() != "XID_94" || state.Ledger.Health(whole) != h {
			t.Errorf("the GPU after its instance went: %s", h)
		}
	}
	if c := state.Ledger.Conditions()[0]; !c.Since.Equal(testStart) || !c.FromRemovedInstance {
		t.Errorf("condition: %+v", c)
	}
	record := state.Checkpoint("boot")
	again := core.Restore(cfg, record, "boot").Read(cfg, now, without(machine, "MIG-1"), healthyChecks(machine)...)
	if h := again.Ledger.Health(whole); h.State != health.Degraded {
		t.Errorf("after a restart: %s", h)
	}
	state = state.Observe(cfg, now, xidEvent(whole, 94))
	if h := state.Ledger.Health(two); h.State != health.Unhealthy {
		t.Errorf("the GPU itself after another: %s", h)
	}
}

// Two conditions that are merged keep the later time, so that older evidence does not clear them.
func TestRemovedInstanceMergesCondition(t *testing.T) {
	whole, one := gpu.WholeGPU("GPU-m"), gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}
	for name, order := range map[string][2]gpu.Placement{"the instance first": {one, whole}, "the GPU first": {whole, one}} {
		t.Run(name, func(t *testing.T) {
			state, cfg, machine := newMIGState(t)
			state = state.Observe(cfg, testStart, xidEvent(order[0], 94))
			state = state.Observe(cfg, testStart.Add(time.Second), health.Observation{At: whole, Kind: health.DriverRebound})
			state = state.Observe(cfg, testStart.Add(2*time.Second), xidEvent(order[1], 94))
			state = state.Read(cfg, testStart.Add(3*time.Second), without(machine, "MIG-1"),
				healthyChecks(machine, func(v *health.Sample) { v.RecoveryAction = health.RecoveryUnknown })...)
			cs := state.Ledger.Conditions()
			if len(cs) != 1 || !cs[0].Since.Equal(testStart) || !cs[0].Last.Equal(testStart.Add(2*time.Second)) || cs[0].Count != 2 || cs[0].FromRemovedInstance {
				t.Errorf("conditions: %+v", cs)
			}
			if len(cs) > 0 && !cs[0].ClearingSince.IsZero() {
				t.Error("the reset between the two counts for both")
			}
		})
	}
}

// Of two merged conditions, one that is ignored does not make the other ignored.
func TestRemovedInstanceMergesIgnoredCondition(t *testing.T) {
	whole, one := gpu.WholeGPU("GPU-m"), gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}
	for _, again := range []gpu.Placement{whole, one} {
		state, cfg, machine := newMIGState(t)
		state = state.Observe(cfg, testStart, xidEvent(one, 94), xidEvent(whole, 94))
		state, _, err := state.Ignore(cfg, testStart, health.Command{GPU: whole.GPU}, testStart.Add(time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		state = state.Observe(cfg, testStart.Add(time.Second), xidEvent(again, 94))
		state = state.Read(cfg, testStart.Add(2*time.Second), without(machine, "MIG-1"), healthyChecks(machine)...)
		if h := state.Ledger.Health(whole); h.State != health.Degraded {
			t.Errorf("another on %v: %s", again, h)
		}
	}
}

// A fault of an unknown instance counts against its GPU.
func TestUnknownInstance(t *testing.T) {
	state, cfg, _ := newMIGState(t)
	state = state.Observe(cfg, testStart, xidEvent(gpu.Placement{GPU: "GPU-m", GI: 9, CI: 0}, 94))
	for u := range state.Allocatable.Units() {
		if want := u.Device.At.GPU == "GPU-m"; (u.Health.State == health.Degraded) != want {
			t.Errorf("%s is %s", u.ID, u.Health)
		}
	}
}

// A GPU that is listed but can't be read keeps its conditions.
func TestExcludedGPUKeepsConditions(t *testing.T) {
	state, cfg, machine := newMIGState(t)
	machine.Excluded = []gpu.Exclusion{{Index: 5, At: gpu.WholeGPU("GPU-x"), Failure: gpu.FailureError, Reason: "Unknown Error"}}
	state = state.Read(cfg, testStart, machine, healthyChecks(machine)...)
	state = state.Observe(cfg, testStart, xidEvent(gpu.WholeGPU("GPU-x"), 119))
	state = state.Read(cfg, testStart.Add(time.Minute), machine, healthyChecks(machine)...)
	if cs := state.Ledger.Conditions(); len(cs) != 1 || cs[0].Code != 119 {
		t.Errorf("excluded: %v", cs)
	}
	machine.Excluded = nil
	state = state.Read(cfg, testStart.Add(2*time.Minute), machine, healthyChecks(machine)...)
	if cs := state.Ledger.Conditions(); len(cs) != 0 {
		t.Errorf("gone: %v", cs)
	}
}

// An instance that can't be read recovers when it is read, not when its GPU is checked.
func TestUnreadableInstance(t *testing.T) {
	one := gpu.Placement{GPU: "GPU-m", GI: 1, CI: 0}
	state, cfg, machine := newMIGState(t)
	reading := without(machine, "MIG-1")
	reading.Excluded = []gpu.Exclusion{{At: one, Failure: gpu.FailureError, Reason: "Unknown Error"}}
	now := testStart
	read := func(s gpu.Snapshot) {
		now = now.Add(time.Minute)
		state = state.Read(cfg, now, s, healthyChecks(machine)...)
	}
	for range 3 {
		read(reading)
	}
	for range 60 { // its GPU is checked much more often
		now = now.Add(checkInterval)
		state = state.Observe(cfg, now, healthyChecks(machine)...)
		for u := range state.Allocatable.Units() {
			if want := u.ID != "MIG-1"; u.Health.Schedulable() != want {
				t.Fatalf("%s is %s", u.ID, u.Health)
			}
		}
	}
	read(machine)
	if u, _ := state.Allocatable.Unit("MIG-1"); u.Health.State != health.Healthy {
		t.Errorf("after it was read: %s", u.Health)
	}
}

// healthyChecks returns the checks of a snapshot whose GPUs are healthy.
func healthyChecks(s gpu.Snapshot, changes ...func(*health.Sample)) (obs []health.Observation) {
	for _, d := range s.Devices {
		if d.At == gpu.WholeGPU(d.ID) {
			v := healthySample()
			for _, change := range changes {
				change(&v)
			}
			obs = append(obs, health.Observation{At: d.At, Kind: health.Checked, Sample: v})
		}
	}
	return obs
}
