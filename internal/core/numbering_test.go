package core_test

import (
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// divided are two agents that divide a node by index, and share the numbers of devices.
func divided(t *testing.T) (nomad, kube *restartFixture) {
	half := func(reserved ...int) *restartFixture {
		l := newRestartFixture(t, reindexed(seq(0, 7)...))
		l.cfg.Policy = inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(reserved...), NotOffered: "for another"}}}
		l.state = core.Restore(l.cfg, core.Checkpoint{BootID: "a"}, "a").WithHost(l.cfg, l.now, inventory.Host{SharesNumbers: true})
		l.read(1)
		l.expectPools("before the numbers are shared", "")
		if !l.state.Allocatable.Provisional() {
			t.Error("before the numbers are shared, that nothing is offered counts")
		}
		return l
	}
	nomad, kube = half(4, 5, 6, 7), half(0, 1, 2, 3)
	share(nomad.state.ProposedNumbering(), nomad, kube)
	nomad.expectPools("nomad", "gpu 0,1,2,3")
	kube.expectPools("kubernetes", "gpu 4,5,6,7")
	if nomad.state.Allocatable.Provisional() {
		t.Error("after the numbers are shared, what is offered does not count")
	}
	return nomad, kube
}

// share gives both agents the shared numbering.
func share(n inventory.Numbering, agents ...*restartFixture) {
	for _, a := range agents {
		a.state = a.state.WithHost(a.cfg, a.now, inventory.Host{SharesNumbers: true, Numbering: n})
	}
}

// A GPU is added between the snapshots of two agents, so that they find a new GPU at different indices.
func TestNewGPUWaitsForSharedNumber(t *testing.T) {
	nomad, kube := divided(t)
	for _, l := range []*restartFixture{nomad, kube} {
		l.host = reindexed(seq(4, 7)...)
		l.read(1)
		l.now = l.now.Add(l.cfg.Health.RemoveLostAfter)
		l.read(1)
	}
	share(kube.state.ProposedNumbering(), nomad, kube)
	nomad.host, kube.host = reindexed(4, 5, 6, 8, 7), reindexed(4, 5, 9, 6, 8, 7)
	nomad.read(1)
	kube.read(1)
	nomad.expectPools("nomad, which has proposed 3", "")
	kube.expectPools("kubernetes, which could not", "gpu 4,5,6,7")
	share(nomad.state.ProposedNumbering(), nomad, kube)
	nomad.expectPools("nomad", "gpu 8")
	kube.expectPools("kubernetes", "gpu 4,5,6,7")
}

// An agent was killed before it wrote its checkpoint, but after it shared its numbers.
func TestSharedNumberOverridesHistory(t *testing.T) {
	nomad, _ := divided(t)
	nomad.restart("a", "a")
	share(inventory.NewNumbering(0, []inventory.Number{
		{ID: coretest.GPU(0), Index: gpu.DeviceIndex{GPU: 5, Instance: -1}}, {ID: coretest.GPU(5), Index: gpu.DeviceIndex{GPU: 0, Instance: -1}},
	}), nomad)
	nomad.read(1)
	nomad.expectPools("GPUs 0 and 5 have each other's number", "gpu 1,2,3,5")
}

// The checkpoint is lost while a GPU has no UUID. Its number must not be given to another GPU.
func TestNumberWithUnidentifiedGPU(t *testing.T) {
	nomad, _ := divided(t)
	shared := nomad.state.ProposedNumbering()
	nomad.host = reindexed(append([]int{0, 1}, seq(3, 7)...)...)
	nomad.host.Excluded = []gpu.Exclusion{{Index: 2, Failure: gpu.FailureError, Reason: "no UUID"}}
	nomad.state = core.Restore(nomad.cfg, core.Checkpoint{BootID: "a"}, "a")
	share(shared, nomad)
	nomad.read(1)
	if at, ok := nomad.state.ProposedNumbering().Of(coretest.GPU(2)); !ok || at.GPU != 2 {
		t.Errorf("GPU 2 has number %v, %v", at, ok)
	}
	nomad.host = reindexed(append(seq(3, 7), 0, 1, 2)...)
	share(nomad.state.ProposedNumbering(), nomad)
	nomad.read(1)
	nomad.expectPools("its UUID is known again", "gpu 0,1,2,3")
}

