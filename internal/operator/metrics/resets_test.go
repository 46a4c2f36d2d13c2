package metrics

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

// Only GPUs that are listed, and are faulty or were reset, have series of resets; a node on which nothing is decided about them has none at all.
func TestResets(t *testing.T) {
	cfg, at := core.DefaultConfig(), time.Unix(1000, 0)
	of := func(gpus int) Source {
		return Source{
			Config: cfg, State: core.NewState(cfg).Read(cfg, at, coretest.GPUs(gpus)), Sources: map[string]bool{}, ResourceOf: func(u inventory.Unit) string { return u.Pool },
			Resets: &reset.Result{
				State: reset.State{Begun: 7, Records: []reset.Record{
					{GPU: coretest.GPU(0), Attempts: 1, Refusals: 3, Last: &reset.End{Outcome: reset.Refused, At: at}},
					{GPU: coretest.GPU(1), Running: &reset.Running{Number: 7, Began: at}},
				}},
				Begin: []reset.Begin{{GPU: coretest.GPU(1), Number: 7}, {GPU: coretest.GPU(2)}},
				Waits: []reset.Wait{{GPU: coretest.GPU(0), Code: reset.WaitRefused, Alert: true}, {GPU: coretest.GPU(3), Code: reset.WaitHeld}},
			},
		}
	}
	want := map[string]float64{
		"s_begun_total": 7,
		"_running 0":    0, "_attempts 0": 1, "_refusals 0": 3, "_timestamp_seconds 0 refused": 1000, "_due 0": 0, "_waiting REFUSED 0": 1, "_needs_person 0": 1,
		"_running 1": 1, "_attempts 1": 0, "_refusals 1": 0, "_due 1": 0, "_needs_person 1": 0,
		"_running 2": 0, "_attempts 2": 0, "_refusals 2": 0, "_due 2": 1, "_needs_person 2": 0,
		"_running 3": 0, "_attempts 3": 0, "_refusals 3": 0, "_due 3": 0, "_waiting HELD 3": 1, "_needs_person 3": 0,
	}
	if diff := cmp.Diff(want, seriesOf(t, of(8), "tandem_reset")); diff != "" {
		t.Errorf("(-want, +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]float64{"s_begun_total": 7}, seriesOf(t, of(0), "tandem_reset")); diff != "" {
		t.Errorf("the GPUs are gone (-want, +got):\n%s", diff)
	}
	off := of(8)
	off.Resets = nil
	if got := seriesOf(t, off, "tandem_reset"); len(got) != 0 {
		t.Errorf("nothing is decided: %v", got)
	}
}
