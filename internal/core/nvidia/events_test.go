package nvidia

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// An XID is an observation at the instance that the driver reports, another event that names a fault is of kind health.Event at
// its GPU, and any other event is of kind 0.
func TestEvents(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.SetMIG(3, "1g.10gb", "1g.10gb"))
	s := openWithEvents(t, m)
	at := gpu.WholeGPU(h100ID)
	in := func(gi, ci uint32) gpu.Placement { return gpu.Placement{GPU: at.GPU, GI: gi, CI: ci} }
	event := func(kind uint64) func() error { return func() error { return m.Event(3, kind, 0) } }
	for _, c := range []struct {
		raise func() error
		want  health.Observation
	}{
		{func() error { return m.XID(3, 79) }, health.Observation{At: at, Kind: health.XID, Code: 79}},
		// A GPU with failing memory raises thousands of single-bit errors a second: they are not registered.
		{func() error { return errors.Join(m.Event(3, simdriver.EventSingleBitECC, 0), m.XID(3, 48)) }, health.Observation{At: at, Kind: health.XID, Code: 48}},
		{func() error { return m.XID(3, 94, simdriver.At{GI: 9, CI: 0}) }, health.Observation{At: in(9, 0), Kind: health.XID, Code: 94}},
		{func() error { return m.XID(3, 95, simdriver.At{GI: 9, CI: simdriver.WholeInstance}) },
			health.Observation{At: in(9, gpu.Whole), Kind: health.XID, Code: 95}},
		{event(simdriver.EventDoubleBitECC), health.Observation{At: at, Kind: health.Event, Code: 0x2}},
		{event(simdriver.EventSingleBitECCStorm), health.Observation{At: at, Kind: health.Event, Code: 0x200}},
		{event(simdriver.EventDRAMRetirement), health.Observation{At: at, Kind: health.Event, Code: 0x400}},
		{event(simdriver.EventDRAMRetirementFailure), health.Observation{At: at, Kind: health.Event, Code: 0x800}},
		{event(simdriver.EventNonFatalPoison), health.Observation{At: at, Kind: health.Event, Code: 0x1000}},
		{event(simdriver.EventFatalPoison), health.Observation{At: at, Kind: health.Event, Code: 0x2000}},
		{event(simdriver.EventGPUUnavailable), health.Observation{At: at, Kind: health.Event, Code: 0x4000}},
		{event(simdriver.EventRecoveryAction), health.Observation{At: at, Detail: "event 0x8000"}},
		{event(simdriver.EventMIGConfigChange), health.Observation{At: at, Detail: "event 0x100"}},
	} {
		must(t, c.raise())
		expectEvents(t, s, "raised", 10*time.Second, c.want)
	}
}

// A repeated event is one observation per Wait, and no other event is lost.
func TestStormIsOneObservation(t *testing.T) {
	m, s := start(t, "a100-mig", openWithEvents)
	must(t, m.Storm(5, 31, maxDrain), m.Storm(5, 31, 500, simdriver.At{GI: 9, CI: 0}), m.Storm(4, 31, 300), m.XID(5, 95))
	all := map[health.Observation]int{}
	waits := 0
	for ; ; waits++ {
		obs, err := s.Wait(0)
		must(t, err)
		if len(obs) == 0 {
			break
		}
		for _, o := range obs {
			all[o]++
		}
	}
	instance := xid(m, 5, 31)
	instance.At.GI, instance.At.CI = 9, 0
	want := []health.Observation{xid(m, 5, 31), instance, xid(m, 4, 31), xid(m, 5, 95)}
	if len(all) != len(want) || waits != 2 {
		t.Errorf("after %d waits: %+v", waits, all)
	}
	for _, o := range want {
		if n := all[o]; n < 1 || n > waits {
			t.Errorf("%+v: %d times", o, n)
		}
	}
}

// An nvmlEventSetWait that returns TIMEOUT early, as at an interrupt, is no error.
func TestEarlyTimeout(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	must(t, m.Fail(simdriver.All, "nvmlEventSetWait", "TIMEOUT", 1), m.XID(3, 999))
	expectEvents(t, s, "early", 10*time.Second)
	expectEvents(t, s, "then", 10*time.Second, xid(m, 3, 999))
}