// The other node has a higher generation: its numbers must not replace those of this node, here or at other
// agents.
func TestForeignHistoryAssignsNoNumbers(t *testing.T) {
	nomad, kube := divided(t)
	shared := nomad.state.ProposedNumbering()
	r := core.Checkpoint{BootID: "a", Devices: otherGPUs(3).Devices}
	for _, d := range r.Devices {
		r.Binding.Numbering.Numbers = append(r.Binding.Numbering.Numbers, inventory.Number{ID: d.ID, Index: gpu.DeviceIndex{GPU: d.Index, Instance: -1}})
	}
	r.Binding.Numbering.Generation = 7
	kube.state = core.Restore(kube.cfg, r, "a")
	expectShared := func(when string) {
		t.Helper()
		if n := kube.state.ProposedNumbering(); n.Generation > 0 || len(n.Numbers) > 0 {
			t.Errorf("%s it shares %+v", when, n)
		}
	}
	expectShared("at its start")
	share(shared, kube)
	expectShared("with a history that may be of this node")
	kube.noDriver(gpu.DriverAbsent)
	expectShared("without a driver")
	machine := kube.host
	kube.host = onlyExcluded(gpu.Exclusion{Index: 0, Failure: gpu.FailureError, Reason: "no UUID"})
	kube.read(1)
	expectShared("with a GPU without UUID")
	kube.host = machine
	kube.read(1)
	kube.expectPools("with its own numbers", "gpu 4,5,6,7")
}

// A decision while the history was unconfirmed remains when the history turns out to be another node's.
func TestNumbersWhenHistoryIsConfirmed(t *testing.T) {
	l := newPolicyFixture(t, inventory.Policy{})
	l.restart("a", "a")
	l.cfg.Policy = shareFirst(1)
	machine := otherGPUs(3)
	l.host = machine
	l.host.Devices = slices.Clone(machine.Devices[1:2])
	l.host = withExcluded(l.host, gpu.Exclusion{Index: 0, Failure: gpu.FailureLost, Reason: "no UUID"})
	l.read(1)
	was, _ := l.state.Allocatable.Unit(inventory.UnitID(coretest.GPU(101) + "::0"))
	l.host = machine
	l.read(1)
	is, _ := l.state.Allocatable.Unit(inventory.UnitID(coretest.GPU(101) + "::0"))
	if l.state.Foreign == nil || was.Pool != "gpu.shared" || is.Pool != was.Pool {
		t.Errorf("it was in %q, and is in %q; dropped: %v", was.Pool, is.Pool, l.state.Foreign)
	}
}

// A killed agent has an older checkpoint: since then its GPU was dropped, and another GPU has the number.
func TestNumberIsDroppedIfSharedForAnother(t *testing.T) {
	nomad, _ := divided(t)
	nomad.restart("a", "a")
	share(inventory.NewNumbering(0, []inventory.Number{{ID: coretest.GPU(9), Index: gpu.DeviceIndex{GPU: 3, Instance: -1}}}), nomad)
	nomad.host = reindexed(0, 1, 2, 9, 4, 5, 6, 7, 3)
	nomad.read(1)
	share(nomad.state.ProposedNumbering(), nomad)
	nomad.expectPools("GPU 9 has the number of GPU 3, which is the last one now", "gpu 0,1,2,3,9")
}

// Two agents divide a node by index. One of them starts for the first time after a GPU was removed.
func TestAgentsShareNumbers(t *testing.T) {
	rule := func(reserve bool, indices ...int) inventory.Rule {
		return inventory.Rule{Select: gpuIndices(indices...), NotOffered: map[bool]string{true: "for another"}[reserve]}
	}
	nomad := newPolicyFixture(t, inventory.Policy{Rules: []inventory.Rule{rule(false, seq(0, 3)...), rule(true, seq(4, 7)...)}})
	nomad.host = reindexed(seq(1, 7)...)
	nomad.read(1)
	nomad.expectPools("nomad", "gpu 1,2,3")
	kube := newRestartFixture(t, reindexed())
	kube.cfg.Policy = inventory.Policy{Rules: []inventory.Rule{rule(true, seq(0, 3)...), rule(false, seq(4, 7)...)}}
	kube.state = core.Restore(kube.cfg, core.Checkpoint{BootID: "a"}, "a").
		WithHost(kube.cfg, kube.now, inventory.Host{Numbering: nomad.state.Numbering()})
	kube.host = nomad.host
	kube.read(1)
	kube.expectPools("kubernetes", "gpu 4,5,6,7")

	kube.state, _ = kube.state.Rebind(kube.cfg, kube.now)
	kube.expectPools("kubernetes after rebind", "gpu 5,6,7")
	nomad.state = nomad.state.WithHost(nomad.cfg, nomad.now, inventory.Host{Numbering: kube.state.Numbering()})
	nomad.expectPools("nomad after the rebind of the other", "gpu 1,2,3,4")
}

// A new GPU gets the number of a removed GPU, because no work used it before.
func TestReplacedGPUGetsFreeNumber(t *testing.T) {
	l := newPolicyFixture(t, reservedAndShared)
	l.host = reindexed(0, 1, 2, 3, 4, 9, 6, 7)
	l.host.Devices[5].PCI = coretest.GPUs(8).Devices[5].PCI
	l.read(1)
	l.expectPools("another GPU in the slot of GPU 5", "gpu 0,1,2,3,4 gpu.shared 6,9")
}
