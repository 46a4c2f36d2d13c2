package proof_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/proof"
)

// storm is a world in which anything happens at random. It has its own books.
type storm struct {
	*world
	*rand.Rand

	runs    map[gpu.DeviceID]running // proofs that were begun and have not ended
	free    map[gpu.DeviceID]time.Duration
	failed  map[gpu.DeviceID]int             // failures since a proof passed or an operator cleared them
	day     map[gpu.DeviceID][]time.Duration // ends of proofs after a reset or a fault
	elapsed time.Duration                    // whatever the clock shows

	proofs, cancelled, verdicts int
}

type running struct {
	proof.Begin
	since time.Duration
	again bool // one for the same fault could not run
}

// TestRandom has many steps of random nodes. Whatever happens: at most maxPerNode proofs run, none on a GPU that is held or not healthy, or that was held
// within SettleTime; none for the reason idle on the last free GPU of a pool; a failure lasts until a proof passes or an operator clears it, also over
// restarts; a GPU that failed twice is not tried a third time; one that recovers from a third fault within a day is not
// proved; and what is not offered waits for a proof, or for a person.
func TestRandom(t *testing.T) {
	var proofs, cancelled, verdicts int
	const seeds = 60
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newStorm(t, seed)
			for range 400 {
				s.step()
				if t.Failed() {
					return
				}
			}
			proofs, cancelled, verdicts = proofs+s.proofs, cancelled+s.cancelled, verdicts+s.verdicts
		})
	}
	t.Logf("%d proofs, %d cancelled, %d verdicts", proofs, cancelled, verdicts)
	if !t.Failed() && (verdicts < 10*seeds || cancelled < 3*seeds) {
		t.Error("the test shows too little")
	}
}

