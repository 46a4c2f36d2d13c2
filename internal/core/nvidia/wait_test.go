package nvidia

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// armedOn makes a session that listens to every GPU of the machine: the reading makes the event set, and
// only what happens after that is heard.
func armedOn(t *testing.T, m *simdriver.Machine) *Session {
	t.Helper()
	s := open(t, m)
	snapshot(t, s)
	return s
}

func TestEvents(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	s := armedOn(t, m)
	gpu := core.DeviceID(m.UUID(5))
	for _, c := range []struct {
		name  string
		raise func() error
		want  core.Observation
	}{
		{"not attributable", func() error { return m.XID(5, 79) },
			core.Observation{At: core.WholeGPU(gpu), Kind: core.XID, Code: 79}},
		{"compute instance", func() error { return m.XID(5, 94, simdriver.At{GI: 9, CI: 0}) },
			core.Observation{At: core.Placement{GPU: gpu, GI: 9, CI: 0}, Kind: core.XID, Code: 94}},
		{"GPU instance", func() error { return m.XID(5, 95, simdriver.At{GI: 9, CI: simdriver.WholeInstance}) },
			core.Observation{At: core.Placement{GPU: gpu, GI: 9, CI: core.Whole}, Kind: core.XID, Code: 95}},
		{"MIG layout", func() error { return m.Event(5, simdriver.EventMIGConfigChange, 0) },
			core.Observation{At: core.WholeGPU(gpu), Detail: "event 0x100"}},
		{"double-bit ECC", func() error { return m.Event(5, simdriver.EventDoubleBitECC, 0) },
			core.Observation{At: core.WholeGPU(gpu), Kind: core.Event, Code: 0x2}},
	} {
		must(t, c.raise())
		obs, err := s.Wait(10 * time.Second)
		if err != nil || !slices.Equal(obs, []core.Observation{c.want}) {
			t.Errorf("%s: %+v, %v, want %+v", c.name, obs, err, c.want)
		}
	}
}

// A weak GPU raises thousands of single-bit errors a second: they are not registered.
func TestFloodsAreNotHeard(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := armedOn(t, m)
	must(t, m.Event(0, simdriver.EventSingleBitECC, 0), m.XID(0, 48))
	if obs, err := s.Wait(10 * time.Second); err != nil || len(obs) != 1 || obs[0].Code != 48 {
		t.Errorf("%+v, %v", obs, err)
	}
}

func TestWaitReturnsInTime(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := open(t, m)
	for _, when := range []string{"before the first reading", "with an event set", "again"} {
		started := time.Now()
		obs, err := s.Wait(50 * time.Millisecond)
		if took := time.Since(started); len(obs) > 0 || err != nil || took < 40*time.Millisecond || took > 10*time.Second {
			t.Errorf("%s: %+v, %v after %v", when, obs, err, took)
		}
		snapshot(t, s)
		for len(s.ears.arrive) > 0 {
			<-s.ears.arrive
		}
	}
}

// A machine may have no GPU yet: that is nothing to wait for, but no reason to give up either.
func TestFirstGPUWakesTheWaiter(t *testing.T) {
	m := simdriver.Start(t, "t4")
	must(t, m.Remove(0))
	s := open(t, m)
	snapshot(t, s)
	if _, err := s.Wait(0); err != nil {
		t.Fatal(err)
	}
	must(t, m.Add(1, "name = Tesla T4", "events = 0x8"))
	snapshot(t, s)
	must(t, m.XID(1, 48))
	obs := eventually(t, func() ([]core.Observation, bool) {
		obs, err := s.Wait(time.Second)
		must(t, err)
		return obs, len(obs) > 0
	})
	if want := (core.Observation{At: core.WholeGPU(core.DeviceID(m.UUID(1))), Kind: core.XID, Code: 48}); obs[0] != want {
		t.Errorf("%+v", obs)
	}
}

// Without events there is nothing to wait for, and nothing to try again.
func TestNoEvents(t *testing.T) {
	m := simdriver.Start(t, "t4")
	must(t, m.Set(0, "events", "none"))
	s := armedOn(t, m)
	for range 3 {
		if obs, err := s.Wait(0); len(obs) > 0 || err != nil || s.ears.areDeaf() {
			t.Error(obs, err)
		}
		if _, err := s.Probe(); err != nil {
			t.Error(err)
		}
	}
	calls, err := m.Calls()
	if must(t, err); calls["nvmlEventSetCreate"] != 1 {
		t.Errorf("%d event sets made", calls["nvmlEventSetCreate"])
	}
}

