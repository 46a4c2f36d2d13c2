package nvidia

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A driver need not tell of a new layout: the kernel's folders show it.
func TestLayoutIsSeenWithoutAnEvent(t *testing.T) {
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
		return obs, slices.ContainsFunc(obs, func(o core.Observation) bool { return o.At == core.Node && o.Kind == 0 })
	}
	for end := time.Now().Add(2 * layoutEvery); time.Now().Before(end); {
		if obs, ok := hint(); ok {
			t.Fatalf("nothing happened: %v", obs)
		}
	}
	if err := m.SetMIG(slots[0], "3g.40gb", "3g.40gb"); err != nil {
		t.Fatal(err)
	}
	eventually(t, hint)
}
