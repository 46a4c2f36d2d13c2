package storm

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// options are the size of a test.
type options struct {
	seed    uint64
	faults  int
	lasts   time.Duration // minimum
	slack   float64
	without []string // kinds of faults that are left out
}

// limit is a time limit on this machine.
func (o options) limit(d time.Duration) time.Duration { return time.Duration(float64(d) * o.slack) }

func optionsFromEnvironment(t testing.TB) options {
	t.Helper()
	o := options{seed: uint64(time.Now().UnixNano()), faults: 100, slack: 1}
	read := func(name string, set func(string) error) {
		if text := os.Getenv("TANDEM_STORM_" + name); text != "" {
			if err := set(text); err != nil {
				t.Fatalf("TANDEM_STORM_%s=%s: %v", name, text, err)
			}
		}
	}
	read("SEED", func(s string) (err error) { o.seed, err = strconv.ParseUint(s, 10, 64); return err })
	read("FAULTS", func(s string) (err error) { o.faults, err = strconv.Atoi(s); return err })
	read("FOR", func(s string) (err error) { o.lasts, err = time.ParseDuration(s); return err })
	read("SLACK", func(s string) (err error) { o.slack, err = strconv.ParseFloat(s, 64); return err })
	read("WITHOUT", func(s string) error { o.without = strings.Split(s, ","); return nil })
	t.Logf("TANDEM_STORM_SEED=%d", o.seed)
	return o
}

// storm is what the tests with one agent and with two share: a machine, the faults that are in force, and the first violation of
// an invariant.
type storm struct {
	*simdriver.Machine
	t       testing.TB
	ctx     context.Context // ends with the first violation, or the test
	cancel  context.CancelFunc
	o       options
	random  *rand.Rand // of the plan
	journal *journal
	stopped atomic.Int64 // nanoseconds for which this process did not run

	mu        sync.Mutex
	violation error

	// of the goroutine that makes faults
	kinds   []kind
	atOnce  int                // maximum of GPUs with a fault that lasts; 0 = any
	lasting int                // faults of GPUs in force
	removed map[int]removedGPU // GPUs that are not in their slots
	done    map[string]int     // faults by kind
	moves   int                // changes of indices since the last quiet period
	lookups int                // by index that reached a GPU which hangs, in the whole run
	onSlow  func(*fault, time.Duration)
}

func newStorm(t testing.TB, o options) *storm {
	ctx, cancel := context.WithCancel(t.Context())
	return &storm{
		Machine: simdriver.Start(t, "h100x8"), t: t, ctx: ctx, cancel: cancel, o: o,
		random: rand.New(rand.NewPCG(o.seed, 0)), journal: &journal{began: time.Now()},
		removed: map[int]removedGPU{}, done: map[string]int{}, onSlow: func(*fault, time.Duration) {},
	}
}

// fail records the first violation and ends the test.
func (s *storm) fail(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.violation == nil && s.ctx.Err() == nil {
		s.violation = fmt.Errorf("at %s: %w", time.Now().Format(time.TimeOnly), fmt.Errorf(format, args...))
		s.journal.note("FAILED: %v", s.violation)
		s.cancel()
	}
}

// report fails the test if there was a violation, with what preceded it.
func (s *storm) report() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.violation != nil {
		s.t.Errorf("%v\nTANDEM_STORM_SEED=%d\n%s", s.violation, s.o.seed, s.journal)
	}
}

// until waits for a condition and reports whether it was met in time.
func (s *storm) until(limit time.Duration, ok func() bool) bool {
	late, tick := s.late(limit), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
			if late() {
				return ok()
			}
		case <-s.ctx.Done():
			return false
		}
	}
	return true
}

// late returns whether a limit that begins now has passed, without the time for which this process did not run.
func (s *storm) late(limit time.Duration) func() bool {
	began, stopped := time.Now(), s.stopped.Load()
	return func() bool {
		return time.Since(began)-time.Duration(s.stopped.Load()-stopped) > s.o.limit(limit)
	}
}

// rest waits for d or the end of the test.
func (s *storm) rest(d time.Duration) {
	select {
	case <-time.After(d):
	case <-s.ctx.Done():
	}
}

// tally is the number of faults by kind.
func (s *storm) tally() string {
	total, words := 0, []string{}
	for _, name := range slices.Sorted(maps.Keys(s.done)) {
		total += s.done[name]
		words = append(words, fmt.Sprintf("%s %d", name, s.done[name]))
	}
	return fmt.Sprintf("%d faults: %s", total, strings.Join(words, ", "))
}

// journal keeps the latest lines of the agents' logs and of what was done. It is safe for concurrent use.
type journal struct {
	began time.Time
	mu    sync.Mutex
	lines []string
}

const journalLines = 600

// Write adds a line of an agent's log.
func (j *journal) Write(line []byte) (int, error) {
	if _, text, found := bytes.Cut(line, []byte(" level=")); found { // without its time
		j.note("  agent  %s", bytes.TrimSpace(text))
	} else {
		j.note("  agent  %s", bytes.TrimSpace(line))
	}
	return len(line), nil
}

func (j *journal) note(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.lines) == journalLines {
		j.lines = j.lines[1:]
	}
	j.lines = append(j.lines, fmt.Sprintf("%10.3f ", time.Since(j.began).Seconds())+fmt.Sprintf(format, args...))
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, "\n")
}

var must = check.NoError
