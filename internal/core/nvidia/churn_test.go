package nvidia

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// slotsOf are the slots of the GPUs in a snapshot, of those in all.
func slotsOf(snap gpu.Snapshot, all map[gpu.DeviceID]int) (slots []int) {
	for _, d := range snap.Devices {
		if slot, ok := all[d.ID]; ok && d.At.GI == gpu.Whole {
			slots = append(slots, slot)
		}
	}
	slices.Sort(slots)
	return slots
}

// expectSlots makes a Snapshot, which must have the GPUs in these slots, and as many exclusions.
func expectSlots(t testing.TB, s *Session, when string, all map[gpu.DeviceID]int, excluded int, want ...int) gpu.Snapshot {
	t.Helper()
	snap := snapshot(t, s)
	if got := slotsOf(snap, all); !slices.Equal(got, want) || len(snap.Excluded) != excluded {
		t.Errorf("%s: GPUs %v, want %v; excluded %+v, want %d", when, got, want, snap.Excluded, excluded)
	}
	return snap
}

// h100x8 is a machine with eight GPUs, and the slots of its GPUs.
func h100x8(t testing.TB) (*simdriver.Machine, map[gpu.DeviceID]int) {
	t.Helper()
	m := simdriver.Start(t, "h100x8")
	slots := map[gpu.DeviceID]int{}
	for slot := range 8 {
		slots[gpu.DeviceID(m.UUID(slot))] = slot
	}
	return m, slots
}

// A GPU hangs and another one is removed, so that indices change: no second call is made about the one that hangs, the others
// are checked, and the removed one is lost in the next Snapshot.
func TestRemovalWhileAnotherGPUHangs(t *testing.T) {
	for _, call := range []string{
		"*", "nvmlDeviceGetUUID", "nvmlDeviceGetIndex", "nvmlDeviceGetFieldValues", "nvmlDeviceGetCurrPcieLinkGeneration",
	} {
		t.Run(call, func(t *testing.T) {
			m, slots := h100x8(t)
			s := openShortDeadline(t, m)
			first := snapshot(t, s)
			must(t, m.Hang(simdriver.GPU(5), call))
			probe(t, s)
			snapshot(t, s)
			removed, hung := gpu.DeviceID(m.UUID(2)), gpu.DeviceID(m.UUID(5))
			must(t, m.Remove(2))
			lost := gpu.Exclusion{
				Index: 2, At: gpu.WholeGPU(removed), PCI: first.Devices[2].PCI, Failure: gpu.FailureLost, Reason: "not listed by the driver",
			}
			if snap := snapshot(t, s); !slices.Contains(snap.Excluded, lost) {
				t.Errorf("excluded %+v", snap.Excluded)
			}
			for range 2 {
				must(t, m.Lose(6))
				obs := probe(t, s)
				for id, slot := range slots {
					want := map[int]health.ObservationKind{2: 0, 5: health.CallPending, 6: health.Lost}
					kind, special := want[slot]
					if got := obs[id].Kind; special && got != kind || !special && got != health.Checked {
						t.Errorf("GPU %d: %+v", slot, obs[id])
					}
				}
				must(t, m.Restore(6))
				expectSlots(t, s, "hangs", slots, 1, 0, 1, 3, 4, 6, 7)
			}
			if busy := s.Busy(); len(busy) != 1 || busy[0].At.GPU != hung {
				t.Errorf("busy: %+v", busy)
			}
			must(t, m.Heal())
			waitUntilIdle(t, s)
			expectSlots(t, s, "healed", slots, 0, 0, 1, 3, 4, 5, 6, 7)
		})
	}
}

