package kmsg

import (
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
)

const second = 1_000_000 // of the log

func ageOf(least, most time.Duration) health.Age { return health.Age{Least: least, Most: most} }

// The age of a line is what its reading and the clock of the log agree on. A clock that contradicts the reading is not
// used.
func TestAgeByTheClockOfTheLog(t *testing.T) {
	const s = time.Second
	at := func(least, most time.Duration) clock {
		return func() (time.Duration, time.Duration, bool) { return least, most, true }
	}
	unknown := func() (time.Duration, time.Duration, bool) { return 0, 0, false }
	for _, c := range []struct {
		name   string
		age    health.Age
		logged time.Duration
		now    clock
		want   health.Age
	}{
		{"no clock", ageOf(2*s, 12*s), 100 * s, nil, ageOf(2*s, 12*s)},
		{"a clock that fails", ageOf(2*s, 12*s), 100 * s, unknown, ageOf(2*s, 12*s)},
		{"a line without a time", ageOf(2*s, 12*s), 0, at(105*s, 109*s), ageOf(2*s, 12*s)},
		{"within", ageOf(2*s, 12*s), 100 * s, at(105*s, 109*s), ageOf(5*s, 9*s)},
		{"in part", ageOf(2*s, 12*s), 100 * s, at(99*s, 103*s), ageOf(2*s, 3*s)},
		{"later than its reading", ageOf(2*s, 12*s), 100 * s, at(90*s, 101*s), ageOf(2*s, 12*s)},
		{"before the reading before", ageOf(2*s, 12*s), 100 * s, at(900*s, 904*s), ageOf(2*s, 12*s)},
		{"read as it was logged", ageOf(2*s, 2*s), 100 * s, at(100*s, 104*s), ageOf(2*s, 2*s)},
		{"from before the start", health.UnknownAge, 100 * s, at(3698*s, 3702*s), ageOf(3598*s, 3602*s)},
		{"from before the start, no clock", health.UnknownAge, 100 * s, nil, health.Age{Most: math.MaxInt64}},
	} {
		if got := byClock(c.age, c.logged, c.now); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// A line of syslog(2) has its age, however late it is read: by the clock of the log to two seconds, and without that
// to the time between two reads. Lines that are read together are as many faults as they are by their own times.
func TestAgeOfLateLines(t *testing.T) {
	const s = time.Second
	for name, c := range map[string]struct {
		ahead time.Duration // of the clock of the log before the machine's; negative = no clock
		want  []health.Age
	}{
		"clock":             {0, []health.Age{ageOf(9*s, 12*s), ageOf(2*s, 6*s)}},
		"no clock":          {-1, []health.Age{ageOf(2*s, 12*s), ageOf(2*s, 12*s)}},
		"a clock that errs": {time.Hour, []health.Age{ageOf(2*s, 12*s), ageOf(2*s, 12*s)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				boot := time.Now().Add(-1000 * time.Second)
				b := &buffer{}
				log := b.log()
				if c.ahead >= 0 {
					log.clock = func() (time.Duration, time.Duration, bool) {
						now := time.Since(boot) + c.ahead
						return now - clockTolerance, now + clockTolerance, true
					}
				}
				var mu sync.Mutex
				var got []Line
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error)
				go func() {
					done <- log.Follow(ctx, 0, func(l Line) { mu.Lock(); defer mu.Unlock(); got = append(got, l) })
				}()
				time.Sleep(9 * time.Second) // at 1009 s the agent has not read what was logged at 1001 s and 1008 s
				b.set(ringXID(1001*second, 1, 109) + ringXID(1002*second, 1, 109) + ringXID(1008*second, 1, 109))
				time.Sleep(4 * time.Second)
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				var ages []health.Age
				for _, l := range got {
					ages = append(ages, l.Age)
				}
				if !slices.Equal(ages, c.want) {
					t.Errorf("%v, want %v", ages, c.want)
				}
				cancel()
				if err := <-done; !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
		})
	}
}

// A line that is read at the start has its age by the clock of the log.
func TestAgeOfPresentLines(t *testing.T) {
	b := &buffer{text: ringXID(100*second, 1, 109)}
	log := b.log()
	log.clock = func() (time.Duration, time.Duration, bool) { return 3698 * time.Second, 3702 * time.Second, true }
	got, err := log.Read(t.Context(), 0)
	want := ageOf(3598*time.Second, 3602*time.Second)
	if err != nil || len(got.Lines) != 1 || got.Lines[0].Age != want || got.Lines[0].Observation().Age != want {
		t.Errorf("%+v, %v", got, err)
	}
}

// No line of the machine's own log is of the future, by the clock that is supposed to be the log's.
func TestClockOfTheRealLog(t *testing.T) {
	log, err := OpenAny("/dev/kmsg")
	if err != nil {
		t.Skip(err)
	}
	defer func() { _ = log.Close() }()
	var text strings.Builder
	if err := log.present(func(r io.Reader) error {
		_, err := io.CopyBuffer(struct{ io.Writer }{&text}, struct{ io.Reader }{r}, make([]byte, recordSize))
		return err
	}); err != nil {
		t.Skip(err)
	}
	_, most, ok := log.clock()
	for record := range strings.Lines(text.String()) {
		if head, _, isRecord := parseRecord(record); ok && isRecord && head.at > most {
			t.Fatalf("%s is after %v", record, most)
		}
	}
}
