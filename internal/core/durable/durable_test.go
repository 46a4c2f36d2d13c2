package durable_test

import (
	"encoding/json"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
)

// state is one with two times.
type state struct {
	Version  int       `json:"version"`
	ID       string    `json:"boot"`
	BootTime time.Time `json:"bootTime"`
	Was, Due time.Time
}

func (s *state) Booted() (*string, *time.Time) { return &s.ID, &s.BootTime }
func (s *state) EachPast(do func(*time.Time))  { do(&s.Was) }
func (s *state) EachDue(do func(*time.Time))   { do(&s.Due) }
func (s *state) moved(from state) []time.Duration {
	return []time.Duration{s.Was.Sub(from.Was), s.Due.Sub(from.Due)}
}

func TestSetClock(t *testing.T) {
	const hour = time.Hour
	now := time.Date(2026, 11, 27, 9, 0, 0, 0, time.UTC)
	was := state{ID: "1", BootTime: now.Add(-3 * hour), Was: now.Add(-2 * hour), Due: now.Add(hour)}
	for name, test := range map[string]struct {
		boot   string
		booted time.Time
		now    time.Time
		moved  time.Duration
	}{
		"nothing is set":              {"1", was.BootTime, now, 0},
		"the boot time is not exact":  {"1", was.BootTime.Add(time.Millisecond), now, 0},
		"set within a boot":           {"1", was.BootTime.Add(hour), now.Add(hour), hour},
		"set back within a boot":      {"1", was.BootTime.Add(-hour), now.Add(-hour), -hour},
		"another boot":                {"2", now.Add(-hour), now, 0},
		"another boot, and set back":  {"2", now.Add(-5 * hour), now.Add(-4 * hour), -2 * hour},
		"no boot time, and set back":  {"1", time.Time{}, now.Add(-4 * hour), -2 * hour},
		"no boot time, and forward":   {"1", time.Time{}, now.Add(4 * hour), 0},
		"no boot is known":            {"", time.Time{}, now, 0},
		"the boot was not known then": {"1", now.Add(-hour), now, 0},
	} {
		s := was
		if name == "the boot was not known then" {
			s.ID, s.BootTime = "", time.Time{}
		}
		durable.SetClock(&s, test.boot, test.booted, test.now)
		for _, d := range s.moved(was) {
			if d != test.moved {
				t.Errorf("%s: moved by %v, want %v", name, d, test.moved)
			}
		}
		if set := s.BootTime.Sub(test.booted).Abs(); s.ID != test.boot || set > time.Millisecond {
			t.Errorf("%s: boot %q at %v", name, s.ID, s.BootTime)
		}
	}
}

// Times that were moved by as much as can be can still be written and read.
func TestBounds(t *testing.T) {
	first := time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC)
	s := state{ID: "1", BootTime: first.Add(math.MaxInt64), Was: first, Due: first.Add(time.Hour)}
	durable.SetClock(&s, "1", first, first)
	if err := durable.Check(&s); err != nil || s.Was.Before(first) {
		t.Errorf("%v: %+v", err, s)
	}
	if _, err := json.Marshal(s); err != nil {
		t.Error(err)
	}
	for _, out := range []time.Time{first.Add(-1), time.Date(9000, 1, 1, 0, 0, 0, 1, time.UTC)} {
		for _, s := range []state{{BootTime: out}, {Was: out}, {Due: out}} {
			if err, ok := errors.AsType[*durable.ContentError](durable.Check(&s)); !ok || err.Why != "it has a time that no clock shows" {
				t.Errorf("%+v: %v", s, err)
			}
		}
	}
}

func TestParse(t *testing.T) {
	fine := func(state) error { return nil }
	text, err := durable.Encode(state{Version: 3, ID: "1"})
	if s, parseErr := durable.Parse(text, len(text), 3, fine); err != nil || parseErr != nil || s.ID != "1" {
		t.Errorf("%v, %v, %+v", err, parseErr, s)
	}
	if _, err := durable.Parse(text, len(text)-1, 3, fine); err == nil || err.Error() == "" {
		t.Error("it is too long")
	}
	bad := errors.New("bad")
	if s, err := durable.Parse(text, len(text), 3, func(state) error { return bad }); !errors.Is(err, bad) || s.ID != "" {
		t.Errorf("refused by the check: %v, %+v", err, s)
	}
	_, err = durable.Parse(text, len(text), 4, fine)
	version, ok := errors.AsType[*durable.VersionError](err)
	if !ok || version.Version != 3 || version.Error() != "its version is 3, and this program reads 4" {
		t.Error(version)
	}
	if err := (&durable.ContentError{GPU: "GPU-1", Why: "no time"}); err.Error() != "the record of GPU-1: no time" {
		t.Error(err)
	}
}
