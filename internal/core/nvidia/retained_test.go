package nvidia

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// lackingCodes are the codes of a call about a value that a GPU may not have.
var lackingCodes = []string{"NOT_SUPPORTED", "NO_PERMISSION", "INVALID_ARGUMENT", "FUNCTION_NOT_FOUND"}

// node is a session on a machine and the state that follows from it.
type node struct {
	*testing.T
	s     *Session
	cfg   core.Config
	state core.State
	now   time.Time
}

func newNode(t *testing.T, m *simdriver.Machine) *node {
	t.Helper()
	n := &node{T: t, cfg: core.DefaultConfig(), now: time.Unix(1_000_000, 0)}
	n.cfg.MIG = inventory.MIGMixed
	n.s = openWith(t, m, Options{Processes: true, Now: func() time.Time { return n.now }})
	n.state = core.NewState(n.cfg)
	n.read(0)
	n.read(time.Minute)
	return n
}

// read makes all calls of the session after a time: also those about values that it keeps.
func (n *node) read(after time.Duration) (gpu.Snapshot, []health.Observation) {
	n.Helper()
	n.now = n.now.Add(after)
	n.s.topology.gpus, n.s.registeredGPUs = nil, nil
	for _, w := range n.s.workers {
		w.staticKnown, w.record.lastFailed = false, true
	}
	snap := snapshot(n.T, n.s)
	_, err := n.s.Wait(0)
	if errors.Is(err, gpu.ErrDriverLost) {
		n.Error(err)
	}
	obs, err := n.s.Probe()
	must(n.T, err)
	n.state = n.state.Read(n.cfg, n.now, snap, obs...)
	return snap, obs
}

// offered is which units take work.
func (n *node) offered() map[inventory.UnitID]bool {
	all := map[inventory.UnitID]bool{}
	for u := range n.state.Allocatable.Units() {
		all[u.ID] = u.Health.Schedulable()
	}
	return all
}

// A value that was there does not go: whatever one function answers, for one reading or for ever, no device changes, no MIG
// instance goes, no GPU is offered beside its instances, and no GPU becomes unhealthy.
func TestAnswersStay(t *testing.T) {
	newest, err := simdriver.With615("a30")
	must(t, err)
	dgx, err := simdriver.Text("a100-mig")
	must(t, err)
	all := func(call string) bool { return call != "nvmlInit" && call != "nvmlShutdown" }
	links := func(call string) bool { return strings.Contains(call, "NvLink") || strings.Contains(call, "Topology") }
	for machine, tested := range map[string]func(call string) bool{newest: all, dgx: links} {
		m := simdriver.StartText(t, machine)
		n := newNode(t, m)
		before, checked := n.read(time.Minute)
		offered := n.offered()
		expect := func(what string, after time.Duration) {
			t.Helper()
			snap, obs := n.read(after)
			if !before.Equal(snap) {
				diff := gocmp.Diff(before.Devices, snap.Devices) + gocmp.Diff(before.Links, snap.Links)
				t.Fatalf("%s, after %v: excluded %+v %s", what, after, snap.Excluded, diff)
			}
			if diff := gocmp.Diff(checked, obs, ignored); diff != "" {
				t.Fatalf("%s, after %v: %s", what, after, diff)
			}
			if diff := gocmp.Diff(offered, n.offered()); diff != "" {
				t.Fatalf("%s, after %v: offered: %s", what, after, diff)
			}
		}
		for _, call := range slices.DeleteFunc(allCalls(), func(call string) bool { return !tested(call) }) {
			for _, code := range lackingCodes {
				must(t, m.Fail(simdriver.All, call, code, 1))
				expect(call+": "+code+" once", time.Minute)
				must(t, m.Heal(), m.Fail(simdriver.All, call, code, simdriver.Always))
				for _, after := range []time.Duration{0, 3 * time.Second, time.Hour} {
					expect(call+": "+code, after)
				}
				must(t, m.Heal())
				if _, obs := n.read(time.Second); !gocmp.Equal(checked, obs) {
					t.Fatalf("%s: %s, healed: %s", call, code, gocmp.Diff(checked, obs))
				}
			}
		}
	}
}

// ignored are the parts of an observation that show what can't be read now.
var ignored = gocmp.Options{
	cmpopts.IgnoreFields(health.Sample{}, "Partial", "Events", "OperationalEvents"),
	cmpopts.IgnoreFields(health.Observation{}, "Processes"),
}

// A real change goes through at once, also while a call that had an answer is not supported.
func TestChangeBesideWrongAnswers(t *testing.T) {
	m, s := start(t, "a30", open)
	if n := len(instances(snapshot(t, s), 1)); n != 3 {
		t.Fatalf("%d instances", n)
	}
	must(t, m.Fail(simdriver.GPU(1), "nvmlDeviceGetMigMode", "NOT_SUPPORTED", simdriver.Always))
	must(t, m.SetMIG(1, "2g.12gb"))
	snap := snapshot(t, s)
	if n := len(instances(snap, 1)); n != 1 || !snap.Devices[1].MIG || len(snap.Excluded) > 0 {
		t.Errorf("instances removed: %d left, %+v, excluded %v", n, snap.Devices[1], snap.Excluded)
	}
	must(t, m.Heal(), m.MIGOff(1))
	snap = snapshot(t, s)
	if n := len(instances(snap, 1)); n != 0 || snap.Devices[1].MIG || !snap.Devices[1].CanMIG {
		t.Errorf("MIG mode disabled: %d instances, %+v", n, snap.Devices[1])
	}
}

// The instances of an earlier session stay while the first reading of the next one can't count them, or has no MIG mode.
func TestInstancesOfAnEarlierSession(t *testing.T) {
	m, s := start(t, "a30", open)
	before := snapshot(t, s)
	for _, call := range []string{"nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"} {
		for _, code := range lackingCodes {
			must(t, m.Fail(simdriver.GPU(1), call, code, simdriver.Always))
			got, _ := core.Reconcile(before, snapshot(t, open(t, m)))
			if diff := gocmp.Diff(before.Devices, got.Devices); diff != "" || len(got.Excluded) > 0 {
				t.Errorf("%s, %s: excluded %v %s", call, code, got.Excluded, diff)
			}
			must(t, m.Heal())
		}
	}
}
