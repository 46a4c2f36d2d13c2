package core_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// reindexed returns the snapshot of a node with the given GPUs of coretest.GPUs, in the order of their indices.
func reindexed(gpus ...int) gpu.Snapshot {
	s := coretest.GPUs(16)
	var devices []gpu.Device
	for i, n := range gpus {
		d := s.Devices[n]
		d.Index = i
		devices = append(devices, d)
	}
	return gpu.NewSnapshot(gpu.Snapshot{Driver: s.Driver, Devices: devices})
}

func seq(from, to int) (numbers []int) {
	for n := from; n <= to; n++ {
		numbers = append(numbers, n)
	}
	return numbers
}

// newPolicyFixture returns a node of 8 GPUs under a policy.
func newPolicyFixture(t *testing.T, p inventory.Policy) *restartFixture {
	l := newRestartFixture(t, reindexed(seq(0, 7)...))
	l.cfg.Policy = p
	l.state = core.Restore(l.cfg, core.Checkpoint{BootID: "a"}, "a")
	l.read(1)
	return l
}

// pools returns the GPUs that take new work, by pool: "gpu 1,2 gpu.shared 5,6".
func (l *restartFixture) pools() string {
	by := map[string][]string{}
	for u := range l.state.Allocatable.Units() {
		n := cmp.Or(strings.TrimLeft(string(u.Device.At.GPU[len(u.Device.At.GPU)-12:]), "0"), "0")
		if u.Health.Schedulable() && !slices.Contains(by[u.Pool], n) {
			by[u.Pool] = append(by[u.Pool], n)
		}
	}
	var texts []string
	for _, pool := range slices.Sorted(maps.Keys(by)) {
		slices.Sort(by[pool])
		texts = append(texts, pool+" "+strings.Join(by[pool], ","))
	}
	return strings.Join(texts, " ")
}

func (l *restartFixture) expectPools(when, want string) {
	l.Helper()
	if got := l.pools(); got != want {
		l.Errorf("%s: offered are %q, want %q", when, got, want)
	}
}

// expectWarnings: there is one warning for each of the texts, which it contains, in their order.
func (l *restartFixture) expectWarnings(when string, texts ...string) {
	l.Helper()
	warnings := append(l.state.Allocatable.PolicyWarnings(), l.state.Allocatable.OutdatedBindings()...)
	if !slices.EqualFunc(warnings, texts, strings.Contains) {
		l.Errorf("%s: warnings are %q, want %q", when, warnings, texts)
	}
}

var reservedAndShared = inventory.Policy{Rules: []inventory.Rule{
	{Select: inventory.Selector{At: "policy.yaml:3: rules[0].select", Indices: gpuIndices(7).Indices}, NotOffered: "display"},
	{Select: inventory.Selector{At: "policy.yaml:5: rules[1].select", Indices: gpuIndices(5, 6).Indices}, Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}},
}}

func TestIndexBindingWhenGPUIsRemoved(t *testing.T) {
	l := newPolicyFixture(t, reservedAndShared)
	l.expectPools("at first", "gpu 0,1,2,3,4 gpu.shared 5,6")
	l.expectWarnings("at first")
	l.host = reindexed(seq(1, 7)...)
	for range 3 {
		l.read(1)
		l.expectPools("GPU 0 is removed", "gpu 1,2,3,4 gpu.shared 5,6")
	}
	l.expectWarnings("GPU 0 is removed",
		"policy.yaml:3: rules[0].select: index 7 is bound to "+string(coretest.GPU(7))+"; by the present order of devices index 7 would be no device; to apply that",
		"policy.yaml:5: rules[1].select: index 5, 6 is bound to")
	l.restart("a", "a")
	l.read(1)
	l.expectPools("the agent was restarted", "gpu 1,2,3,4 gpu.shared 5,6")
	l.now = l.now.Add(l.cfg.Health.RemoveLostAfter)
	l.read(2)
	l.expectPools("GPU 0 is forgotten", "gpu 1,2,3,4 gpu.shared 5,6")
	l.restart("a", "b")
	l.read(1)
	l.expectPools("a reboot assigns new numbers", "gpu 1,2,3,4,5 gpu.shared 6,7")
}

