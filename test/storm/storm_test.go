package storm

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// options say how long and how hard it storms.
type options struct {
	seed    uint64
	faults  int
	lasts   time.Duration // at least
	slack   float64
	without []string // kinds of faults that are left out
}

// patient is a bound on this machine.
func (o options) patient(d time.Duration) time.Duration { return time.Duration(float64(d) * o.slack) }

// asked are the options that the environment asks for.
func asked(t testing.TB) options {
	t.Helper()
	o := options{seed: uint64(time.Now().UnixNano()), faults: 100, slack: 1}
	var err error
	read := func(name string, set func(string) error) {
		if text := os.Getenv("TANDEM_STORM_" + name); text != "" && err == nil {
			if err = set(text); err != nil {
				err = fmt.Errorf("TANDEM_STORM_%s=%s: %w", name, text, err)
			}
		}
	}
	read("SEED", func(s string) (err error) { o.seed, err = strconv.ParseUint(s, 10, 64); return err })
	read("FAULTS", func(s string) (err error) { o.faults, err = strconv.Atoi(s); return err })
	read("FOR", func(s string) (err error) { o.lasts, err = time.ParseDuration(s); return err })
	read("SLACK", func(s string) (err error) { o.slack, err = strconv.ParseFloat(s, 64); return err })
	read("WITHOUT", func(s string) error { o.without = strings.Split(s, ","); return nil })
	must(t, err)
	return o
}

const (
	perRound    = 100
	shortest    = 4500 * time.Millisecond // a round
	betweenCalm = 8 * time.Second         // about what a calm takes
)

// Eight whole GPUs.
func TestStorm(t *testing.T) {
	run(t, nil, nil)
}

// Eight GPUs, three of which are cut up, under a policy: some for one workload each, some shared, one kept back.
func TestStormOnMIG(t *testing.T) {
	run(t, []int{2, 4, 6}, shares)
}

// run storms, round after round, and compares what the agent needs early with what it needs in the end.
func run(t *testing.T, cut []int, terms map[int]terms) {
	o := asked(t)
	t.Logf("TANDEM_STORM_SEED=%d", o.seed)
	w := newStorm(t, o, "h100x8", terms, func(m *simdriver.Machine) error {
		for i, n := range cut { // every profile is there from the start, as a resource stays once it was
			if err := m.SetMIG(n, layouts[i]...); err != nil {
				return err
			}
		}
		return nil
	})
	defer w.verdict()
	w.calm(false)
	began, rounds := time.Now(), max(1, (o.faults+perRound-1)/perRound)
	length := max(shortest, o.lasts/time.Duration(rounds)-betweenCalm)
	footprints := []footprint{w.measure()}
	for round := 0; w.ctx.Err() == nil && (round < rounds || time.Since(began) < o.lasts); round++ {
		in := w.field(cut, round)
		in.faults, in.length = min(perRound, o.faults), length
		w.round(plan(w.random, in), round)
		w.calm(in.weather)
		footprints = append(footprints, w.measure())
		if flag.Lookup("test.v").Value.String() == "true" {
			t.Logf("%v: round %d of %d, %s", time.Since(began).Round(time.Second), round+1, rounds, footprints[round+1])
		}
	}
	if w.ctx.Err() == nil {
		early := footprints[(len(footprints)-1)/4]
		end := w.compare(early)
		t.Logf("seed %d, %v\n%s\nat a quarter: %s\nin the end:   %s\n%s", o.seed, time.Since(began).Round(time.Second), w.tally(), early, end, &w.took)
	}
}

// field is a round's: two GPUs stand by, and in one of three the driver as a whole may fail.
func (w *storm) field(cut []int, round int) field {
	slots, err := w.Slots()
	must(w.t, err)
	slices.Sort(slots)
	w.random.Shuffle(len(slots), func(i, j int) { slots[i], slots[j] = slots[j], slots[i] })
	slots = slots[2:]
	standing := func(n int) bool { return !slices.Contains(slots, n) }
	return field{
		slots: slots, policy: w.terms != nil, cut: slices.DeleteFunc(slices.Clone(cut), standing),
		without: w.o.without, bound: w.truth.bound, hangs: w.truth.hangs, weather: round%3 == 2 || w.o.faults <= perRound && w.random.IntN(2) == 0,
	}
}

// tally says what happened how often.
func (w *storm) tally() string {
	total, words := 0, []string{}
	for _, kind := range slices.Sorted(maps.Keys(w.done)) {
		total += w.done[kind]
		words = append(words, fmt.Sprintf("%s %d", kind, w.done[kind]))
	}
	return fmt.Sprintf("%d faults: %s\nclaims that held: %v; the test's machine stood still %d times, %d lookups met a GPU that hangs", total, strings.Join(words, ", "), w.truth.claims, w.truth.stalls, w.raced)
}
