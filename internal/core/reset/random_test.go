package reset_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

// storm is a world in which anything happens at random. It has its own books.
type storm struct {
	*world
	*rand.Rand
	books   map[gpu.DeviceID]*book
	runs    gpu.DeviceID  // that is reset; "" = none is
	number  uint64        // of that reset
	called  bool          // nvidia-smi, for it
	asked   bool          // a person has asked for it
	elapsed time.Duration // whatever the clock shows

	attempts, refusals, cancelled int
}

// book is what a test knows of a GPU.
type book struct {
	attempts, refusals int           // in the present fault
	refused, done      bool          // the latest end was that
	retry              time.Duration // not before
	persistence        bool          // to be restored

	day []time.Duration // ends of attempts, also for earlier faults, since a person has asked for one
}

// TestRandom has many steps of random nodes. Whatever happens: one reset at most runs on the node, and it begins on a GPU that asks for one, which no work
// has, with a P2P group that nothing has if that is needed, as often as the policy allows for one fault, and not for a
// third time within a day, after its back-off, also over restarts, boots and clock steps; each GPU that is to be
// repaired is reset or waits; the mode report shows the same, and its state has nothing of it; and each persistence
// mode is restored.
func TestRandom(t *testing.T) {
	var attempts, refusals, cancelled int
	const seeds = 30
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newStorm(t, seed)
			for range 400 {
				s.step()
				if t.Failed() {
					return
				}
			}
			s.calm()
			attempts, refusals, cancelled = attempts+s.attempts, refusals+s.refusals, cancelled+s.cancelled
		})
	}
	t.Logf("%d attempts, %d refusals, %d cancelled", attempts, refusals, cancelled)
	if !t.Failed() && (attempts < 20*seeds || refusals < 5*seeds || cancelled < 5*seeds) {
		t.Error("the test shows too little")
	}
}

func newStorm(t *testing.T, seed uint64) *storm {
	r := rand.New(rand.NewPCG(seed, 28)) //nolint:gosec // a test that repeats
	s := &storm{world: newWorld(t, 1+r.IntN(8)), Rand: r, books: map[gpu.DeviceID]*book{}}
	s.policy.Attempts, s.policy.LoseMIG = 1+r.IntN(2), r.IntN(2) == 0
	for i := range s.node.GPUs {
		g := s.gpu(i)
		s.books[g.ID] = &book{}
		g.NVSwitch = r.IntN(4) == 0
		for j := range s.node.GPUs {
			if j != i && r.IntN(4) == 0 {
				g.Group = append(g.Group, s.gpu(j).ID)
			}
		}
	}
	return s
}

// step changes something, and decides.
func (s *storm) step() {
	s.change(s.gpu(s.IntN(len(s.node.GPUs))))
	s.decide([]time.Duration{0, second, 10 * second, minute, 10 * minute, hour}[s.IntN(6)])
	s.checkStill()
	s.call()
}

// decide decides after a time, and checks the result.
func (s *storm) decide(d time.Duration) {
	before := s.state
	s.elapsed += d
	s.pass(d)
	s.see()
	s.checkReport(before)
	s.checkWaits()
	s.checkBegins()
	s.checkRestore()
}

// change changes the node.
func (s *storm) change(g *reset.GPU) {
	switch s.IntN(32) {
	case 0, 1, 2, 3, 4, 5:
		g.Action, g.Cause, g.Repair, g.TakesWork = health.RecoveryReset, "XID_95", health.Reset, false
	case 6, 7:
		g.Action, g.TakesWork = health.RecoveryDrainAndReset, false
	case 8:
		g.Action, g.TakesWork = health.RecoveryAction(s.IntN(12)), s.IntN(2) == 0 //nolint:gosec // of a few
	case 9:
		g.Action, g.ProofFailed, g.TakesWork = health.RecoveryNone, true, s.IntN(2) == 0
	case 10:
		g.NeedsService, g.TakesWork = s.IntN(3) == 0, false
	case 11, 12, 13, 14:
		g.Action, g.Cause, g.Repair, g.ProofFailed, g.NeedsService, g.TakesWork = health.RecoveryNone, "", 0, false, false, true
	case 15:
		g.Holders = [][]string{nil, nil, {"pod default/train"}}[s.IntN(3)]
	case 16:
		g.Processes = [][]string{nil, nil, {"pid 1"}}[s.IntN(3)]
	case 17:
		g.Unread, g.Moving = []string{"", "", "no answer"}[s.IntN(3)], []string{"", "", "it moves"}[s.IntN(3)]
	case 18:
		g.MIG = s.IntN(3) == 0
	case 19:
		s.node.Paused, s.node.Cannot = []string{"", "", "maintenance"}[s.IntN(3)], []string{"", "", "", "no right"}[s.IntN(4)]
	case 20, 21:
		s.restarted()
	case 22:
		s.boot(fmt.Sprint(s.Uint32()))
		for _, b := range s.books {
			b.persistence = false
		}
		s.restarted()
	case 23:
		s.set(time.Duration(s.IntN(1000)-500) * day)
	case 24:
		s.person(g.ID)
	case 25:
		for _, id := range s.last.Restore {
			s.state = s.state.Restored(id)
			s.books[id].persistence = false
		}
	case 26, 27, 28, 29:
		s.free()
	}
}

// free has nothing have a GPU.
func (s *storm) free() {
	s.node.Paused, s.node.Cannot = "", ""
	for i := range s.node.GPUs {
		g := s.gpu(i)
		g.Holders, g.Processes, g.Unread, g.Moving = nil, nil, "", ""
	}
}

// restarted has another process decide, at once: a reset is interrupted.
func (s *storm) restarted() {
	s.restart()
	s.pass(0)
	if s.runs != "" {
		s.ended(reset.Interrupted)
	}
	s.see()
	s.checkBegins()
}

// person has a person reset a GPU, if nothing keeps that from beginning.
func (s *storm) person(id gpu.DeviceID) {
	b, waits := s.policy.ByPerson(s.state, s.node, id)
	g := s.of(id)
	free := s.runs == "" && s.isFree(g) && s.node.Paused == "" && s.node.Cannot == "" && (!g.MIG || s.policy.LoseMIG) && !slices.ContainsFunc(b.With, s.isHeld)
	if free != (len(waits) == 0) {
		s.Errorf("%+v may begin: %t, and waits for %+v", b, free, waits)
	}
	if !free {
		return
	}
	if s.state, b = s.state.BegunByPerson(b, s.now); b.Number == 0 {
		s.Errorf("%+v has not begun", b)
	}
	s.runs, s.number, s.called, s.asked = id, b.Number, false, true
}

func (s *storm) isFree(g *reset.GPU) bool {
	return len(g.Holders)+len(g.Processes) == 0 && g.Unread == "" && g.Moving == ""
}

func (s *storm) isHeld(id gpu.DeviceID) bool { return !s.isFree(s.of(id)) }

// asks reports whether the driver asks for a reset, or a proof does.
func asks(g *reset.GPU) bool {
	return !g.NeedsService && (g.Action == health.RecoveryReset || g.Action == health.RecoveryDrainAndReset || g.Action == health.RecoveryNone && g.ProofFailed)
}

// see has the faults end that are over.
func (s *storm) see() {
	for i := range s.node.GPUs {
		if g := s.gpu(i); g.TakesWork && !asks(g) && (s.runs != g.ID || s.begunNow(g.ID)) {
			s.books[g.ID] = &book{persistence: s.books[g.ID].persistence, day: s.books[g.ID].day}
		}
	}
}

// begunNow reports whether the reset of a GPU has begun with the last decision.
func (s *storm) begunNow(id gpu.DeviceID) bool {
	return slices.ContainsFunc(s.last.Begin, func(b reset.Begin) bool { return b.GPU == id })
}

// checkReport compares with the mode report at the same state.
func (s *storm) checkReport(before reset.State) {
	p := s.policy
	p.Mode = reset.Report
	r := p.Next(before, s.node, s.now)
	want := slices.Clone(s.last.Begin)
	for i := range want {
		want[i].Number = 0
	}
	if len(r.Begin)+len(want) > 0 && !reflect.DeepEqual(r.Begin, want) || !reflect.DeepEqual(r.Waits, s.last.Waits) || !reflect.DeepEqual(r.Restore, s.last.Restore) {
		s.Errorf("report shows\n%+v, and act\n%+v", r, s.last)
	}
	if r.State.Begun != before.Begun || len(r.State.Records) > len(before.Records) {
		s.Errorf("report remembers %+v", r.State)
	}
}

func (s *storm) checkBegins() {
	for _, b := range s.last.Begin {
		g, known := s.of(b.GPU), s.books[b.GPU]
		limit := s.policy.Attempts
		if g.NVSwitch {
			limit = 1
		}
		with := g.Group
		if g.Action != health.RecoveryDrainAndReset {
			with = nil
		}
		switch {
		case s.runs != "":
			s.Errorf("%+v begins beside that of %s", b, s.runs)
		case !asks(g) || !s.isFree(g) || s.node.Paused != "" || s.node.Cannot != "" || g.MIG && !s.policy.LoseMIG:
			s.Errorf("%+v begins on %+v", b, g)
		case !slices.Equal(b.With, with) || slices.ContainsFunc(b.With, s.isHeld):
			s.Errorf("%+v begins, with a P2P group of %v", b, with)
		case known.attempts >= limit || known.refused || known.done && g.Action == health.RecoveryNone:
			s.Errorf("%+v begins after %+v", b, known)
		case len(known.day) > 1 && s.elapsed-known.day[len(known.day)-2] < day:
			s.Errorf("%+v begins %v after the last but one", b, s.elapsed-known.day[len(known.day)-2])
		case s.elapsed < known.retry:
			s.Errorf("%+v begins %v before its back-off is over", b, known.retry-s.elapsed)
		case b.Number == 0 || b.Cause == "":
			s.Errorf("%+v", b)
		}
		s.runs, s.number, s.called, s.asked = b.GPU, b.Number, false, false
	}
}

