package nvidia

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestRebound(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	s := openWithEvents(t, m)
	if _, err := s.Wait(0); err != nil { // takes the event set
		t.Fatal(err)
	}
	must(t, m.Unbind(3), m.Bind(3), m.Bind(4))
	obs, err := s.Wait(10 * time.Second)
	want := []health.Observation{
		{At: gpu.WholeGPU(h100ID), Detail: "driver unbound"},
		{At: gpu.WholeGPU(h100ID), Kind: health.DriverRebound},
		{At: gpu.WholeGPU(gpu.DeviceID(m.UUID(4))), Detail: "driver bound"},
	}
	if err != nil || !slices.Equal(obs, want) {
		t.Errorf("%+v, %v", obs, err)
	}
	n := counted(t, m, func() { probe(t, s) })
	if n["nvmlDeviceValidateInforom"] != 8 {
		t.Errorf("the first check: %v", n)
	}
	must(t, m.Unbind(3), m.Bind(3))
	awaitEvent(t, s, want[1])
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
	if _, err := s.Wait(0); err != nil {
		t.Fatal(err)
	}
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
		for range 3 {
			obs, err := s.Wait(0)
			must(t, err)
			if len(obs) > 1 {
				t.Errorf("%s: %+v", call, obs)
			}
		}
		if n := calls(t, m); n[call] != 1 {
			t.Errorf("%s: tried %d times", call, n[call])
		}
		must(t, s.Close())
	}
}

// go-nvml passes the request to C as it is, with a pointer to Go memory in it.
func TestSystemEventsTakePinnedMemory(t *testing.T) {
	m := simdriver.Start(t, "t4")
	s := openWithEvents(t, m)
	if _, err := s.Wait(0); err != nil || !s.bindEvents.open {
		t.Fatal(err)
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

// A driver may raise no event for a changed MIG layout: the kernel's folders show it.
func TestMIGLayoutChangeWithoutEvent(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	slots, err := m.Slots()
	if err != nil {
		t.Fatal(err)
	}
	for _, slot := range slots {
		if err := m.Set(slot, "events", "0x8"); err != nil { // nvmlEventTypeXidCriticalError alone
			t.Fatal(err)
		}
	}
	s := open(t, m)
	if _, err := s.Snapshot(); err != nil {
		t.Fatal(err)
	}
	hint := func() (any, bool) {
		obs, err := s.Wait(10 * time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		return obs, slices.ContainsFunc(obs, func(o health.Observation) bool { return o.At == gpu.Node && o.Kind == 0 })
	}
	for end := time.Now().Add(2 * procfsInterval); time.Now().Before(end); {
		if obs, ok := hint(); ok {
			t.Fatalf("nothing happened: %v", obs)
		}
	}
	if err := m.SetMIG(slots[0], "3g.40gb", "3g.40gb"); err != nil {
		t.Fatal(err)
	}
	eventually(t, hint)
}