// A GPU that is lost is no reason to bind a position to others.
func TestIndexBindingWhenGPUIsLost(t *testing.T) {
	l := newPolicyFixture(t, reservedAndShared)
	l.host = reindexed(seq(0, 6)...)
	l.read(1)
	l.expectWarnings("GPU 7 is lost")
}

func TestIndexBindingWhenGPUIsAdded(t *testing.T) {
	l := newPolicyFixture(t, reservedAndShared)
	l.host = reindexed(append([]int{8}, seq(0, 7)...)...)
	l.read(1)
	l.expectPools("a ninth GPU comes first in the driver's order", "gpu 0,1,2,3,4 gpu.shared 5,6")
	if e := l.state.Allocatable.Excluded(); len(e) != 2 || e[0].At != gpuAt(8) || !strings.Contains(e[0].Reason, "rebind") {
		t.Errorf("excluded is %v", e)
	}
	next, err := l.state.Rebind(l.cfg, l.now)
	if err != nil {
		t.Fatal(err)
	}
	l.state = next
	l.read(1)
	l.expectPools("after rebind", "gpu 0,1,2,3,7,8 gpu.shared 4,5")
	l.expectWarnings("after rebind")

	l = newPolicyFixture(t, inventory.Policy{Names: []inventory.Naming{{Select: inventory.Selector{Full: true}, Pool: "all"}}})
	l.host = reindexed(append([]int{8}, seq(0, 7)...)...)
	l.read(1)
	l.expectPools("no rule goes by index", "all 0,1,2,3,4,5,6,7,8")
}

func shareFirst(n int) inventory.Policy {
	return inventory.Policy{Shares: []inventory.Share{{
		Pool: "gpu", Select: inventory.Selector{At: "config.yaml:7"}, First: n, Rename: "gpu.shared",
		Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2},
	}}}
}

func TestCountBinding(t *testing.T) {
	l := newPolicyFixture(t, shareFirst(2))
	l.expectPools("at first", "gpu 2,3,4,5,6,7 gpu.shared 0,1")
	l.host = reindexed(seq(1, 7)...)
	l.read(1)
	l.expectPools("GPU 0 is lost", "gpu 2,3,4,5,6,7 gpu.shared 1")
	l.expectWarnings("GPU 0 is lost", "config.yaml:7: the first 2 is bound to")
	l.now = l.now.Add(l.cfg.Health.RemoveLostAfter)
	l.read(2)
	l.restart("a", "a")
	l.read(1)
	l.expectPools("GPU 0 is forgotten", "gpu 2,3,4,5,6,7 gpu.shared 1")
	l.host = reindexed(append(seq(1, 7), 8)...)
	l.read(1)
	l.expectPools("a new GPU gets the number", "gpu 2,3,4,5,6,7 gpu.shared 1,8")
	l.cfg.Policy = shareFirst(3)
	l.read(1)
	l.expectPools("an operator wants three", "gpu 3,4,5,6,7 gpu.shared 1,2,8")
	l.cfg.Policy = shareFirst(1)
	l.read(1)
	l.expectPools("an operator wants one", "gpu 2,3,4,5,6,7,8 gpu.shared 1")

	twice := shareFirst(1)
	twice.Shares = append(twice.Shares, twice.Shares[0])
	l = newPolicyFixture(t, twice)
	l.host = reindexed(append([]int{8}, seq(0, 7)...)...)
	for range 2 {
		l.read(1)
		l.expectPools("two equal shares", "gpu 2,3,4,5,6,7,8 gpu.shared 0,1")
	}
}

// The instances of a GPU stay offered when another GPU is partitioned differently.
func TestCommonProfileBinding(t *testing.T) {
	l := newRestartFixture(t, reindexed())
	l.cfg.MIG = inventory.MIGSingle
	l.state = core.NewState(l.cfg)
	cut := func(profiles ...[]string) {
		s := coretest.GPUs(len(profiles))
		for n, p := range profiles {
			s = coretest.WithMIG(s, n, p...)
		}
		l.host = s
		l.read(3)
	}
	big, small := []string{"3g.40gb", "3g.40gb"}, slices.Repeat([]string{"1g.10gb"}, 7)
	cut(big, big)
	l.expectPools("at first", "gpu 0,1")
	cut(small, big)
	l.expectPools("the first GPU has more instances of another profile", "gpu 1")
	l.expectWarnings("the first GPU has more instances of another profile", "MIG strategy single: profile 3g.40gb is bound to")
	cut(small, small)
	l.expectPools("no instance of the profile is left", "gpu 0,1")
	l.expectWarnings("no instance of the profile is left")
}

