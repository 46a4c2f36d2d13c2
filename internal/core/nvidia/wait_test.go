package nvidia

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A GPU with failing memory raises thousands of single-bit errors a second: they are not registered.
func TestSingleBitErrorsAreNotRegistered(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWithEvents(t, m)
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
		for len(s.eventSets.added) > 0 {
			<-s.eventSets.added
		}
	}
}

// A machine without GPUs has no events until the first GPU is added.
func TestFirstGPUIsRegistered(t *testing.T) {
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
	obs := eventually(t, func() ([]health.Observation, bool) {
		obs, err := s.Wait(time.Second)
		must(t, err)
		return obs, len(obs) > 0
	})
	if want := (health.Observation{At: gpu.WholeGPU(gpu.DeviceID(m.UUID(1))), Kind: health.XID, Code: 48}); obs[0] != want {
		t.Errorf("%+v", obs)
	}
}

// Without events Wait only waits, and no other set is created.
func TestNoEvents(t *testing.T) {
	m := simdriver.Start(t, "t4")
	must(t, m.Set(0, "events", "none"))
	s := openWithEvents(t, m)
	for range 3 {
		if obs, err := s.Wait(0); len(obs) > 0 || err != nil || s.eventSets.eventsUnavailable() {
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

// A GPU without events, or whose registration fails, does not affect the events of others. That it is registered later is in
// test/health (case 19).
func TestRegistrationFails(t *testing.T) {
	for _, code := range []string{"NOT_SUPPORTED", "UNKNOWN", "GPU_IS_LOST", "IRQ_ISSUE"} {
		m := simdriver.Start(t, "h100x8")
		must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceRegisterEvents", code, simdriver.Always))
		s := openWithEvents(t, m)
		must(t, m.XID(3, 48), m.XID(4, 48))
		obs, err := s.Wait(10 * time.Second)
		if err != nil || len(obs) != 1 || obs[0].At != gpu.WholeGPU(gpu.DeviceID(m.UUID(4))) {
			t.Errorf("%s: %+v, %v", code, obs, err)
		}
		must(t, s.Close())
	}
}

// A failed wait is an error immediately; the next Probe creates another event set.
func TestWaitFails(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWithEvents(t, m)
	for _, code := range []string{"GPU_IS_LOST", "UNKNOWN"} {
		must(t, m.Fail(simdriver.All, "nvmlEventSetWait", code, 1))
		if obs, err := s.Wait(10 * time.Second); err == nil {
			t.Errorf("%s: %+v, %v", code, obs, err)
		}
		if _, err := s.Probe(); err != nil {
			t.Error(err)
		}
		must(t, m.XID(2, 62)) // before the next Wait
		if obs, err := s.Wait(10 * time.Second); err != nil || len(obs) != 1 {
			t.Errorf("after %s: %+v, %v", code, obs, err)
		}
	}
}

// The set has the GPUs that answer: one that was lost is registered again when it answers.
func TestSetFollowsTheGPUs(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWithEvents(t, m)
	must(t, m.XID(4, 48), m.Lose(3))
	snapshot(t, s)
	obs, err := s.Wait(0) // the event is in the old set, and a new one was created
	if err != nil || len(obs) == 0 || obs[0].At != gpu.WholeGPU(gpu.DeviceID(m.UUID(4))) {
		t.Errorf("%+v, %v", obs, err)
	}
	eventually(t, func() (int, bool) { // NVML may first report the loss
		_, err := s.Wait(0)
		return len(s.eventSet.gpus), err == nil && len(s.eventSet.gpus) == 7
	})
	must(t, m.Restore(3))
	snapshot(t, s)
	eventually(t, func() (int, bool) {
		_, err := s.Wait(0)
		return len(s.eventSet.gpus), err == nil && len(s.eventSet.gpus) == 8
	})
	must(t, m.XID(3, 48))
	obs, err = s.Wait(10 * time.Second)
	if err != nil || len(obs) != 1 || obs[0].At != gpu.WholeGPU(h100ID) {
		t.Errorf("%+v, %v", obs, err)
	}
}

// The events of a set are read although there is no other set: here, of the only GPU, which is lost.
func TestEventsOfReplacedSet(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := openWithEvents(t, m)
	must(t, m.XID(0, 79), m.Lose(0))
	snapshot(t, s)
	want := health.Observation{At: gpu.WholeGPU(gpu.DeviceID(m.UUID(0))), Kind: health.XID, Code: 79}
	if obs, err := s.Wait(0); err != nil || !slices.Equal(obs, []health.Observation{want}) {
		t.Errorf("%+v, %v", obs, err)
	}
	if obs, err := s.Wait(0); err != nil || len(obs) > 0 || s.eventSet.set != nil {
		t.Errorf("then: %+v, %v", obs, err)
	}
}
