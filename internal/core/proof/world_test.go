package proof_test

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/proof"
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
	booted time.Time
	policy proof.Policy
	state  proof.State
	node   proof.Node
	last   proof.Result
	fresh  bool // until has not returned what last has begun
	passes int
}

// newWorld returns a node with free GPUs of one pool, of which nothing is known.
func newWorld(t testing.TB, gpus int) *world {
	w := &world{TB: t, now: time.Date(2026, 11, 27, 9, 0, 0, 0, time.UTC), policy: proof.Default()}
	w.policy.Command = []string{"/usr/bin/prove"}
	w.node = proof.Node{Name: "node-1"}
	w.boot("1")
	for i := range gpus {
		w.node.GPUs = append(w.node.GPUs, proof.GPU{ID: coretest.GPU(i), Pools: []string{"gpu"}})
	}
	return w
}

// provedWorld is newWorld after each GPU has passed, a minute ago.
func provedWorld(t testing.TB, gpus int) *world {
	w := newWorld(t, gpus)
	w.proveAll()
	w.pass(minute)
	return w
}

// proveAll has each GPU pass that begins, until none requires a proof.
func (w *world) proveAll() {
	w.Helper()
	for range 200 {
		w.pass(10 * second)
		for _, b := range w.last.Begin {
			w.end(b.GPU, proof.Passed)
		}
	}
}

func (w *world) boot(id string) {
	w.booted, w.node.Boot = w.now, id
	w.node.BootTime = w.now
}

// restart has the state written, and read by a new process.
func (w *world) restart() {
	w.Helper()
	text, err := w.state.Encode()
	if err != nil {
		w.Fatal(err)
	}
	if w.state, err = proof.Parse(text); err != nil {
		w.Fatalf("%v\n%s", err, text)
	}
	again, err := w.state.Encode()
	if err != nil || !bytes.Equal(again, text) {
		w.Fatalf("%v\n%s\n%s", err, text, again)
	}
}

// set sets the wall clock.
func (w *world) set(d time.Duration) {
	w.now = w.now.Add(d)
	if !w.node.BootTime.IsZero() {
		w.node.BootTime = w.node.BootTime.Add(d)
	}
}

// pass decides after a time. A decision changes nothing that it gets.
func (w *world) pass(d time.Duration) {
	w.Helper()
	w.now = w.now.Add(d)
	before, checked := "", w.passes%32 == 0
	if w.passes++; checked {
		before = w.encoded(w.state)
	}
	w.last = w.policy.Next(w.state, w.node, w.now)
	if checked && w.encoded(w.state) != before {
		w.Fatalf("Next has changed its state from\n%s to\n%s", before, w.encoded(w.state))
	}
	w.state, w.fresh = w.last.State, len(w.last.Begin) > 0
}

func (w *world) encoded(s proof.State) string {
	text, err := s.Encode()
	if err != nil {
		w.Fatal(err)
	}
	return string(text)
}

// until decides each second until a proof begins, and returns it; after some time the test fails.
func (w *world) until(most time.Duration) proof.Begin {
	w.Helper()
	for began := w.now; w.now.Sub(began) <= most; w.pass(second) {
		if w.fresh {
			w.fresh = false
			return w.last.Begin[0]
		}
	}
	w.Fatalf("no proof begins within %v: %+v", most, w.last.Waits)
	return proof.Begin{}
}

// never decides each minute, or each five minutes of days, and has no proof begin.
func (w *world) never(d time.Duration) {
	w.Helper()
	step := minute
	if d >= day {
		step = 5 * minute
	}
	for range d / step {
		if w.pass(step); len(w.last.Begin) > 0 {
			w.Fatalf("%+v begins", w.last.Begin)
		}
	}
}

func (w *world) gpu(i int) *proof.GPU { return &w.node.GPUs[i] }

func (w *world) record(id gpu.DeviceID) proof.Record {
	w.Helper()
	r, ok := w.state.Of(id)
	if !ok {
		w.Fatalf("nothing is known of %s", id)
	}
	return r
}

// end ends the proof of a GPU, and reports whether its outcome counts.
func (w *world) end(id gpu.DeviceID, o proof.Outcome) (counts bool) {
	w.Helper()
	r := w.record(id)
	if r.Running == nil {
		w.Fatalf("no proof of %s runs", id)
	}
	w.state, counts = w.state.Ended(proof.End{
		GPU: id, Number: r.Running.Number, Outcome: o, Detail: "exit status 2", Took: 5 * second,
		Summary: "memory\nerror", Values: map[string]float64{"gemm_tflops": 612.3},
	}, w.now)
	return counts
}

// fail has a GPU fail its next proof.
func (w *world) fail(i int) {
	w.Helper()
	if b := w.until(20 * minute); b.GPU != w.gpu(i).ID {
		w.Fatalf("%+v begins, not %s", b, w.gpu(i).ID)
	}
	if !w.end(w.gpu(i).ID, proof.Failed) {
		w.Fatal("the failure does not count")
	}
	w.pass(0)
}

// waits checks why a GPU waits.
func (w *world) waits(i int, code proof.Code) proof.Wait {
	w.Helper()
	n := slices.IndexFunc(w.last.Waits, func(one proof.Wait) bool { return one.GPU == w.gpu(i).ID })
	if n < 0 || w.last.Waits[n].Code != code {
		w.Fatalf("GPU %d does not wait for %s: %+v", i, code, w.last.Waits)
	}
	one := w.last.Waits[n]
	if one.Text == "" || !one.Until.IsZero() && (!one.Until.After(w.now) || w.last.Wake.After(one.Until)) {
		w.Errorf("%+v, and it wakes at %v", one, w.last.Wake)
	}
	return one
}

// withheld checks how many GPUs take no work until they are proved.
func (w *world) withheld(n int) {
	w.Helper()
	if len(w.last.Withheld) != n {
		w.Fatalf("%d are withheld, want %d: %+v", len(w.last.Withheld), n, w.last.Withheld)
	}
}
