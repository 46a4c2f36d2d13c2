package problemset_test

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
)

// A problem is logged once when it begins or changes, and once when it ends, and is listed while it lasts.
func TestSet(t *testing.T) {
	var log bytes.Buffer
	s := problemset.Set{Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))}
	step := func(about string, do func(), lines []string, want ...string) {
		t.Helper()
		log.Reset()
		do()
		if got := slices.Collect(strings.Lines(log.String())); !slices.Equal(got, lines) {
			t.Errorf("%s: log %q, want %q", about, got, lines)
		}
		var texts []string
		for _, p := range s.List() {
			texts = append(texts, string(p.Code)+" "+p.Object+": "+p.Text)
		}
		if !slices.Equal(texts, want) {
			t.Errorf("%s: %q, want %q", about, texts, want)
		}
	}
	http := func(text string) func() {
		return func() {
			s.Put(problem.Problem{Code: problem.HTTP, Object: ":80", Text: text}, slog.LevelWarn, "no HTTP", "error", text)
		}
	}
	claims := func(texts ...string) func() { return func() { s.Replace(problem.ClaimState, "claims: ", texts...) } }
	step("begins", http("in use"), []string{"level=WARN msg=\"no HTTP\" error=\"in use\"\n"}, "HTTP_SERVER :80: in use")
	step("lasts", http("in use"), nil, "HTTP_SERVER :80: in use")
	step("changes", http("denied"), []string{"level=WARN msg=\"no HTTP\" error=denied\n"}, "HTTP_SERVER :80: denied")
	step("others begin", claims("b", "a"), []string{"level=WARN msg=\"claims: b\"\n", "level=WARN msg=\"claims: a\"\n"},
		"DRA_STATE : a", "DRA_STATE : b", "HTTP_SERVER :80: denied")
	step("one of them ends", claims("a"), nil, "DRA_STATE : a", "HTTP_SERVER :80: denied")
	end := func(object, message string) func() { return func() { s.End(problem.HTTP, object, message) } }
	step("another object", end(":81", "HTTP"), nil, "DRA_STATE : a", "HTTP_SERVER :80: denied")
	step("ends", end(":80", "HTTP"), []string{"level=INFO msg=HTTP\n"}, "DRA_STATE : a")
	step("has ended", end(":80", "HTTP"), nil, "DRA_STATE : a")
	step("all end", claims(), nil)
}

// Any number of goroutines may use a set.
func TestSetConcurrent(t *testing.T) {
	var s problemset.Set
	var running sync.WaitGroup
	for _, object := range []string{"a", "b", "c", "d"} {
		running.Go(func() {
			for range 100 {
				s.Put(problem.Problem{Code: problem.CDI, Object: object, Text: "x"}, slog.LevelWarn, "x")
				_ = s.List()
				s.End(problem.CDI, object, "")
			}
		})
	}
	running.Wait()
	if all := s.List(); len(all) > 0 {
		t.Errorf("%+v", all)
	}
}
