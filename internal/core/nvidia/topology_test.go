package nvidia

import (
	"fmt"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// linkBetween returns the link between two GPUs of a machine, by slot.
func linkBetween(t *testing.T, m *simdriver.Machine, s *Session, a, b int) gpu.Link {
	t.Helper()
	first, second := gpu.DeviceID(m.UUID(a)), gpu.DeviceID(m.UUID(b))
	for _, l := range snapshot(t, s).Links {
		if l.A == first && l.B == second || l.A == second && l.B == first {
			l.A, l.B = "", ""
			return l
		}
	}
	t.Fatalf("no link between %d and %d", a, b)
	return gpu.Link{}
}

// A link that only one of its GPUs lists as active does not count, whichever of the two it is.
func TestOneSidedNVLinks(t *testing.T) {
	for slot, down := range map[int]string{0: "0x4", 3: "0x1"} { // one of the two links between them
		t.Run(fmt.Sprint(slot), func(t *testing.T) {
			m := simdriver.Start(t, "dgx1")
			want := gpu.Link{Path: gpu.PathHostBridge, NVLinks: 1, Generation: 2}
			must(t, m.Set(slot, "links_down", down))
			s := open(t, m)
			if got := linkBetween(t, m, s, 0, 3); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
			// Nothing is known of the links of a GPU that can't be read: those of the other one count.
			must(t, m.Fail(simdriver.GPU(3-slot), "nvmlDeviceGetNvLinkState", "UNKNOWN", simdriver.Always))
			want.Generation, s.topology = 0, topology{}
			if got := linkBetween(t, m, s, 0, 3); got != want {
				t.Errorf("the other GPU can't be read: %+v, want %+v", got, want)
			}
		})
	}
}

// The generation of the links is read once, for one link of each GPU. It is unknown if the driver does not report it, and read
// again if the call failed.
func TestNVLinkGeneration(t *testing.T) {
	m := simdriver.Start(t, "dgx1")
	must(t, m.Fail(simdriver.GPU(3), "nvmlDeviceGetNvLinkVersion", "UNKNOWN", simdriver.Always))
	s := open(t, m)
	want := gpu.Link{Path: gpu.PathHostBridge, NVLinks: 2}
	if got := linkBetween(t, m, s, 0, 3); got != want {
		t.Errorf("while the call fails: %+v, want %+v", got, want)
	}
	must(t, m.Heal())
	want.Generation = 2
	n := counted(t, m, func() {
		if got := linkBetween(t, m, s, 0, 3); got != want {
			t.Errorf("after that: %+v, want %+v", got, want)
		}
	})
	if n["nvmlDeviceGetNvLinkVersion"] != 8 {
		t.Errorf("calls for 8 GPUs: %v", n)
	}
	if n := counted(t, m, func() { snapshot(t, s) }); n["nvmlDeviceGetNvLinkVersion"] > 0 {
		t.Errorf("read again: %v", n)
	}
	must(t, m.Set(3, "nvlink_version", "none"))
	s = open(t, m)
	if want.Generation = 0; linkBetween(t, m, s, 0, 3) != want {
		t.Errorf("not supported: %+v", linkBetween(t, m, s, 0, 3))
	}
	if n := counted(t, m, func() { snapshot(t, s) }); n["nvmlDeviceGetNvLinkVersion"] > 0 {
		t.Errorf("read again although it is not supported: %v", n)
	}
	must(t, m.Set(3, "nvlink_version", "9")) // of a later driver
	s.topology = topology{}
	if linkBetween(t, m, s, 0, 3) != want {
		t.Errorf("not listed: %+v", linkBetween(t, m, s, 0, 3))
	}
}
