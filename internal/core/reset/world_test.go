package reset_test

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

const (
	second = time.Second
	minute = time.Minute
	hour   = time.Hour
	day    = 24 * hour
)

// world is a node that tests change, and the agent that decides for it.
type world struct {
	testing.TB
	now    time.Time
	policy reset.Policy
	state  reset.State
	node   reset.Node
	last   reset.Result
	passes int
}

// newWorld returns a node with free GPUs that take work.
func newWorld(t testing.TB, gpus int) *world {
	w := &world{TB: t, now: time.Date(2026, 11, 27, 9, 0, 0, 0, time.UTC), policy: reset.Default()}
	w.policy.Mode = reset.Act
	w.boot("1")
	for i := range gpus {
		w.node.GPUs = append(w.node.GPUs, reset.GPU{ID: coretest.GPU(i), Action: health.RecoveryNone, TakesWork: true})
	}
	return w
}

// faultyWorld is a newWorld whose first GPU has an XID for which its driver asks for a reset.
func faultyWorld(t testing.TB, gpus int) *world {
	w := newWorld(t, gpus)
	w.fault(0)
	return w
}

func (w *world) fault(i int) {
	g := w.gpu(i)
	g.Action, g.Cause, g.Repair, g.TakesWork = health.RecoveryReset, "XID_95", health.Reset, false
}

func (w *world) repaired(i int) {
	g := w.gpu(i)
	g.Action, g.Cause, g.Repair, g.ProofFailed, g.NeedsService, g.TakesWork = health.RecoveryNone, "", health.NoRepair, false, false, true
}

func (w *world) gpu(i int) *reset.GPU { return &w.node.GPUs[i] }

func (w *world) boot(id string) { w.node.Boot, w.node.BootTime = id, w.now }

// restart has the state written, and read by a new process.
func (w *world) restart() {
	w.Helper()
	text := w.encoded(w.state)
	s, err := reset.Parse([]byte(text))
	if err != nil {
		w.Fatalf("%v\n%s", err, text)
	}
	if again := w.encoded(s); again != text {
		w.Fatalf("%s\n%s", text, again)
	}
	w.state = s
}

func (w *world) encoded(s reset.State) string {
	text, err := s.Encode()
	if err != nil {
		w.Fatal(err)
	}
	return string(text)
}

// set sets the wall clock.
func (w *world) set(d time.Duration) {
	w.now = w.now.Add(d)
	if !w.node.BootTime.IsZero() {
		w.node.BootTime = w.node.BootTime.Add(d)
	}
}

// pass decides after a time. A decision changes nothing that it gets, and is the same again.
func (w *world) pass(d time.Duration) {
	w.Helper()
	w.now = w.now.Add(d)
	if w.passes++; w.passes%16 == 1 {
		before, first := w.encoded(w.state), w.policy.Next(w.state, w.node, w.now)
		if again := w.policy.Next(w.state, w.node, w.now); !reflect.DeepEqual(again, first) {
			w.Fatalf("another result for the same values:\n%+v\n%+v", first, again)
		}
		if after := w.encoded(w.state); after != before {
			w.Fatalf("Next has changed its state from\n%s to\n%s", before, after)
		}
	}
	w.last = w.policy.Next(w.state, w.node, w.now)
	w.state = w.last.State
}

// begins decides, and returns the reset that begins.
func (w *world) begins(i int) reset.Begin {
	w.Helper()
	w.pass(0)
	if len(w.last.Begin) != 1 || w.last.Begin[0].GPU != w.gpu(i).ID {
		w.Fatalf("no reset of GPU %d begins: %+v", i, w.last)
	}
	return w.last.Begin[0]
}

// never decides each minute, and has no reset begin.
func (w *world) never(d time.Duration) {
	w.Helper()
	for range d / minute {
		if w.pass(minute); len(w.last.Begin) > 0 {
			w.Fatalf("%+v begins", w.last.Begin)
		}
	}
}

// waits checks why a GPU waits.
func (w *world) waits(i int, code reset.Code, alert bool) reset.Wait {
	w.Helper()
	n := slices.IndexFunc(w.last.Waits, func(one reset.Wait) bool { return one.GPU == w.gpu(i).ID })
	if n < 0 || w.last.Waits[n].Code != code {
		w.Fatalf("GPU %d does not wait for %s: %+v", i, code, w.last)
	}
	one := w.last.Waits[n]
	if one.Alert != alert || one.Text == "" || !one.Until.IsZero() && (!one.Until.After(w.now) || w.last.Wake.After(one.Until)) {
		w.Errorf("%+v, and it wakes at %v", one, w.last.Wake)
	}
	return one
}

// quiet checks that nothing is done and nothing waits.
func (w *world) quiet() {
	w.Helper()
	if r := w.last; len(r.Begin)+len(r.Waits)+len(r.Restore) > 0 || !r.Wake.IsZero() {
		w.Fatalf("%+v", r)
	}
}

func (w *world) record(i int) reset.Record {
	r, _ := w.state.Of(w.gpu(i).ID)
	return r
}

// end ends the reset of a GPU a minute after its beginning. nvidia-smi was called, unless it was cancelled or the GPU was in use.
func (w *world) end(i int, o reset.Outcome, text string) {
	w.Helper()
	id, r := w.gpu(i).ID, w.record(i).Running
	if r == nil {
		w.Fatalf("no reset of GPU %d runs", i)
	}
	w.now = w.now.Add(minute)
	if o != reset.Cancelled && o != reset.InUse {
		w.state = w.state.Calls(id, false)
	}
	w.state = w.state.Ended(id, reset.End{Number: r.Number, Outcome: o, Took: 40 * second, Text: text}, w.now)
	w.pass(0)
}

// try has the reset of a GPU begin, and end.
func (w *world) try(i int, o reset.Outcome, text string) {
	w.Helper()
	w.begins(i)
	w.end(i, o, text)
}

func (w *world) still(id gpu.DeviceID) string {
	why, ok := w.policy.Still(w.state, w.node, id)
	if ok != (why == "") {
		w.Errorf("%q, %t", why, ok)
	}
	return why
}
