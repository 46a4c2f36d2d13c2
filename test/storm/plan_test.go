package storm

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// fault is one thing that is made to happen, and what ends it.
type fault struct {
	number    int
	kind      *kind
	at, lasts time.Duration // since the round began; lasts 0 = it is over at once
	slot      int           // -1 = it concerns no GPU
	call      string
	code      string
	count     int
	took      time.Duration // of a slow call
	alone     bool          // no other lasting one hits the GPU meanwhile
	skipped   bool          // it made no sense when its time came
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

// field is what a plan is drawn for.
type field struct {
	slots   []int // GPUs that things may happen to; the others are bystanders
	cut     []int // those of them in MIG mode
	policy  bool  // there is one
	faults  int
	length  time.Duration
	bound   time.Duration // a fault that lasts longer must have been noticed
	hangs   time.Duration // or, where calls hang, one that lasts so much longer still
	weather bool          // the driver as a whole may fail, in the last two thirds
	without []string      // kinds that do not happen
}

// plan draws the faults of a round, in order of their beginnings: first some that last for so long that they must be
// noticed, then what fits beside them. There are fewer than asked for if there is no room for more.
func plan(r *rand.Rand, in field) []*fault {
	var faults []*fault
	fill := func(n int, draw func(*rand.Rand, field) *fault) {
		for range 20 * in.faults {
			if len(faults) >= n {
				return
			}
			if f := draw(r, in); f != nil && !slices.ContainsFunc(faults, f.clashes) {
				faults = append(faults, f)
			}
		}
	}
	fill(in.faults/10, drawLong)
	fill(in.faults, draw)
	slices.SortStableFunc(faults, func(a, b *fault) int { return cmp.Compare(a.at, b.at) })
	return faults
}

// draw draws a fault; nil if that kind can't happen.
func draw(r *rand.Rand, in field) *fault {
	f := &fault{at: time.Duration(r.Int64N(int64(in.length))), slot: -1, kind: pick(r)}
	if f.kind.lift != nil {
		f.lasts = 100*time.Millisecond + time.Duration(r.Int64N(int64(1400*time.Millisecond)))
		f.lasts = min(f.lasts, in.length+overtime-f.at)
	}
	return f.place(r, in)
}

// drawLong draws a fault that can't go unnoticed.
func drawLong(r *rand.Rand, in field) *fault {
	f := &fault{slot: -1, kind: pick(r), alone: r.IntN(3) > 0}
	f.lasts = in.bound + time.Duration(r.Int64N(int64(in.bound/4)))
	if f.kind.hangs {
		f.lasts += in.hangs
	}
	free := in.length + overtime - f.lasts
	if !f.kind.claims || free <= 0 {
		return nil
	}
	f.at = time.Duration(r.Int64N(int64(free)))
	return f.place(r, in)
}

// place draws where a fault happens, and what; nil if it can't.
func (f *fault) place(r *rand.Rand, in field) *fault {
	switch {
	case slices.Contains(in.without, f.kind.name):
		return nil
	case f.kind.weather && (!in.weather || f.at < in.length/3):
		return nil
	case f.kind.mig && len(in.cut) == 0, f.kind.policy && !in.policy:
		return nil
	case f.kind.mig:
		f.slot = one(r, in.cut...)
	case f.kind.gpu:
		f.slot = one(r, in.slots...)
	}
	if f.kind.draw != nil {
		f.kind.draw(r, f)
	}
	return f
}

// overtime is how much longer a round may last than faults begin in it.
const overtime = 1500 * time.Millisecond

// clashes reports whether two faults can't be in force at once.
func (f *fault) clashes(g *fault) bool {
	const between = 20 * time.Millisecond
	shared := slices.ContainsFunc(f.kind.domains, func(d string) bool { return slices.Contains(g.kind.domains, d) })
	alone := f.slot >= 0 && (f.alone || g.alone) && len(f.kind.domains) > 0 && len(g.kind.domains) > 0
	return f.slot == g.slot && (shared || alone) &&
		f.at < g.at+g.lasts+between && g.at < f.at+f.lasts+between
}

// pick draws a kind by weight.
func pick(r *rand.Rand) *kind {
	total := 0
	for i := range kinds {
		total += kinds[i].weight
	}
	n := r.IntN(total)
	for i := range kinds {
		if n -= kinds[i].weight; n < 0 {
			return &kinds[i]
		}
	}
	return nil
}

// one draws one of a list.
func one[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }
