package nvidia

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// An XID is an observation at the instance that the driver reports, another event that names a fault is of kind core.Event at
// its GPU, and any other event is of kind 0.
func TestEvents(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.SetMIG(3, "1g.10gb", "1g.10gb"))
	s := openWithEvents(t, m)
	at := core.WholeGPU(h100ID)
	in := func(gi, ci uint32) core.Placement { return core.Placement{GPU: at.GPU, GI: gi, CI: ci} }
	event := func(kind uint64) func() error { return func() error { return m.Event(3, kind, 0) } }
	for _, c := range []struct {
		raise func() error
		want  core.Observation
	}{
		{func() error { return m.XID(3, 79) }, core.Observation{At: at, Kind: core.XID, Code: 79}},
		{func() error { return m.XID(3, 94, simdriver.At{GI: 9, CI: 0}) }, core.Observation{At: in(9, 0), Kind: core.XID, Code: 94}},
		{func() error { return m.XID(3, 95, simdriver.At{GI: 9, CI: simdriver.WholeInstance}) },
			core.Observation{At: in(9, core.Whole), Kind: core.XID, Code: 95}},
		{event(simdriver.EventDoubleBitECC), core.Observation{At: at, Kind: core.Event, Code: 0x2}},
		{event(simdriver.EventSingleBitECCStorm), core.Observation{At: at, Kind: core.Event, Code: 0x200}},
		{event(simdriver.EventDRAMRetirement), core.Observation{At: at, Kind: core.Event, Code: 0x400}},
		{event(simdriver.EventDRAMRetirementFailure), core.Observation{At: at, Kind: core.Event, Code: 0x800}},
		{event(simdriver.EventNonFatalPoison), core.Observation{At: at, Kind: core.Event, Code: 0x1000}},
		{event(simdriver.EventFatalPoison), core.Observation{At: at, Kind: core.Event, Code: 0x2000}},
		{event(simdriver.EventGPUUnavailable), core.Observation{At: at, Kind: core.Event, Code: 0x4000}},
		{event(simdriver.EventRecoveryAction), core.Observation{At: at, Detail: "event 0x8000"}},
		{event(simdriver.EventMIGConfigChange), core.Observation{At: at, Detail: "event 0x100"}},
	} {
		must(t, c.raise())
		if obs, err := s.Wait(10 * time.Second); err != nil || !slices.Equal(obs, []core.Observation{c.want}) {
			t.Errorf("%+v, %v, want %+v", obs, err, c.want)
		}
	}
}

// A repeated event is one observation per Wait, and no other event is lost.
func TestStormIsOneObservation(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	s := openWithEvents(t, m)
	id := core.DeviceID(m.UUID(5))
	must(t, m.Storm(5, 31, maxDrain), m.Storm(5, 31, 500, simdriver.At{GI: 9, CI: 0}), m.Storm(4, 31, 300), m.XID(5, 95))
	all := map[core.Observation]int{}
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
	want := []core.Observation{
		{At: core.WholeGPU(id), Kind: core.XID, Code: 31}, {At: core.Placement{GPU: id, GI: 9, CI: 0}, Kind: core.XID, Code: 31},
		{At: core.WholeGPU(core.DeviceID(m.UUID(4))), Kind: core.XID, Code: 31}, {At: core.WholeGPU(id), Kind: core.XID, Code: 95},
	}
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
	m := simdriver.Start(t, "h100x8")
	s := openWithEvents(t, m)
	must(t, m.Fail(simdriver.All, "nvmlEventSetWait", "TIMEOUT", 1), m.XID(3, 999))
	if obs, err := s.Wait(10 * time.Second); err != nil || len(obs) > 0 {
		t.Errorf("%+v, %v", obs, err)
	}
	want := core.Observation{At: core.WholeGPU(h100ID), Kind: core.XID, Code: 999}
	if obs, err := s.Wait(10 * time.Second); err != nil || !slices.Equal(obs, []core.Observation{want}) {
		t.Errorf("%+v, %v", obs, err)
	}
}

// If a driver returns GPU_IS_LOST for every wait on a set with a lost GPU, one Wait fails: the next set is without that GPU,
// and when the GPU answers again, a later set has it.
func TestLostGPULeavesTheSet(t *testing.T) {
	text, err := simdriver.Text("h100x8")
	must(t, err)
	m := simdriver.StartText(t, strings.Replace(text, "[machine]", "[machine]\nwait_lost_once = no", 1))
	s := openWithEvents(t, m)
	must(t, m.XID(2, 79), m.Lose(2))
	lost := core.Observation{At: core.WholeGPU(core.DeviceID(m.UUID(2))), Kind: core.XID, Code: 79}
	if obs, err := s.Wait(10 * time.Second); err != nil || !slices.Equal(obs, []core.Observation{lost}) {
		t.Errorf("%+v, %v", obs, err)
	}
	n := counted(t, m, func() {
		if obs, err := s.Wait(10 * time.Second); returnCode(err) != nvml.ERROR_GPU_IS_LOST {
			t.Errorf("%+v, %v", obs, err)
		}
		for range 10 {
			if o := probe(t, s)[lost.At.GPU]; o.Kind != core.Lost {
				t.Errorf("%+v", o)
			}
			if obs, err := s.Wait(time.Millisecond); err != nil || len(obs) > 0 {
				t.Errorf("%+v, %v", obs, err)
			}
		}
	})
	if n["nvmlEventSetCreate"] != 1 || n["nvmlEventSetFree"] != 1 || n["nvmlEventSetWait_v2"] > 11 {
		t.Errorf("%v", n)
	}
	must(t, m.XID(3, 48))
	awaitEvent(t, s, core.Observation{At: core.WholeGPU(h100ID), Kind: core.XID, Code: 48})
	must(t, m.Restore(2))
	snapshot(t, s)
	if o := probe(t, s)[lost.At.GPU]; o.Sample.Events != core.Yes {
		t.Errorf("%+v", o)
	}
	must(t, m.XID(2, 62))
	lost.Code = 62
	awaitEvent(t, s, lost)
}

// If nvmlEventSetFree fails, it is called again by the next check, or by Close.
func TestFreeFails(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWithEvents(t, m)
	_, err := s.Wait(0)
	must(t, err)
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
	awaitEvent(t, s, core.Observation{At: core.WholeGPU(h100ID), Kind: core.XID, Code: 62})
}
