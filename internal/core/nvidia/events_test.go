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

// Every event that names a fault is one, at its GPU; those that only say that something changed are hints.
func TestEventKinds(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := armedOn(t, m)
	at := core.WholeGPU(h100ID)
	for kind, want := range map[uint64]core.Observation{
		simdriver.EventDoubleBitECC:          {Kind: core.Event, Code: 0x2},
		simdriver.EventSingleBitECCStorm:     {Kind: core.Event, Code: 0x200},
		simdriver.EventDRAMRetirement:        {Kind: core.Event, Code: 0x400},
		simdriver.EventDRAMRetirementFailure: {Kind: core.Event, Code: 0x800},
		simdriver.EventNonFatalPoison:        {Kind: core.Event, Code: 0x1000},
		simdriver.EventFatalPoison:           {Kind: core.Event, Code: 0x2000},
		simdriver.EventGPUUnavailable:        {Kind: core.Event, Code: 0x4000},
		simdriver.EventRecoveryAction:        {Detail: "event 0x8000"},
		simdriver.EventMIGConfigChange:       {Detail: "event 0x100"},
	} {
		must(t, m.Event(3, kind, 0))
		want.At = at
		if obs, err := s.Wait(10 * time.Second); err != nil || !slices.Equal(obs, []core.Observation{want}) {
			t.Errorf("%#x: %+v, %v", kind, obs, err)
		}
	}
}

// What happens again and again is told once in each wait, and what happens beside it is not lost.
func TestStormIsOneObservation(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	s := armedOn(t, m)
	gpu := core.DeviceID(m.UUID(5))
	must(t, m.Storm(5, 31, drainAtMost), m.Storm(5, 31, 500, simdriver.At{GI: 9, CI: 0}), m.Storm(4, 31, 300), m.XID(5, 95))
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
		{At: core.WholeGPU(gpu), Kind: core.XID, Code: 31}, {At: core.Placement{GPU: gpu, GI: 9, CI: 0}, Kind: core.XID, Code: 31},
		{At: core.WholeGPU(core.DeviceID(m.UUID(4))), Kind: core.XID, Code: 31}, {At: core.WholeGPU(gpu), Kind: core.XID, Code: 95},
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

// A wait that is over early, as it may be at any interrupt, is no error.
func TestEarlyTimeout(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := armedOn(t, m)
	must(t, m.Fail(simdriver.All, "nvmlEventSetWait", "TIMEOUT", 1), m.XID(3, 999))
	if obs, err := s.Wait(10 * time.Second); err != nil || len(obs) > 0 {
		t.Errorf("%+v, %v", obs, err)
	}
	want := core.Observation{At: core.WholeGPU(h100ID), Kind: core.XID, Code: 999}
	if obs, err := s.Wait(10 * time.Second); err != nil || !slices.Equal(obs, []core.Observation{want}) {
		t.Errorf("%+v, %v", obs, err)
	}
}

// A driver that answers GPU_IS_LOST to every wait on a set with a lost GPU costs one wait: the next set is
// without that GPU, which comes back into one when it answers.
func TestLostGPULeavesTheSet(t *testing.T) {
	text, err := simdriver.Text("h100x8")
	must(t, err)
	m := simdriver.StartText(t, strings.Replace(text, "[machine]", "[machine]\nwait_lost_once = no", 1))
	s := armedOn(t, m)
	must(t, m.XID(2, 79), m.Lose(2))
	lost := core.Observation{At: core.WholeGPU(core.DeviceID(m.UUID(2))), Kind: core.XID, Code: 79}
	if obs, err := s.Wait(10 * time.Second); err != nil || !slices.Equal(obs, []core.Observation{lost}) {
		t.Errorf("%+v, %v", obs, err)
	}
	n := counted(t, m, func() {
		if obs, err := s.Wait(10 * time.Second); returned(err) != nvml.ERROR_GPU_IS_LOST {
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
	heard(t, s, core.Observation{At: core.WholeGPU(h100ID), Kind: core.XID, Code: 48})
	must(t, m.Restore(2))
	snapshot(t, s)
	if o := probe(t, s)[lost.At.GPU]; o.Sample.Events != core.Yes {
		t.Errorf("%+v", o)
	}
	must(t, m.XID(2, 62))
	lost.Code = 62
	heard(t, s, lost)
}

// A set that the driver does not take back is offered to it again: with the next check, or with the session's end.
func TestFreeFails(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := armedOn(t, m)
	_, err := s.Wait(0)
	must(t, err)
	before := descriptors(t)
	must(t, m.Fail(simdriver.All, "nvmlEventSetFree", "UNKNOWN", simdriver.Always))
	for range 3 { // each is another set of GPUs to listen to
		for _, change := range []func(int) error{m.Lose, m.Restore} {
			must(t, change(3))
			snapshot(t, s)
			_, err := s.Wait(0)
			must(t, err)
		}
	}
	if kept := descriptors(t); kept <= before {
		t.Fatalf("%d descriptors, before %d: what failed?", kept, before)
	}
	must(t, m.Heal())
	probe(t, s)
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
	must(t, m.XID(3, 62))
	heard(t, s, core.Observation{At: core.WholeGPU(h100ID), Kind: core.XID, Code: 62})
}
