package storm

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// kind is a kind of fault.
type kind struct {
	name    string
	weight  int
	domains []string         // of two faults of the same GPU (or of none) that share one, only one is in force
	lasts   [2]time.Duration // minimum and maximum; zero: 100 ms to 1.5 s
	noticed bool             // an agent must notice it if it lasts long enough
	gpu     bool             // it concerns one GPU
	mig     bool             // in MIG mode
	policy  bool             // it needs a policy
	driver  bool             // it concerns the driver as a whole
	hangs   bool             // calls do not return
	draw    func(*rand.Rand, *fault)
	begin   func(*fault) error // errSkipped: it is not possible now
	end     func(*fault) error // nil if the fault is over immediately
}

var errSkipped = errors.New("not possible now")

// fault is one fault of a plan.
type fault struct {
	number    int
	kind      *kind
	at, lasts time.Duration // since the round began; lasts 0 = it is over immediately
	slot      int           // -1 = it concerns no GPU
	call      string
	code      string
	count     int
	took      time.Duration // of a slow call
	alone     bool          // the GPU has no other fault that lasts meanwhile
	skipped   bool
}

func (f *fault) String() string {
	words := []string{f.kind.name}
	if f.slot >= 0 {
		words = append(words, fmt.Sprintf("GPU %d", f.slot))
	}
	for _, w := range []string{f.call, f.code} {
		if w != "" {
			words = append(words, w)
		}
	}
	if f.count != 0 {
		words = append(words, fmt.Sprint(f.count))
	}
	if f.took != 0 {
		words = append(words, f.took.String())
	}
	if f.lasts != 0 {
		words = append(words, fmt.Sprintf("for %v", f.lasts.Round(time.Millisecond)))
	}
	return strings.Join(words, " ")
}

// planned are the conditions of a plan.
type planned struct {
	slots  []int // of the GPUs that may have faults
	mig    []int // those of them in MIG mode
	policy bool  // there is one
	driver bool  // the driver as a whole may fail, in the last two thirds
	faults int
	length time.Duration
	notice time.Duration // an agent must notice a fault that lasts longer
	hangs  time.Duration // and so much more if calls hang
}

// plan draws the faults of a round, in order of their beginnings: first some that last for so long that an agent must notice them,
// then others beside them. There are fewer than requested if there is no room for more.
func (s *storm) plan(in planned) []*fault {
	var faults []*fault
	fill := func(n int, draw func(planned) *fault) {
		for range 20 * in.faults {
			if len(faults) >= n {
				return
			}
			if f := draw(in); f != nil && !slices.ContainsFunc(faults, f.clashes) {
				faults = append(faults, f)
			}
		}
	}
	fill(in.faults/10, s.drawLong)
	fill(in.faults, s.draw)
	slices.SortStableFunc(faults, func(a, b *fault) int { return cmp.Compare(a.at, b.at) })
	return faults
}

// draw draws a fault; nil if its kind is not possible.
func (s *storm) draw(in planned) *fault {
	f := &fault{at: time.Duration(s.random.Int64N(int64(in.length))), slot: -1, kind: s.pick()}
	if f.kind.end != nil {
		least, most := f.kind.lasts[0], f.kind.lasts[1]
		if most == 0 {
			least, most = 100*time.Millisecond, 1500*time.Millisecond
		}
		f.lasts = min(between(s.random, least, most), in.length+overtime-f.at)
	}
	return s.place(f, in)
}

// drawLong draws a fault that an agent must notice.
func (s *storm) drawLong(in planned) *fault {
	f := &fault{slot: -1, kind: s.pick(), alone: s.random.IntN(3) > 0}
	if !f.kind.noticed {
		return nil
	}
	f.lasts = between(s.random, in.notice, in.notice+in.notice/4)
	if f.kind.hangs {
		f.lasts += in.hangs
	}
	free := in.length + overtime - f.lasts
	if free <= 0 {
		return nil
	}
	f.at = between(s.random, 0, free)
	return s.place(f, in)
}