func newStorm(t *testing.T, seed uint64) *storm {
	r := rand.New(rand.NewPCG(seed, 28)) //nolint:gosec // a test that repeats
	s := &storm{world: newWorld(t, 1+r.IntN(8)), Rand: r, runs: map[gpu.DeviceID]running{}, free: map[gpu.DeviceID]time.Duration{}, failed: map[gpu.DeviceID]int{}, day: map[gpu.DeviceID][]time.Duration{}}
	p := &s.policy
	p.MaxPerNode, p.Withhold = 1+r.IntN(3), r.IntN(2) == 0
	p.Every = time.Duration(1+r.IntN(48)) * hour
	p.IdleFor = time.Duration(1+r.IntN(20)) * minute
	p.At = slices.DeleteFunc(proof.Reasons(), func(proof.Reason) bool { return r.IntN(4) == 0 })
	p.OnFail = []health.State{health.Unhealthy, health.Degraded}[r.IntN(2)]
	if r.IntN(3) == 0 {
		p.Windows = []proof.Window{{From: time.Duration(r.IntN(24)) * hour, To: 30*minute + time.Duration(r.IntN(23))*hour}}
	}
	if len(p.At) == 0 {
		p.At = proof.Reasons()
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	for i := range s.node.GPUs {
		s.gpu(i).Pools = [][]string{{"gpu"}, {"gpu"}, {"large"}, {"gpu", "all"}}[r.IntN(4)]
	}
	return s
}

// step changes something, and decides.
func (s *storm) step() {
	s.change(s.gpu(s.IntN(len(s.node.GPUs))))
	before := s.state
	d := []time.Duration{0, second, 10 * second, minute, 10 * minute, hour}[s.IntN(6)]
	s.elapsed += d
	s.pass(d)
	again := s.policy.Next(before, s.node, s.now)
	if !reflect.DeepEqual(again, s.last) {
		s.Fatalf("another result for the same values:\n%+v\n%+v", s.last, again)
	}
	s.checkCancels()
	s.checkBegins()
	s.checkFailures()
	s.checkWithheld()
	s.checkWaits()
	s.finish()
	s.see()
}

// change changes the node.
func (s *storm) change(g *proof.GPU) {
	switch s.IntN(30) {
	case 0, 1, 2, 3, 4, 5:
		g.Holders = nil
	case 6, 7, 8:
		g.Holders = []string{"pod default/train"}
	case 9:
		g.Processes = [][]string{nil, {"pid 1"}}[s.IntN(2)]
	case 10:
		g.Unread, g.Never = []string{"", "", "no answer"}[s.IntN(3)], false
	case 11, 12:
		g.Health = health.State(s.IntN(5)) //nolint:gosec // one of five
	case 13, 14, 15, 16:
		g.Health, g.Processes, g.Unread, g.Cancel = health.Healthy, nil, "", ""
	case 17:
		g.Cancel = []proof.Cancel{"", proof.ByOperator, proof.Move, proof.Demand}[s.IntN(4)]
	case 18:
		s.node.Cancel = []proof.Cancel{"", "", proof.Maintenance, proof.Reload}[s.IntN(4)]
	case 19, 20:
		g.Reset = s.now
	case 21:
		s.node.Elsewhere = s.IntN(2)
	case 22:
		s.restarted()
	case 23:
		s.boot(fmt.Sprint(s.Uint32()))
		s.restarted()
	case 24:
		by := time.Duration(s.IntN(1000)-500) * day
		s.set(by)
		for i := range s.node.GPUs { // the ledger moves its times, too
			s.gpu(i).Reset = health.ShiftTime(s.gpu(i).Reset, by)
		}
	case 25:
		s.cleared(g.ID)
	case 26:
		s.node.Cancel = ""
	}
}

// restarted has another process decide. The command ends with the one before.
func (s *storm) restarted() {
	s.restart()
	s.runs = map[gpu.DeviceID]running{}
	s.free = map[gpu.DeviceID]time.Duration{}
	if s.IntN(4) == 0 {
		s.node.Cancel = ""
	}
}

func (s *storm) cleared(id gpu.DeviceID) {
	var ok bool
	if s.state, ok = s.state.Clear(id, s.now); ok != (s.failed[id] > 0) {
		s.Errorf("%s has failed %d times, cleared %t", id, s.failed[id], ok)
	}
	s.failed[id] = 0
}

func (s *storm) checkCancels() {
	for _, c := range s.last.Cancel {
		if c.Why == proof.Overdue {
			delete(s.runs, c.GPU)
		} else if s.runs[c.GPU].Number != c.Number {
			s.Errorf("%+v is not of %+v", c, s.runs[c.GPU])
		}
	}
	for id, r := range s.runs {
		g := s.of(id)
		cancelled := slices.ContainsFunc(s.last.Cancel, func(c proof.Cancelling) bool { return c.GPU == id })
		if !cancelled && (len(g.Holders) > 0 || g.Unread != "" || g.Health > health.Degraded || s.node.Cancel != "") {
			s.Errorf("%+v goes on: %+v", r, g)
		}
		if s.elapsed-r.since >= proof.TakeWithin+s.policy.Timeout+proof.EndsWithin {
			s.Errorf("%+v runs for %v", r, s.elapsed-r.since)
		}
	}
}

// again reports whether the latest fault of a GPU had a proof that could not run.
func (s *storm) again(id gpu.DeviceID) bool {
	r, _ := s.last.State.Of(id)
	return r.Tries != nil && !r.Fault.After(r.Tries.At)
}

func (s *storm) checkBegins() {
	for _, b := range s.last.Begin {
		g := s.of(b.GPU)
		s.proofs++
		switch {
		case len(g.Holders) > 0 || len(g.Processes) > 0 || g.Unread != "" || g.Health > health.Degraded || s.node.Cancel != "":
			s.Errorf("%+v begins on %+v", b, g)
		case s.elapsed-s.free[b.GPU] < proof.SettleTime || s.free[b.GPU] == 0:
			s.Errorf("%+v begins %v after it became free", b, s.elapsed-s.free[b.GPU])
		case s.failed[b.GPU] > 1:
			s.Errorf("%+v begins a third try", b)
		case s.failed[b.GPU] == 1 && b.Reason != proof.Reset && b.Reason != proof.Boot:
			s.Errorf("%+v begins after a failure", b)
		case b.Reason == proof.Recovery && !s.again(b.GPU) && len(s.day[b.GPU]) > 1 && s.elapsed-s.day[b.GPU][len(s.day[b.GPU])-2] < day:
			s.Errorf("%+v begins %v after the last but one", b, s.elapsed-s.day[b.GPU][len(s.day[b.GPU])-2])
		case b.Reason == proof.Idle:
			s.checkIdle(b, g)
		case s.failed[b.GPU] == 0 && !slices.Contains(s.policy.At, b.Reason):
			s.Errorf("%+v: the policy has %v", b, s.policy.At)
		}
		s.runs[b.GPU] = running{b, s.elapsed, b.Reason == proof.Recovery && s.again(b.GPU)}
		if ok, counts := s.Still(b); ok != counts {
			s.Errorf("%+v may run: %t", b, ok)
		}
	}
	if n := len(s.runs) + s.node.Elsewhere; len(s.last.Begin) > 0 && n > s.policy.MaxPerNode {
		s.Errorf("%d run, and %d are allowed", n, s.policy.MaxPerNode)
	}
}

// Still is what a begun proof needs right before the command.
func (s *storm) Still(b proof.Begin) (bool, bool) {
	_, ok := s.policy.Still(s.state, s.node, b.GPU)
	return ok, true
}

// checkIdle checks that each pool of a GPU has another free one.
func (s *storm) checkIdle(b proof.Begin, g *proof.GPU) {
	if s.elapsed-s.free[b.GPU] < s.policy.IdleFor {
		s.Errorf("%+v begins %v after it became free", b, s.elapsed-s.free[b.GPU])
	}
	for _, pool := range g.Pools {
		others := 0
		for i := range s.node.GPUs {
			o := s.gpu(i)
			_, runs := s.runs[o.ID]
			runs = runs || slices.ContainsFunc(s.last.Begin, func(b proof.Begin) bool { return b.GPU == o.ID })
			failed := s.failed[o.ID] > 1 || s.failed[o.ID] == 1 && s.policy.OnFail == health.Unhealthy
			withheld := slices.ContainsFunc(s.last.Withheld, func(w proof.Withheld) bool { return w.GPU == o.ID })
			if o.ID != g.ID && slices.Contains(o.Pools, pool) && !runs && !failed && !withheld && len(o.Holders)+len(o.Processes) == 0 && o.Unread == "" && o.Health <= health.Degraded {
				others++
			}
		}
		if others == 0 {
			s.Errorf("%+v begins on the last free GPU of %s", b, pool)
		}
	}
}

func (s *storm) checkFailures() {
	for i := range s.node.GPUs {
		id := s.gpu(i).ID
		n := slices.IndexFunc(s.last.Failures, func(f proof.Failure) bool { return f.GPU == id })
		switch {
		case n >= 0 != (s.failed[id] > 0):
			s.Errorf("%s has failed %d times: %+v", id, s.failed[id], s.last.Failures)
		case n >= 0 && s.last.Failures[n].NeedsService != (s.failed[id] > 1):
			s.Errorf("%s has failed %d times: %+v", id, s.failed[id], s.last.Failures[n])
		}
	}
}

// checkWithheld checks that each GPU that takes no work for a proof gets one or waits for one. One with a fault waits for the end of that first.
func (s *storm) checkWithheld() {
	for _, w := range s.last.Withheld {
		_, runs := s.runs[w.GPU]
		sick := slices.ContainsFunc(s.node.GPUs, func(g proof.GPU) bool { return g.ID == w.GPU && g.Health > health.Degraded })
		if !runs && !sick && !slices.ContainsFunc(s.last.Waits, func(one proof.Wait) bool {
			return one.GPU == w.GPU && one.Reason == w.Reason && (!one.Alert || one.Code == proof.WaitOften)
		}) {
			s.Errorf("%+v neither runs nor waits: %+v", w, s.last.Waits)
		}
		if s.last.State.Records[0].GPU == "" || w.Text == "" {
			s.Errorf("%+v", w)
		}
	}
}

func (s *storm) checkWaits() {
	for _, w := range s.last.Waits {
		if w.Text == "" || !w.Until.IsZero() && (!w.Until.After(s.now) || s.last.Wake.After(w.Until)) {
			s.Errorf("%+v at %v, and it wakes at %v", w, s.now, s.last.Wake)
		}
	}
}

// finish ends some proofs.
func (s *storm) finish() {
	for i := range s.node.GPUs {
		id := s.gpu(i).ID
		r, ok := s.runs[id]
		if !ok || s.IntN(3) == 0 {
			continue
		}
		outcome := []proof.Outcome{proof.Passed, proof.Passed, proof.Passed, proof.Failed, proof.NotRun, proof.Cancelled}[s.IntN(6)]
		var counts bool
		s.state, counts = s.state.Ended(proof.End{GPU: id, Number: r.Number, Outcome: outcome, Took: second}, s.now)
		delete(s.runs, id)
		s.free[id] = 0
		cancelled := slices.ContainsFunc(s.last.Cancel, func(c proof.Cancelling) bool { return c.GPU == id })
		if counts != (!cancelled && outcome != proof.Cancelled) {
			s.Errorf("%+v ends as %v, cancelled %t, and counts %t", r, outcome, cancelled, counts)
		}
		if counts && !r.again && (r.Reason == proof.Reset || r.Reason == proof.Recovery) {
			s.day[id] = append(s.day[id], s.elapsed)
		}
		switch {
		case !counts:
			s.cancelled++
		case outcome == proof.Failed:
			s.failed[id]++
			s.verdicts++
		case outcome == proof.Passed:
			s.failed[id] = 0
			s.verdicts++
		}
	}
}

// see keeps since when GPUs are free, as decisions have seen them.
func (s *storm) see() {
	for i := range s.node.GPUs {
		g := s.gpu(i)
		_, runs := s.runs[g.ID]
		r, _ := s.last.State.Of(g.ID)
		if runs || r.Running != nil || len(g.Holders) > 0 || len(g.Processes) > 0 || g.Unread != "" {
			s.free[g.ID] = 0
		} else if s.free[g.ID] == 0 {
			s.free[g.ID] = max(s.elapsed, 1)
		}
	}
}

func (s *storm) of(id gpu.DeviceID) *proof.GPU {
	i := slices.IndexFunc(s.node.GPUs, func(g proof.GPU) bool { return g.ID == id })
	return s.gpu(i)
}

// BenchmarkDecision is a decision for nodes of 8 and 64 GPUs that are all proved: while nothing is due, and while all are.
func BenchmarkDecision(b *testing.B) {
	for _, gpus := range []int{8, 64} {
		for name, after := range map[string]time.Duration{"nothing-due": hour, "all-due": 8 * day} {
			b.Run(fmt.Sprintf("%d-%s", gpus, name), func(b *testing.B) {
				w := newWorld(b, gpus)
				w.policy.MaxPerNode = 8
				w.proveAll()
				w.pass(after)
				for _, one := range w.last.Begin {
					w.end(one.GPU, proof.Passed)
				}
				w.pass(minute)
				if r := w.record(coretest.GPU(0)); r.Last == nil {
					b.Fatalf("%+v", r)
				}
				b.ReportAllocs()
				for b.Loop() {
					w.policy.Next(w.state, w.node, w.now)
				}
			})
		}
	}
}
