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
	faults  int
	length  time.Duration
	bound   time.Duration // a fault that lasts longer must have been noticed
	weather bool          // the driver as a whole may fail, in the second half
	without []string      // kinds that do not happen
}

// plan draws the faults of a round, in order of their beginnings. There are fewer than asked for if there is no
// room for more.
func plan(r *rand.Rand, in field) []*fault {
	var faults []*fault
	for range 20 * in.faults {
		f := draw(r, in)
		if f == nil || slices.ContainsFunc(faults, f.clashes) {
			continue
		}
		if faults = append(faults, f); len(faults) == in.faults {
			break
		}
	}
	slices.SortStableFunc(faults, func(a, b *fault) int { return cmp.Compare(a.at, b.at) })
	return faults
}

// draw draws a fault; nil if that kind can't happen.
func draw(r *rand.Rand, in field) *fault {
	f := &fault{at: time.Duration(r.Int64N(int64(in.length))), slot: -1, kind: pick(r)}
	switch {
	case slices.Contains(in.without, f.kind.name):
		return nil
	case f.kind.weather && (!in.weather || f.at < in.length/2):
		return nil
	case f.kind.mig && len(in.cut) == 0:
		return nil
	case f.kind.mig:
		f.slot = one(r, in.cut...)
	case f.kind.gpu:
		f.slot = one(r, in.slots...)
	}
	if f.kind.lift != nil {
		f.lasts = lasting(r, in, f.at)
	}
	if f.kind.draw != nil {
		f.kind.draw(r, f)
	}
	return f
}

// clashes reports whether two faults can't be in force at once.
func (f *fault) clashes(g *fault) bool {
	const between = 20 * time.Millisecond
	return f.kind.domain != "" && f.kind.domain == g.kind.domain && f.slot == g.slot &&
		f.at < g.at+g.lasts+between && g.at < f.at+f.lasts+between
}

// lasting draws how long a fault lasts: not long, or, where there is time for it, longer than it may go unnoticed.
func lasting(r *rand.Rand, in field, at time.Duration) time.Duration {
	d := 100*time.Millisecond + time.Duration(r.Int64N(int64(1400*time.Millisecond)))
	long := in.bound + time.Duration(r.Int64N(int64(time.Second)))
	if at+long < in.length+overtime && r.IntN(5) < 2 {
		d = long
	}
	return min(d, in.length+overtime-at)
}

// overtime is how much longer a round may last than faults begin in it.
const overtime = time.Second

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