// One GPU without events, or that refuses to be registered, does not make the others mute.
func TestPartialEvents(t *testing.T) {
	for _, code := range []string{"NOT_SUPPORTED", "UNKNOWN", "GPU_IS_LOST", "IRQ_ISSUE"} {
		m := simdriver.Start(t, "h100x8")
		must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceRegisterEvents", code, simdriver.Always))
		s := armedOn(t, m)
		must(t, m.XID(3, 48), m.XID(4, 48))
		obs, err := s.Wait(10 * time.Second)
		if err != nil || len(obs) != 1 || obs[0].At != core.WholeGPU(core.DeviceID(m.UUID(4))) {
			t.Errorf("%s: %+v, %v", code, obs, err)
		}
		must(t, s.Close())
	}
	m := simdriver.Start(t, "t4")
	must(t, m.Fail(simdriver.GPU(0), "nvmlDeviceRegisterEvents", "UNKNOWN", 1))
	s := armedOn(t, m)
	if _, err := s.Probe(); err != nil { // tries again
		t.Fatal(err)
	}
	must(t, m.XID(0, 48))
	if obs, err := s.Wait(10 * time.Second); err != nil || len(obs) != 1 {
		t.Errorf("the next time: %+v, %v", obs, err)
	}
}

// A broken wait is an error at once; the probe that follows makes a new event set.
func TestWaitFailsAndStartsOver(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := armedOn(t, m)
	for _, code := range []string{"GPU_IS_LOST", "UNKNOWN"} {
		must(t, m.Fail(simdriver.All, "nvmlEventSetWait", code, 1))
		if obs, err := s.Wait(10 * time.Second); err == nil {
			t.Errorf("%s: %+v, %v", code, obs, err)
		}
		if _, err := s.Probe(); err != nil {
			t.Error(err)
		}
		must(t, m.XID(2, 62)) // while the caller pauses
		if obs, err := s.Wait(10 * time.Second); err != nil || len(obs) != 1 {
			t.Errorf("after %s: %+v, %v", code, obs, err)
		}
	}
}

// The set follows the GPUs: one that was lost is heard again once it is back.
func TestSetFollowsTheGPUs(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := armedOn(t, m)
	must(t, m.XID(4, 48), m.Lose(3))
	snapshot(t, s)
	obs, err := s.Wait(0) // the new set was made; the old one still held this
	if err != nil || len(obs) == 0 || obs[0].At != core.WholeGPU(core.DeviceID(m.UUID(4))) {
		t.Errorf("%+v, %v", obs, err)
	}
	eventually(t, func() (int, bool) { // NVML may first report the loss
		_, err := s.Wait(0)
		return len(s.armed.gpus), err == nil && len(s.armed.gpus) == 7
	})
	must(t, m.Restore(3))
	snapshot(t, s)
	eventually(t, func() (int, bool) {
		_, err := s.Wait(0)
		return len(s.armed.gpus), err == nil && len(s.armed.gpus) == 8
	})
	must(t, m.XID(3, 48))
	obs, err = s.Wait(10 * time.Second)
	if err != nil || len(obs) != 1 || obs[0].At != core.WholeGPU(h100ID) {
		t.Errorf("%+v, %v", obs, err)
	}
}

func TestReopen(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	var first core.Snapshot
	for i := range 3 {
		s := armedOn(t, m)
		snap := snapshot(t, s)
		if i == 0 {
			first = snap
		}
		if !snap.Equal(first) {
			t.Errorf("open %d differs", i+1)
		}
		must(t, s.Close(), s.Close())
	}
}

// The last words of the only GPU are heard: the set is emptied although there is no other to make.
func TestLastWords(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := armedOn(t, m)
	must(t, m.XID(0, 79), m.Lose(0))
	snapshot(t, s)
	want := core.Observation{At: core.WholeGPU(core.DeviceID(m.UUID(0))), Kind: core.XID, Code: 79}
	if obs, err := s.Wait(0); err != nil || !slices.Equal(obs, []core.Observation{want}) {
		t.Errorf("%+v, %v", obs, err)
	}
	if obs, err := s.Wait(0); err != nil || len(obs) > 0 || s.armed.set != nil {
		t.Errorf("then: %+v, %v", obs, err)
	}
}
