package nvidia

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// lane is the way to one GPU, by NVML index. One visit at a time goes in; if the driver keeps it there,
// the reader goes on without it, and nobody else enters until it has come out:
//
//	reader  visit 2 .. answer  visit 3 .. patience ends     visit 4 .. answer ... visit 3: busy ..... visit 3
//	lane 3                     [call .......................................................] ends, no more calls
//
// So a GPU that hangs costs one thread and one moment, and never has two calls at once.
type lane struct {
	line
	out    bool    // a visit is in; under mu
	before []*lane // to the same GPU, of abandoned sessions

	// of whoever is in
	profiles map[shape]string

	// of the reader
	record record

	// from the waiter to the reader
	hinted  atomic.Bool // something happened to the GPU
	rebound atomic.Bool // it has its driver back
}

// lane is the lane of an index. It belongs to the reader.
func (s *Session) lane(index int) *lane {
	for index >= len(s.lanes) {
		l := &lane{
			line:     line{have: s.reader.have, work: s.reader.work, index: len(s.lanes)},
			profiles: map[shape]string{},
		}
		for _, before := range s.inherited {
			if before.index == l.index {
				l.before = append(l.before, before)
			}
		}
		s.mu.Lock()
		s.lanes = append(s.lanes, l)
		s.mu.Unlock()
	}
	return s.lanes[index]
}

// enter begins a visit, unless one is in there.
func (l *lane) enter(at core.Placement) error {
	for _, before := range l.before {
		if err := before.blocked(); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out {
		return l.stuck()
	}
	l.out, l.last = true, core.Call{At: at, Index: l.index}
	return nil
}

// leave ends a visit and says whether somebody waits for it.
func (l *lane) leave() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	awaited := !l.closed
	l.out, l.closed = false, false
	return awaited
}

// giveUp says how much longer to wait for a visit, of whose waiting nothing counts that was before a time.
// There is an error when its call, or all of them together, took too long: then its answer is not awaited any
// more.
func (l *lane) giveUp(from time.Time, patience time.Duration) (time.Duration, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := min(patience, maxVisit*patience-time.Since(from))
	if l.inside {
		if l.last.Since.After(from) {
			from = l.last.Since
		}
		left = min(left, patience-time.Since(from))
	}
	if l.out && left <= 0 {
		l.closed = true
		return 0, l.stuck()
	}
	return max(left, time.Millisecond), nil
}

// blocked is an error while a visit that nobody waits for is still in there.
func (l *lane) blocked() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out && l.closed {
		return l.stuck()
	}
	return nil
}

func (l *lane) isStuck() bool { return l.blocked() != nil }

// stuck is under mu.
func (l *lane) stuck() error {
	return &StuckError{Call: l.last.Name, At: l.last.At, Index: l.index}
}

// Busy is every call in progress, those of Wait excepted (see Deaf); the oldest first. It is safe for concurrent
// use.
func (s *Session) Busy() []core.Call {
	s.mu.Lock()
	lines := []*line{&s.reader}
	for _, l := range s.lanes {
		lines = append(lines, &l.line)
		for _, before := range l.before {
			lines = append(lines, &before.line)
		}
	}
	s.mu.Unlock()
	var calls []core.Call
	for _, l := range lines {
		if c, ok := l.busy(); ok {
			calls = append(calls, c)
		}
	}
	slices.SortStableFunc(calls, func(a, b core.Call) int { return a.Since.Compare(b.Since) })
	return calls
}