// The lookup of a GPU that is not identified yet hangs. Others are added and removed, and the index that it then has is not
// looked up.
func TestRemovalWhileALookupHangs(t *testing.T) {
	for _, call := range []string{"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo"} {
		t.Run(call, func(t *testing.T) {
			m, slots := h100x8(t)
			must(t, m.Hang(simdriver.GPU(4), call))
			s := openShortDeadline(t, m)
			expectHang := func(what string, index int, want ...int) {
				t.Helper()
				pending := gpu.Exclusion{Index: index, At: gpu.Node, Failure: gpu.FailurePending, Reason: "the driver does not answer (" + call + ")"}
				fastest := time.Hour // of those after the first, which waits for the call that hangs
				for n := range 4 {
					began := time.Now()
					snap := snapshot(t, s)
					got := slotsOf(snap, slots)
					hangs := slices.ContainsFunc(snap.Excluded, func(e gpu.Exclusion) bool {
						pending.At = e.At // call may be made when the UUID is known
						return e == pending && (e.At == gpu.Node) == (call != "nvmlDeviceGetPciInfo")
					})
					if !slices.Equal(got, want) || !hangs || len(snap.Links) != len(want)*(len(want)-1)/2 {
						t.Errorf("%s: GPUs %v, want %v, %d links, excluded %+v", what, got, want, len(snap.Links), snap.Excluded)
					}
					if n > 0 {
						fastest = min(fastest, time.Since(began))
					}
				}
				if fastest > testDeadline {
					t.Errorf("%s: each further Snapshot took %v or more", what, fastest)
				}
				if busy := s.Busy(); len(busy) != 1 || busy[0].Name != call {
					t.Errorf("%s: busy: %+v", what, busy)
				}
			}
			expectHang("no change", 4, 0, 1, 2, 3, 5, 6, 7)
			must(t, m.Remove(0))
			expectHang("removed", 3, 1, 2, 3, 5, 6, 7)
			must(t, m.Add(8))
			slots[gpu.DeviceID(m.UUID(8))] = 8
			expectHang("added", 3, 1, 2, 3, 5, 6, 7, 8)
			must(t, m.Remove(3), m.Remove(1), m.Add(9))
			slots[gpu.DeviceID(m.UUID(9))] = 9
			expectHang("more changes", 1, 2, 5, 6, 7, 8, 9)
			must(t, m.Heal())
			waitUntilIdle(t, s)
			expectSlots(t, s, "healed", slots, 0, 2, 4, 5, 6, 7, 8, 9)
		})
	}
}

// While the GPU that hangs may be at either of two indices, neither is looked up; the other GPUs are read.
func TestNoLookupWhereAGPUMayHang(t *testing.T) {
	m, slots := h100x8(t)
	s := openShortDeadline(t, m)
	snapshot(t, s)
	must(t, m.Hang(simdriver.GPU(7), "nvmlDeviceGetUUID"))
	probe(t, s)
	must(t, m.Remove(6), m.Add(8))
	slots[gpu.DeviceID(m.UUID(8))] = 8
	before := calls(t, m)["nvmlDeviceGetHandleByIndex_v2"]
	for range 2 {
		snap := snapshot(t, s)
		if got := slotsOf(snap, slots); !slices.Equal(got, []int{0, 1, 2, 3, 4, 5}) {
			t.Errorf("GPUs %v, excluded %+v", got, snap.Excluded)
		}
		nameless := slices.ContainsFunc(snap.Excluded, func(e gpu.Exclusion) bool { return e.At == gpu.Node && e.Failure == gpu.FailurePending })
		if !nameless {
			t.Errorf("no exclusion of an unidentified GPU: %+v", snap.Excluded)
		}
	}
	if n := calls(t, m)["nvmlDeviceGetHandleByIndex_v2"] - before; n > 0 {
		t.Errorf("%d lookups", n)
	}
	must(t, m.Heal())
	waitUntilIdle(t, s)
	expectSlots(t, s, "healed", slots, 0, 0, 1, 2, 3, 4, 5, 7, 8)
}

