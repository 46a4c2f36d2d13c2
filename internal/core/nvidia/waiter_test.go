package nvidia

import (
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestRebound(t *testing.T) {
	m, s := start(t, "h100x8", openWithEvents)
	must(t, m.Unbind(3), m.Bind(3), m.Bind(4))
	rebound := health.Observation{At: wholeGPU(m, 3), Kind: health.DriverRebound}
	expectEvents(t, s, "bound", 10*time.Second,
		health.Observation{At: rebound.At, Detail: "driver unbound"}, rebound, health.Observation{At: wholeGPU(m, 4), Detail: "driver bound"})
	n := counted(t, m, func() { probe(t, s) })
	if n["nvmlDeviceValidateInforom"] != 8 {
		t.Errorf("the first check: %v", n)
	}
	must(t, m.Unbind(3), m.Bind(3))
	awaitEvent(t, s, rebound)
	n = counted(t, m, func() { probe(t, s) })
	if n["nvmlDeviceValidateInforom"] != 1 {
		t.Errorf("the check of a GPU that was bound again: %v", n)
	}
}

// A GPU that is not in the event set is reported by its PCI address.
func TestReboundOfUnregisteredGPU(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Lose(3))
	s := openWithEvents(t, m)
	must(t, m.Unbind(3), m.Bind(3))
	obs, err := s.Wait(10 * time.Second)
	want := health.Observation{At: gpu.Node, PCI: h100PCI, Kind: health.DriverRebound}
	if err != nil || len(obs) != 2 || obs[1] != want {
		t.Errorf("%+v, %v", obs, err)
	}
}

// Without system events, the events of the GPUs are still reported.
func TestNoSystemEvents(t *testing.T) {
	for call, code := range map[string]string{
		"nvmlSystemEventSetCreate": "NOT_SUPPORTED", "nvmlSystemRegisterEvents": "NO_PERMISSION", "nvmlSystemEventSetWait": "UNKNOWN",
	} {
		m := simdriver.Start(t, "h100x8")
		must(t, m.Fail(simdriver.All, call, code, simdriver.Always))
		s := openWithEvents(t, m)
		must(t, m.XID(3, 48))
		expectEvents(t, s, call, 0, xid(m, 3, 48))
		expectEvents(t, s, call, 0)
		if n := calls(t, m); n[call] != 1 {
			t.Errorf("%s: tried %d times", call, n[call])
		}
		must(t, s.Close())
	}
}

// go-nvml passes the request to C as it is, with a pointer to Go memory in it.
func TestSystemEventsTakePinnedMemory(t *testing.T) {
	_, s := start(t, "t4", openWithEvents)
	if !s.bindEvents.open {
		t.Fatal("no system events")
	}
	r := nvml.SystemEventSetWaitRequest{Set: s.bindEvents.set, DataSize: 1}
	r.Version, r.Data = nvml.STRUCT_VERSION(r, 1), &nvml.SystemEventData_v1{}
	defer func() {
		if text, ok := recover().(error); !ok || !strings.Contains(text.Error(), "unpinned Go pointer") {
			t.Errorf("without a pin: %v", text)
		}
	}()
	t.Error("without a pin:", s.lib.SystemEventSetWait(&r))
}

// A hung wait is reported; meanwhile GPUs are checked, Sample.Events is NotReported, and sets do not accumulate.
func TestWaitHangs(t *testing.T) {
	for _, call := range []string{"nvmlEventSetWait", "nvmlSystemEventSetWait", "nvmlSystemEventSetCreate"} {
		t.Run(call, func(t *testing.T) {
			m, s := start(t, "h100x8", openShortDeadline)
			snapshot(t, s)
			must(t, m.Hang(simdriver.All, call))
			back := make(chan error)
			go func() {
				_, err := s.Wait(10 * time.Millisecond)
				back <- err
			}()
			hung := eventually(t, func() (gpu.Call, bool) { return s.hungWait() })
			if hung.Name != call || hung.At != gpu.Node || hung.Index != -1 {
				t.Errorf("%+v", hung)
			}
			for _, o := range probe(t, s) {
				if o.Kind != health.Checked || o.Sample.Events != health.NotReported {
					t.Errorf("%+v", o)
				}
			}
			if busy := s.Busy(); len(busy) > 0 {
				t.Errorf("busy: %+v", busy)
			}
			before := descriptors(t)
			for range 2 * maxPendingSets { // each snapshot creates another event set
				must(t, m.Lose(3))
				snapshot(t, s)
				must(t, m.Restore(3))
				snapshot(t, s)
			}
			if after := descriptors(t); after > before+2*maxPendingSets {
				t.Errorf("%d descriptors, before %d", after, before)
			}
			must(t, m.Heal())
			if err := <-back; err != nil {
				t.Error(err)
			}
			if c, hung := s.hungWait(); hung {
				t.Errorf("healed: %+v", c)
			}
			must(t, m.XID(3, 62))
			awaitEvent(t, s, xid(m, 3, 62))
			if o := probe(t, s)[h100ID]; o.Sample.Events != health.Yes {
				t.Errorf("healed: %+v", o)
			}
		})
	}
}

// A wait within the time that it was given is not hung.
func TestLongWaitIsNotHung(t *testing.T) {
	_, s := start(t, "t4", openShortDeadline)
	snapshot(t, s)
	back := make(chan error)
	go func() {
		_, err := s.Wait(5 * testDeadline)
		back <- err
	}()
	late := false
	for wait := true; wait; {
		select {
		case err := <-back:
			must(t, err)
			wait = false
		case <-time.After(testDeadline / 10):
			c, hung := s.hungWait()
			late = late || hung && time.Since(c.Since) < 5*testDeadline
		}
	}
	if late {
		t.Error("reported as hung within its time")
	}
}
