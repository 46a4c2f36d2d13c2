package nvidia

import (
	"fmt"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// eventCounts counts each observation of the Waits until one returns none.
func eventCounts(t *testing.T, s *Session) map[health.Observation]int {
	t.Helper()
	all := map[health.Observation]int{}
	for {
		obs, err := s.Wait(0)
		must(t, err)
		if len(obs) == 0 {
			return all
		}
		for _, o := range obs {
			all[o]++
		}
	}
}

// An event is in each set that exists when it occurs. It is one observation, however many of them the waiter has not taken yet.
func TestEventInTwoSetsIsOneObservation(t *testing.T) {
	for _, sets := range []int{2, 3, 4} {
		t.Run(fmt.Sprint(sets), func(t *testing.T) {
			m, s := start(t, "h100x8", openWithEvents)
			must(t, m.Lose(3))
			for range sets - 1 { // a set lacks the lost GPU, so each snapshot makes another one
				snapshot(t, s)
			}
			must(t, m.XID(1, 109), m.XID(2, 80))
			got := eventCounts(t, s)
			if len(got) != 2 || got[xid(m, 1, 109)] != 1 || got[xid(m, 2, 80)] != 1 {
				t.Errorf("%v", got)
			}
			must(t, m.XID(1, 109))
			if got = eventCounts(t, s); len(got) != 1 || got[xid(m, 1, 109)] != 1 {
				t.Errorf("a later occurrence: %v", got)
			}
		})
	}
}

// More events than one Wait reads are in both sets: what is left in the later one was reported of the earlier one.
//
//	A  1,100 XIDs of GPU 2, one of GPU 1 | two Waits
//	B  1,100 XIDs of GPU 2, one of GPU 1 | ......... taken, and read in two Waits
func TestManyEventsInTwoSetsAreOneObservationEach(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	b, _ := s.makeEventSet() // the reader has not passed it on so far
	must(t, m.Storm(2, 80, maxDrain+76), m.XID(1, 109))
	all := map[health.Observation]int{}
	for range 2 {
		obs, err := s.Wait(0)
		must(t, err)
		for _, o := range obs {
			all[o]++
		}
	}
	if all[xid(m, 1, 109)] != 1 {
		t.Fatalf("before the set is replaced: %v", all)
	}
	s.eventSets.add(b, false)
	if got := eventCounts(t, s); len(got) > 0 {
		t.Errorf("once more: %v", got)
	}
	must(t, m.XID(1, 109))
	if got := eventCounts(t, s); got[xid(m, 1, 109)] != 1 {
		t.Errorf("a later occurrence: %v", got)
	}
}

// An event that a wait returns while the reader makes the next set is in that set too:
//
//	reader  .............. makes B .
//	waiter  waits on A ............ XID ... takes B, which has the XID
func TestEventOfAWaitInProgressIsOneObservation(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	waited := make(chan []health.Observation)
	go func() {
		obs, _ := s.Wait(20 * time.Second)
		waited <- obs
	}()
	eventually(t, func() (gpu.Call, bool) { return s.waiter.current() })
	must(t, m.Add(9, "name = NVIDIA H100 80GB HBM3"))
	snapshot(t, s)
	must(t, m.XID(1, 109))
	all := map[health.Observation]int{}
	for _, o := range <-waited {
		all[o]++
	}
	for o, n := range eventCounts(t, s) {
		all[o] += n
	}
	if n := all[xid(m, 1, 109)]; n != 1 {
		t.Errorf("%d observations of one XID: %v", n, all)
	}
	must(t, m.XID(1, 109))
	if got := eventCounts(t, s); got[xid(m, 1, 109)] != 1 {
		t.Errorf("a later occurrence: %v", got)
	}
}

// An XID in the moment in which another GPU is lost is not missed: the set of which the wait failed has it, and is read once more when
// the next one replaces it.
func TestXIDWhileAnotherGPUIsLost(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	must(t, m.Lose(3))
	if obs, err := s.Wait(10 * time.Second); returnCode(err) != nvml.ERROR_GPU_IS_LOST {
		t.Fatalf("%+v, %v", obs, err)
	}
	must(t, m.XID(1, 109)) // there is no other set yet
	expectEvents(t, s, "an unusable set", 0)
	probe(t, s)
	must(t, m.XID(2, 80)) // both sets have it
	snapshot(t, s)
	if got := eventCounts(t, s); len(got) != 2 || got[xid(m, 1, 109)] != 1 || got[xid(m, 2, 80)] != 1 {
		t.Errorf("%v", got)
	}
}

// An event that is read late may be as old as the time since the last reading: the kernel log may have reported it
// long before.
func TestDelayOfEvents(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	now := time.Unix(0, 0)
	s := openWith(t, m, Options{Now: func() time.Time { return now }})
	now = now.Add(time.Hour)
	snapshot(t, s)
	expectEvents(t, s, "at first", 0)
	must(t, m.XID(1, 109))
	expectEvents(t, s, "in time", 0, xid(m, 1, 109))
	must(t, m.Lose(3))
	if obs, err := s.Wait(time.Second); err == nil {
		t.Fatalf("%+v, %v", obs, err)
	}
	must(t, m.XID(2, 80))
	now = now.Add(time.Minute)
	probe(t, s)
	want := xid(m, 2, 80)
	want.Age.Most = time.Minute
	if obs, err := s.Wait(0); err != nil || len(obs) != 1 || obs[0] != want {
		t.Errorf("after a minute without a set: %+v, %v", obs, err)
	}
	must(t, m.XID(2, 80))
	want.Age.Most = 0
	if obs, err := s.Wait(0); err != nil || len(obs) != 1 || obs[0] != want {
		t.Errorf("then: %+v, %v", obs, err)
	}
}

// An event that is read late from the first set is at most as old as the session.
func TestAgeOfTheFirstEvents(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	now := time.Unix(0, 0)
	s := openWith(t, m, Options{Now: func() time.Time { return now }})
	snapshot(t, s)
	must(t, m.XID(1, 109))
	now = now.Add(time.Minute)
	want := xid(m, 1, 109)
	want.Age.Most = time.Minute
	if obs, err := s.Wait(0); err != nil || len(obs) != 1 || obs[0] != want {
		t.Errorf("%+v, %v", obs, err)
	}
}

// The wait fails while the new set is read for the first time, so that its events are read only when yet another one replaces it:
//
//	old set     XID, read
//	new set     XID, the wait fails          XID, read
//	third set                       created
func TestEventOfASetWhoseFirstReadFailsIsOneObservation(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	b, _ := s.makeEventSet()
	must(t, m.XID(1, 109))
	if got := eventCounts(t, s); got[xid(m, 1, 109)] != 1 {
		t.Fatalf("of the old set: %v", got)
	}
	must(t, m.Fail(simdriver.All, "nvmlEventSetWait", "INVALID_STATE", simdriver.Always))
	s.eventSets.add(b, false)
	if obs, err := s.Wait(0); err == nil {
		t.Fatalf("the wait does not fail: %v", obs)
	}
	must(t, m.Heal(), m.XID(2, 80)) // the new set has it, which is still registered
	probe(t, s)
	if got := eventCounts(t, s); len(got) != 1 || got[xid(m, 2, 80)] != 1 {
		t.Errorf("after the failure: %v", got)
	}
	must(t, m.XID(1, 109))
	if got := eventCounts(t, s); got[xid(m, 1, 109)] != 1 {
		t.Errorf("a later occurrence: %v", got)
	}
}
