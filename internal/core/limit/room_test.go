package limit_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
)

// reloads is a node with a GPU of 80 GiB whose work is given shares of it, while policies with other shares follow one another.
type reloads struct {
	cfg    core.Config
	inv    *inventory.Allocatable
	saved  limit.Saved
	table  limit.Table
	known  *inventory.Limits // by the latest reading
	record holders.Record
	began  map[string]uint64 // the limits of the work that runs, by its ID
	next   int
}

// offer has a policy with a number of shares of a size. What is known of limits is of the policy before.
func (r *reloads) offer(replicas int, memory uint64, mode inventory.LimitMode, overcommit bool) {
	r.cfg.Policy = inventory.Policy{
		Limits: inventory.LimitPolicy{On: true, Reserve: gib, Overcommit: overcommit},
		Rules:  []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: replicas, Memory: memory, Limit: mode}}},
	}
	r.host(r.known)
}

// host has the inventory follow from the policy and from what is known of limits.
func (r *reloads) host(l *inventory.Limits) {
	id := coretest.GPU(0)
	cdi := inventory.CDI{Kind: "k/gpu", LimitKind: "k/memory-limit", Defined: []gpu.DeviceID{id}, Usable: true}
	inv := core.Build(coretest.GPUs(1), health.Ledger{}, r.cfg)
	cdi.Limits = inv.WithoutHost().HookLimits()
	r.inv = inv.WithHost(inventory.Host{CDI: &cdi, Limits: l}, r.cfg.Overlap)
}

// pass makes a reading, in which no group of the work is known, and has the inventory follow.
func (r *reloads) pass(complete bool) {
	result := limit.Next(r.saved, r.table, limit.Reading{
		At: time.Unix(1, 0), Boot: "b", Node: limit.Node{Backend: limit.Misc}, Shares: limit.Holdings(r.record, r.inv), HoldersKnown: complete,
		GPUs: map[gpu.DeviceID]limit.GPU{coretest.GPU(0): {Memory: 80 * gib}},
	})
	r.saved, r.table = result.Saved, result.Table
	r.known = limit.Support{Node: limit.Node{Backend: limit.Misc}, Tried: map[gpu.DeviceID]string{coretest.GPU(0): ""}, Given: r.table.Given}.Limits(r.inv)
	r.host(r.known)
}

// free returns the units that an orchestrator gives out.
func (r *reloads) free() (all []inventory.UnitID) {
	for u := range r.inv.Units() {
		held := slices.ContainsFunc(r.record.Holders, func(h holders.Holder) bool { return h.Unit == u.ID })
		if u.Health.Schedulable() && !held {
			all = append(all, u.ID)
		}
	}
	return all
}

// place gives a unit to new work, and reports whether the agent agrees.
func (r *reloads) place(unit inventory.UnitID) bool {
	plan, err := r.inv.Reserve(unit)
	if err != nil {
		return false
	}
	r.next++
	w := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "train", Container: "main", ID: fmt.Sprint(r.next)}
	r.record.Holders = append(r.record.Holders, holders.Holder{Work: w, API: r.cfg.API, Unit: unit, Device: coretest.GPU(0), Memory: plan.Memory})
	r.began[w.ID] = plan.Memory
	return true
}

// end ends the work that has a unit.
func (r *reloads) end(i int) {
	delete(r.began, r.record.Holders[i].Work.ID)
	r.record.Holders = slices.Delete(slices.Clone(r.record.Holders), i, i+1)
}

func newReloads() *reloads {
	r := &reloads{cfg: core.DefaultConfig(), began: map[string]uint64{}}
	r.cfg.API, r.cfg.Injection = inventory.DevicePlugin, inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired}
	return r
}