// place draws the GPU of a fault and its details; nil if it is not possible.
func (s *storm) place(f *fault, in planned) *fault {
	switch {
	case slices.Contains(s.o.without, f.kind.name):
		return nil
	case f.kind.driver && (!in.driver || f.at < in.length/3):
		return nil
	case f.kind.mig && len(in.mig) == 0, f.kind.policy && !in.policy:
		return nil
	case f.kind.mig:
		f.slot = one(s.random, in.mig...)
	case f.kind.gpu:
		f.slot = one(s.random, in.slots...)
	}
	if f.kind.draw != nil {
		f.kind.draw(s.random, f)
	}
	return f
}

// overtime is how much longer than a round its faults may last.
const overtime = 1500 * time.Millisecond

// clashes reports whether two faults can't be in force at the same time.
func (f *fault) clashes(g *fault) bool {
	const gap = 20 * time.Millisecond
	shared := slices.ContainsFunc(f.kind.domains, func(d string) bool { return slices.Contains(g.kind.domains, d) })
	alone := f.slot >= 0 && (f.alone || g.alone) && len(f.kind.domains) > 0 && len(g.kind.domains) > 0
	return f.slot == g.slot && (shared || alone) &&
		f.at < g.at+g.lasts+gap && g.at < f.at+f.lasts+gap
}

// pick draws a kind by weight.
func (s *storm) pick() *kind {
	total := 0
	for _, k := range s.kinds {
		total += k.weight
	}
	n := s.random.IntN(total)
	at := slices.IndexFunc(s.kinds, func(k kind) bool { n -= k.weight; return n < 0 })
	return &s.kinds[at]
}

// one draws one of a list.
func one[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// between draws a time.
func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(r.Int64N(int64(most-least)))
}

// step is the beginning or the end of a fault.
type step struct {
	at  time.Duration
	of  *fault
	end bool
}

// play makes the faults of a plan begin and end. The time that this takes does not count, so that no fault lasts for less time than
// planned. Afterwards none is in force.
func (s *storm) play(faults []*fault, first int, each func()) {
	var steps []step
	for i, f := range faults {
		f.number = first + i
		steps = append(steps, step{f.at, f, false})
		if f.kind.end != nil {
			steps = append(steps, step{f.at + f.lasts, f, true})
		}
	}
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	var now time.Duration
	for _, d := range steps {
		s.rest(d.at - now)
		now = d.at
		if s.ctx.Err() != nil {
			return
		}
		if d.end {
			s.end(d.of)
		} else {
			s.begin(d.of)
		}
		each()
	}
}

// begin makes a fault begin. A GPU that is not in its slot has none.
func (s *storm) begin(f *fault) {
	lasting := f.slot >= 0 && f.kind.end != nil
	if _, out := s.removed[f.slot]; out || lasting && s.atOnce > 0 && s.lasting >= s.atOnce {
		f.skipped = true
		return
	}
	s.journal.note("#%d %s", f.number, f)
	began := time.Now()
	err := f.kind.begin(f)
	s.onSlow(f, time.Since(began))
	switch {
	case errors.Is(err, errSkipped):
		s.journal.note("#%d skipped", f.number)
		f.skipped = true
		return
	case err != nil:
		s.fail("fault #%d %s: %w", f.number, f, err)
	}
	s.done[f.kind.name]++
	if lasting {
		s.lasting++
	}
}

// end makes a fault end.
func (s *storm) end(f *fault) {
	if f.skipped {
		return
	}
	if f.slot >= 0 {
		s.lasting--
	}
	if _, out := s.removed[f.slot]; out && slices.Contains(f.kind.domains, "action") {
		return
	}
	s.journal.note("#%d over: %s", f.number, f)
	began := time.Now()
	err := f.kind.end(f)
	s.onSlow(f, time.Since(began))
	if err != nil {
		s.fail("end of fault #%d %s: %w", f.number, f, err)
	}
}