func TestInstanceIndexBinding(t *testing.T) {
	l := newRestartFixture(t, reindexed())
	l.cfg.Policy = inventory.Policy{Rules: []inventory.Rule{{
		Select:     inventory.Selector{At: "rule", Indices: []gpu.DeviceIndex{{GPU: 0, Instance: 1}}},
		NotOffered: "tests",
	}}}
	l.host = coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb", "1g.10gb", "1g.10gb")
	l.read(1)
	expectOffer(t, l.state.Allocatable, "mig-1g.10gb: 0:0 0:2", "0:1 tests")
	l.host = without(l.host, coretest.Instance(0, 0))
	for i := range l.host.Devices {
		if d := &l.host.Devices[i]; d.Profile != "" {
			d.Instance--
		}
	}
	l.read(3)
	expectOffer(t, l.state.Allocatable, "mig-1g.10gb: 0:2", "0:1 tests")
}

func TestRebindNeedsTheDriver(t *testing.T) {
	l := newPolicyFixture(t, reservedAndShared)
	l.noDriver(gpu.DriverFailed)
	if next, err := l.state.Rebind(l.cfg, l.now); !errors.Is(err, gpu.ErrNoDriver) || !next.Binding.Equal(l.state.Binding) {
		t.Errorf("%v", err)
	}
}

// Whenever GPUs are added and removed: no GPU that takes work changes its pool, and no GPU is offered by two
// agents whose rules divide the host.
func TestBindingInvariants(t *testing.T) {
	for seed := range uint64(100) {
		r := newGenerator(seed)
		nomad := newPolicyFixture(t, reservedAndShared)
		nomad.cfg.Policy.Rules = append([]inventory.Rule{{Select: gpuIndices(0, 1, 2), NotOffered: "for another"}}, nomad.cfg.Policy.Rules...)
		kube := newPolicyFixture(t, inventory.Policy{Rules: []inventory.Rule{{Select: gpuIndices(3, 4, 5, 6, 7, 8, 9, 10, 11), NotOffered: "for another"}}, Shares: shareFirst(1).Shares})
		agents := []*restartFixture{nomad, kube}
		for _, a := range agents {
			a.state = core.Restore(a.cfg, core.Checkpoint{BootID: "a"}, "a")
		}
		there, was := seq(0, 7), [2]map[gpu.DeviceID]string{{}, {}}
		for step := range 60 {
			if n := r.IntN(12); slices.Contains(there, n) {
				there = slices.DeleteFunc(there, func(m int) bool { return m == n })
			} else {
				there = slices.Insert(there, r.IntN(len(there)+1), n)
			}
			for i, a := range agents {
				a.host = reindexed(there...)
				if r.oneIn(4) {
					a.restart("a", "a")
				}
				if r.oneIn(8) {
					a.now = a.now.Add(30 * time.Hour)
				}
				a.state = a.state.WithHost(a.cfg, a.now, inventory.Host{Numbering: agents[1-i].state.Numbering()})
				a.read(2)
			}
			offered := map[gpu.DeviceID]string{}
			for i, a := range agents {
				known := deviceIDs(a.state.Snapshot)
				maps.DeleteFunc(was[i], func(id gpu.DeviceID, _ string) bool { return !slices.Contains(known, id) })
				for u := range a.state.Allocatable.Units() {
					id, as := u.Device.ID, fmt.Sprint(i, u.Pool)
					if u.Health.Reason == health.ReasonWithdrawn {
						continue
					}
					if old, ok := was[i][id]; ok && old != as {
						t.Fatalf("seed %d, step %d: %s was offered as %s, is as %s", seed, step, id, old, as)
					}
					if other, ok := offered[id]; ok && other != as {
						t.Fatalf("seed %d, step %d: %s is offered as %s and as %s", seed, step, id, other, as)
					}
					was[i][id], offered[id] = as, as
				}
			}
		}
	}
}