// Four shares of 19 GiB, of which work has the last two, then two of 39 GiB: beside the work one of these fits, and the other one does when the work has ended. Nothing is given out
// between the policy and the next reading.
func TestRoom(t *testing.T) {
	r := newReloads()
	unit := func(n int) inventory.UnitID { return inventory.UnitID(fmt.Sprintf("%s::%d", coretest.GPU(0), n)) }
	r.offer(4, 19*gib, inventory.LimitRequired, false)
	r.pass(true)
	if !r.place(unit(2)) || !r.place(unit(3)) {
		t.Fatal("not given out")
	}
	r.pass(true)
	r.offer(2, 39*gib, inventory.LimitRequired, false)
	if all := r.free(); len(all) > 0 || !r.inv.AwaitsFirstPass() || r.place(unit(0)) {
		t.Errorf("before the reading: %q", all)
	}
	for _, complete := range []bool{true, false} { // what is known stays while the record can't be read
		r.pass(complete)
		if all := r.free(); !slices.Equal(all, []inventory.UnitID{unit(0)}) {
			t.Errorf("complete: %t: %q", complete, all)
		}
		u, _ := r.inv.Unit(unit(1))
		const want = "the limits of running work are 38912 of 80535 MiB: some of it began by a policy with other shares"
		if u.Health.Reason != health.ReasonHeld || u.Health.Detail != want || r.place(unit(1)) {
			t.Errorf("complete: %t: %s", complete, u.Health)
		}
	}
	r.end(0)
	r.pass(true)
	if all := r.free(); len(all) != 1 {
		t.Errorf("one has ended: %q", all)
	}
	r.end(0)
	r.pass(true)
	if all := r.free(); len(all) != 2 {
		t.Errorf("all have ended: %q", all)
	}
}

// Shares that may have no limit, or more together than the GPU has, are all given out.
func TestRoomIsNotWanted(t *testing.T) {
	for name, c := range map[string]struct {
		mode       inventory.LimitMode
		overcommit bool
	}{"best effort": {inventory.LimitBestEffort, false}, "overcommit": {inventory.LimitRequired, true}} {
		r := newReloads()
		r.offer(4, 19*gib, inventory.LimitRequired, false)
		r.pass(true)
		r.place(inventory.UnitID(coretest.GPU(0)) + "::3")
		r.pass(true)
		r.offer(2, 39*gib, c.mode, c.overcommit)
		r.pass(true)
		if all := r.free(); len(all) != 2 {
			t.Errorf("%s: %q", name, all)
		}
	}
}

// 20 policies one after another, with random work: the limits of live work and the reserve never exceed the GPU, and when all work has ended every share is given out again.
func TestRoomOfRandomPolicies(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	placed, withheld := 0, 0
	for range 50 {
		r := newReloads()
		for range 20 {
			n := 2 + random.IntN(6)
			r.offer(n, uint64(1+random.IntN(79/n))*gib, inventory.LimitRequired, false)
			for range 8 {
				if random.IntN(4) > 0 {
					r.pass(random.IntN(4) > 0)
				}
				if all := r.free(); len(all) > 0 && random.IntN(2) == 0 && r.place(all[random.IntN(len(all))]) {
					placed++
				}
				if len(r.record.Holders) > 0 && random.IntN(5) == 0 {
					r.end(random.IntN(len(r.record.Holders)))
				}
				for u := range r.inv.Units() {
					if u.Health.Reason == health.ReasonHeld {
						withheld++
					}
				}
				sum := gib
				for _, limit := range r.began {
					sum += limit
				}
				if sum > coretest.GPUs(1).Devices[0].Memory {
					t.Fatalf("seed %d: the limits of %v are more than the GPU has", seed, r.began)
				}
			}
		}
		r.record, r.began = holders.Record{}, map[string]uint64{}
		r.pass(true)
		if all := r.free(); len(all) != r.inv.Len() {
			t.Fatalf("seed %d: nothing runs, and only %q are given out", seed, all)
		}
	}
	if placed < 500 || withheld < 100 {
		t.Errorf("%d placed, %d withheld", placed, withheld)
	}
}