// checkWaits checks that each GPU that is to be repaired is reset or waits.
func (s *storm) checkWaits() {
	for i := range s.node.GPUs {
		g := s.gpu(i)
		at := slices.IndexFunc(s.last.Waits, func(w reset.Wait) bool { return w.GPU == g.ID })
		runs := s.runs == g.ID || s.begunNow(g.ID)
		if asks(g) && runs == (at >= 0) {
			s.Errorf("%+v runs %t, and waits: %+v", g, runs, s.last.Waits)
		}
	}
	for _, w := range s.last.Waits {
		if w.Text == "" || !w.Until.IsZero() && (!w.Until.After(s.now) || s.last.Wake.After(w.Until)) {
			s.Errorf("%+v at %v, and it wakes at %v", w, s.now, s.last.Wake)
		}
	}
}

func (s *storm) checkRestore() {
	for id, b := range s.books {
		if want := b.persistence && (s.runs != id || s.begunNow(id)); want != slices.Contains(s.last.Restore, id) {
			s.Errorf("%s is to be restored: %t, and %v are", id, want, s.last.Restore)
		}
	}
}

// checkStill checks that a reset that has begun now may go on, if nothing has changed.
func (s *storm) checkStill() {
	if len(s.last.Begin) > 0 {
		if why := s.still(s.last.Begin[0].GPU); why != "" {
			s.Errorf("%+v is cancelled: %s", s.last.Begin[0], why)
		}
	}
}

// call has the reset that runs go on: nvidia-smi is called, or it ends.
func (s *storm) call() {
	if s.runs == "" {
		return
	}
	switch s.IntN(4) {
	case 0:
		on := s.IntN(2) == 0
		s.state = s.state.Calls(s.runs, on)
		s.called, s.books[s.runs].persistence = true, s.books[s.runs].persistence || on
	case 1, 2:
		o := []reset.Outcome{reset.Cancelled, reset.InUse}[s.IntN(2)]
		if s.called {
			o = []reset.Outcome{reset.Done, reset.Done, reset.Done, reset.InUse, reset.Refused, reset.Failed, reset.Interrupted}[s.IntN(7)]
		}
		s.state = s.state.Ended(s.runs, reset.End{Number: s.number, Outcome: o, Text: "text"}, s.now)
		s.ended(o)
	}
}

// ended writes the end of the reset that runs in the books.
func (s *storm) ended(o reset.Outcome) {
	b := s.books[s.runs]
	switch {
	case o == reset.Cancelled || o == reset.Interrupted && !s.called:
		s.cancelled++
		b.retry = s.elapsed + 10*second
		s.runs = ""
		return
	case o == reset.InUse:
		b.retry = s.elapsed + []time.Duration{minute, 5 * minute, 30 * minute, 2 * hour}[min(b.refusals, 3)]
		b.refusals++
		s.refusals++
	default:
		b.retry = s.elapsed + minute
		b.attempts++
		s.attempts++
		if b.day = append(b.day, s.elapsed); s.asked {
			b.day = nil
		}
	}
	b.refused, b.done = o == reset.Refused, o == reset.Done
	s.runs = ""
}

// calm has nothing have a GPU, and each reset succeed without an effect: in the end each GPU waits for something else than time or its turn.
func (s *storm) calm() {
	for range 4 * len(s.node.GPUs) {
		s.free()
		s.decide(3 * hour)
		if s.runs == "" {
			continue
		}
		s.state = s.state.Calls(s.runs, false)
		s.called = true
		s.state = s.state.Ended(s.runs, reset.End{Number: s.number, Outcome: reset.Done}, s.now)
		s.ended(reset.Done)
	}
	for _, w := range s.last.Waits {
		switch w.Code {
		case reset.WaitAttempts, reset.WaitOften, reset.WaitRefused, reset.WaitProof, reset.WaitService, reset.WaitHandedOver, reset.WaitMIG:
		default:
			s.Errorf("%+v", w)
		}
	}
}

func (s *storm) of(id gpu.DeviceID) *reset.GPU {
	return s.gpu(slices.IndexFunc(s.node.GPUs, func(g reset.GPU) bool { return g.ID == id }))
}

// BenchmarkDecision is a decision for a node of 8 GPUs, of which one waits.
func BenchmarkDecision(b *testing.B) {
	w := faultyWorld(b, 8)
	w.try(0, reset.Refused, "not supported")
	b.ReportAllocs()
	for b.Loop() {
		w.policy.Next(w.state, w.node, w.now)
	}
}
