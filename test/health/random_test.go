package health

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// witness watches one GPU of a random story and knows what must not be.
type witness struct {
	*rig
	slot    int
	verdict int  // field 230 as the driver has it now
	lost    bool // off the bus
	broken  bool // hit by an XID that nothing but a reset mends, and not reset since
}

// Whatever happens in whatever order: never well while the driver wants something done, nor with a fault that
// only a reset mends before the reset; from lost to well leads no way but over unhealthy; and nothing changes
// without a reason.
func TestCase32RandomStories(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 32))
			m := well(t, "h100x8", func(c *core.Config) { c.Health.MaxRecoveries, c.Health.MaxRecoveryDwell = 1000, 2*time.Minute })
			var witnesses []*witness
			for _, slot := range []int{1, 4, 6} {
				witnesses = append(witnesses, &witness{rig: m, slot: slot})
			}
			for range 60 {
				w := witnesses[random.IntN(len(witnesses))]
				w.act(random)
				for range random.IntN(8) {
					m.step(time.Duration(1+random.IntN(4)) * 10 * time.Second)
					for _, w := range witnesses {
						w.testify()
					}
				}
			}
			for _, w := range witnesses {
				w.reset()
			}
			m.step(10 * time.Minute)
			for _, w := range witnesses {
				w.history()
				if w.health(w.slot).Reason == health.ReasonNeedsService { // the same XID within an hour of a reset
					must(t, m.clear(w.slot, "", m.now))
				}
			}
			m.step(10 * time.Second)
			m.expect("there is always a way back", nil)
		})
	}
}

// act makes something happen.
func (w *witness) act(random *rand.Rand) {
	switch random.IntN(8) {
	case 0, 1:
		code := []uint64{13, 31, 43, 45, 63, 74, 94, 109, 999}[random.IntN(9)]
		must(w.t, w.XID(w.slot, code))
	case 2:
		if !w.lost { // what is gone has no voice
			w.xid(w.slot, []uint64{46, 119, 140}[random.IntN(3)])
			w.broken = true
		}
	case 3, 4:
		w.verdict = []int{1, 2, 4, 6, 99}[random.IntN(5)] // back to none is a reset's
		w.set(w.slot, fmt.Sprintf("recovery_action = %d", w.verdict))
	case 5:
		w.lost = true
		must(w.t, w.Lose(w.slot))
	case 6, 7:
		w.reset()
	}
}

// reset is the only thing that mends; the driver has asked for it, so that everybody sees it happen.
func (w *witness) reset() {
	if !w.lost {
		w.set(w.slot, "recovery_action = 1")
	}
	w.step(10 * time.Second)
	must(w.t, w.Reset(w.slot))
	w.verdict, w.lost, w.broken = 0, false, false
	w.step(20 * time.Second) // from now on its events are heard again
}

// testify checks what is published now.
func (w *witness) testify() {
	w.t.Helper()
	h := w.health(w.slot)
	what := fmt.Sprintf("%v in, GPU %d: %s", w.now.Sub(begin), w.slot, h)
	switch {
	case h.State > health.Degraded:
	case w.verdict != 0:
		w.t.Errorf("%s: the verdict is %d", what, w.verdict)
	case w.lost:
		w.t.Errorf("%s: it is lost", what)
	case w.broken:
		w.t.Errorf("%s: it was never reset", what)
	}
}

// history checks all that was ever published.
func (w *witness) history() {
	w.t.Helper()
	var was health.Health
	for _, p := range w.published {
		u, ok := p.inventory.Unit(inventory.UnitID(w.id(w.slot)))
		if !ok {
			continue
		}
		what := fmt.Sprintf("%v in, GPU %d: %s", p.at.Sub(begin), w.slot, u.Health)
		if u.Health.State <= health.Degraded && was.State == health.GPULost {
			w.t.Errorf("%s: it was lost a moment ago", what)
		}
		if (u.Health.State == health.Healthy) != (u.Health.Cause() == "") {
			w.t.Errorf("%s: cause %q", what, u.Health.Cause())
		}
		was = u.Health
	}
}