// If a driver returns GPU_IS_LOST for every wait on a set with a lost GPU, one Wait fails: the next set is without that GPU,
// and when the GPU answers again, a later set has it.
func TestLostGPULeavesTheSet(t *testing.T) {
	text, err := simdriver.Text("h100x8")
	must(t, err)
	m := simdriver.StartText(t, strings.Replace(text, "[machine]", "[machine]\nwait_lost_once = no", 1))
	s := openWithEvents(t, m)
	must(t, m.XID(2, 79), m.Lose(2))
	lost := wholeGPU(m, 2).GPU
	expectEvents(t, s, "lost", 10*time.Second, xid(m, 2, 79))
	n := counted(t, m, func() {
		if obs, err := s.Wait(10 * time.Second); returnCode(err) != nvml.ERROR_GPU_IS_LOST {
			t.Errorf("%+v, %v", obs, err)
		}
		for range 10 {
			if o := probe(t, s)[lost]; o.Kind != health.Lost {
				t.Errorf("%+v", o)
			}
			expectEvents(t, s, "while it is lost", time.Millisecond)
		}
	})
	if n["nvmlEventSetCreate"] != 1 || n["nvmlEventSetFree"] != 1 || n["nvmlEventSetWait_v2"] > 12 {
		t.Errorf("%v", n)
	}
	must(t, m.XID(3, 48))
	awaitEvent(t, s, xid(m, 3, 48))
	must(t, m.Restore(2))
	snapshot(t, s)
	if o := probe(t, s)[lost]; o.Sample.Events != health.Yes {
		t.Errorf("%+v", o)
	}
	must(t, m.XID(2, 62))
	awaitEvent(t, s, xid(m, 2, 62))
}

// If nvmlEventSetFree fails, it is called again by the next check, or by Close.
func TestFreeFails(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	before := descriptors(t)
	must(t, m.Fail(simdriver.All, "nvmlEventSetFree", "UNKNOWN", simdriver.Always))
	for range 3 { // each creates another event set
		for _, change := range []func(int) error{m.Lose, m.Restore} {
			must(t, change(3))
			snapshot(t, s)
			_, err := s.Wait(0)
			must(t, err)
		}
	}
	if kept := descriptors(t); kept <= before {
		t.Fatalf("%d descriptors, before %d: the failure had no effect", kept, before)
	}
	must(t, m.Heal())
	probe(t, s)
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
	must(t, m.XID(3, 62))
	awaitEvent(t, s, xid(m, 3, 62))
}

func TestWaitReturnsInTime(t *testing.T) {
	_, s := start(t, "h100x8", open)
	for _, when := range []string{"before the first reading", "with an event set", "again"} {
		started := time.Now()
		obs, err := s.Wait(50 * time.Millisecond)
		if took := time.Since(started); len(obs) > 0 || err != nil || took < 40*time.Millisecond || took > 10*time.Second {
			t.Errorf("%s: %+v, %v after %v", when, obs, err, took)
		}
		snapshot(t, s)
		for len(s.eventSets.added) > 0 {
			<-s.eventSets.added
		}
	}
}

// A machine without GPUs has no events until the first GPU is added.
func TestFirstGPUIsRegistered(t *testing.T) {
	m := simdriver.Start(t, "t4")
	must(t, m.Remove(0))
	s := openWithEvents(t, m)
	must(t, m.Add(1, "name = Tesla T4", "events = 0x8"))
	snapshot(t, s)
	must(t, m.XID(1, 48))
	awaitEvent(t, s, xid(m, 1, 48))
}

// Without events Wait only waits, and no other set is created.
func TestNoEvents(t *testing.T) {
	m := simdriver.Start(t, "t4")
	must(t, m.Set(0, "events", "none"))
	s := openWithEvents(t, m)
	for range 3 {
		probe(t, s)
		if expectEvents(t, s, "none", 0); s.eventSets.eventsUnavailable() {
			t.Error("events are unavailable")
		}
	}
	if n := calls(t, m)["nvmlEventSetCreate"]; n != 1 {
		t.Errorf("%d event sets made", n)
	}
}

// A GPU without events, or whose registration fails, does not affect the events of others. That it is registered later is in
// test/health.
func TestRegistrationFails(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	for _, code := range []string{"NOT_SUPPORTED", "UNKNOWN", "GPU_IS_LOST", "IRQ_ISSUE"} {
		must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceRegisterEvents", code, simdriver.Always))
		s := openWithEvents(t, m)
		must(t, m.XID(3, 48), m.XID(4, 48))
		expectEvents(t, s, code, 10*time.Second, xid(m, 4, 48))
		must(t, m.Heal(), s.Close())
	}
}

// The events of a set are read although there is no other set: here, of the only GPU, which is lost.
func TestEventsOfReplacedSet(t *testing.T) {
	m, s := start(t, "t4", open)
	snapshot(t, s)
	must(t, m.XID(0, 79), m.Lose(0))
	snapshot(t, s)
	expectEvents(t, s, "lost", 0, xid(m, 0, 79))
	expectEvents(t, s, "then", 0)
	if s.eventSet.set != nil {
		t.Error("there is still a set")
	}
}
