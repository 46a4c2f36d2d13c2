package health

import (
	"testing"
	"time"
)

// Application faults say nothing about the GPU, however many there are.
func TestCase03ApplicationXIDs(t *testing.T) {
	m := well(t, "h100x8")
	quiet := m.now
	for range 100 {
		for _, code := range []uint64{13, 31, 43, 45} {
			must(t, m.XID(3, code))
		}
		m.step(10 * time.Second)
		m.expect("application faults", nil)
	}
	for _, code := range []uint64{13, 31, 43, 45} {
		if n := m.count(3, code); n != 100 {
			t.Errorf("XID %d was counted %d times", code, n)
		}
	}
	if p := m.since(quiet); len(p) > 0 {
		t.Errorf("%d publications", len(p))
	}
}