// A GPU is removed or replaced during a Snapshot: no other GPU is missing from it.
func TestRemovalDuringSnapshot(t *testing.T) {
	for _, known := range []bool{true, false} {
		for _, replaced := range []bool{true, false} {
			m, slots := h100x8(t)
			s := open(t, m)
			call, counted := "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2"
			if known {
				snapshot(t, s)
				call, counted = "nvmlDeviceGetIndex", "nvmlDeviceGetIndex"
			}
			before := calls(t, m)[counted]
			must(t, m.Slow(simdriver.GPU(1), call, 200*time.Millisecond))
			read := make(chan gpu.Snapshot)
			go func() {
				snap, err := s.Snapshot()
				if err != nil {
					t.Error(err)
				}
				read <- snap
			}()
			eventually(t, func() (uint64, bool) { n := calls(t, m)[counted] - before; return n, n >= 2 })
			must(t, m.Remove(0))
			if replaced {
				must(t, m.Add(0))
			}
			snap := <-read
			got := slotsOf(snap, slots)
			if got = slices.DeleteFunc(got, func(slot int) bool { return slot == 0 }); !slices.Equal(got, []int{1, 2, 3, 4, 5, 6, 7}) {
				t.Errorf("known %v, replaced %v: GPUs %v, excluded %+v", known, replaced, got, snap.Excluded)
			}
			must(t, m.Heal())
			want := 7
			if replaced {
				want++
			}
			snapshot(t, s) // on a slow node, only this one shows the change
			expectSnapshot(t, s, fmt.Sprintf("known %v, replaced %v: then", known, replaced), want)
			must(t, s.Close())
		}
	}
}

// Another GPU is in the slot of a removed one: the removed one is not lost.
func TestReplacementInSlot(t *testing.T) {
	m, slots := h100x8(t)
	s := open(t, m)
	before := snapshot(t, s)
	pci, err := m.Get(3, "pci")
	must(t, err, m.Remove(3), m.Add(3, "pci = "+pci))
	snap := expectSnapshot(t, s, "replaced", 8)
	if n := len(slotsOf(snap, slots)); n != 7 {
		t.Errorf("%d of the GPUs before", n)
	}
	if kept, _ := core.Reconcile(before, snap); len(kept.Devices) != 8 {
		t.Errorf("%d devices", len(kept.Devices))
	}
}

// GPUs are added and removed all the time: no Snapshot lacks one that stays. One that does not become stable reports that,
// and Wait reports it too.
func TestUnstableEnumeration(t *testing.T) {
	m, slots := h100x8(t)
	s := openShortDeadline(t, m)
	snapshot(t, s)
	expectEvents(t, s, "at first", 0)
	must(t, m.Slow(simdriver.All, "nvmlDeviceGetIndex", 5*time.Millisecond))
	stop := make(chan struct{})
	var changing sync.WaitGroup
	changing.Go(func() {
		for slot := 8; ; slot++ {
			select {
			case <-stop:
				return
			default:
				if err := m.Add(slot); err != nil {
					t.Error(err)
				}
				if err := m.Remove(slot); err != nil {
					t.Error(err)
				}
			}
		}
	})
	eventually(t, func() ([]gpu.Exclusion, bool) {
		snap := snapshot(t, s)
		if got := slotsOf(snap, slots); len(got) != 8 {
			t.Errorf("GPUs %v, excluded %+v", got, snap.Excluded)
		}
		return snap.Excluded, slices.ContainsFunc(snap.Excluded, func(e gpu.Exclusion) bool { return e.Reason == enumerationUnstable })
	})
	awaitEvent(t, s, health.Observation{At: gpu.Node, Detail: enumerationUnstable})
	close(stop)
	changing.Wait()
	must(t, m.Heal())
	if snap := snapshot(t, s); len(snap.Devices) != 8 || slices.ContainsFunc(snap.Excluded, func(e gpu.Exclusion) bool {
		return !strings.Contains(e.Reason, "not listed")
	}) {
		t.Errorf("%d devices, excluded %+v", len(snap.Devices), snap.Excluded)
	}
	expectSnapshot(t, s, "stable", 8)
	eventCounts(t, s) // ends
}
