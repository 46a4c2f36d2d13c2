// Package problemset has what each component needs to report its problems: a set that logs a problem once, and lists it while it lasts.
package problemset

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Set has the problems of a component that last. It logs one once when it begins or changes, and once when it ends. Its methods are safe for
// concurrent use. The zero value has none, and discards what it would log.
type Set struct {
	Log *slog.Logger // set before the first change

	mu      sync.Mutex
	lasting []problem.Problem // in order
}

// List returns the problems that last, in the order of codes, objects and texts.
func (s *Set) List() []problem.Problem {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.lasting)
}

// Put adds a problem in the place of the one with its code and object. If that was not the same, it logs a message with its arguments.
func (s *Set) Put(p problem.Problem, level slog.Level, message string, args ...any) {
	s.mu.Lock()
	before := s.lasting
	s.replace(func(q problem.Problem) bool { return q.Code == p.Code && q.Object == p.Object }, p)
	s.mu.Unlock()
	if !slices.Contains(before, p) {
		s.log(level, message, args...)
	}
}

// End removes the problem with a code and an object. If there was one, it logs a message with its arguments; "" = nothing is logged.
func (s *Set) End(code problem.Code, object, message string, args ...any) {
	s.mu.Lock()
	n := len(s.lasting)
	s.replace(func(q problem.Problem) bool { return q.Code == code && q.Object == object })
	ended := len(s.lasting) < n
	s.mu.Unlock()
	if ended && message != "" {
		s.log(slog.LevelInfo, message, args...)
	}
}

// Replace replaces the problems of a code by one for each text, and logs those that are new as warnings, each behind a prefix.
func (s *Set) Replace(code problem.Code, prefix string, texts ...string) {
	all := problem.Each(code, texts...)
	s.mu.Lock()
	before := s.lasting
	s.replace(func(q problem.Problem) bool { return q.Code == code }, all...)
	s.mu.Unlock()
	for _, p := range all {
		if !slices.Contains(before, p) {
			s.log(slog.LevelWarn, prefix+p.Text)
		}
	}
}

// replace makes a new list, without the problems that match and with others. The caller holds mu.
func (s *Set) replace(matches func(problem.Problem) bool, by ...problem.Problem) {
	next := slices.DeleteFunc(slices.Clone(s.lasting), matches)
	s.lasting = slices.SortedFunc(slices.Values(append(next, by...)), func(a, b problem.Problem) int {
		return cmp.Or(cmp.Compare(a.Code, b.Code), cmp.Compare(a.Object, b.Object), cmp.Compare(a.Text, b.Text))
	})
}

func (s *Set) log(level slog.Level, message string, args ...any) {
	if s.Log != nil {
		s.Log.Log(context.Background(), level, message, args...)
	}
}
