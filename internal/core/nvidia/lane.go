package nvidia

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// lane is the way to one GPU, whatever its NVML index is: indices move when a GPU is pulled. One visit at a time
// goes in; if the driver keeps it there, the reader goes on without it, and nobody else enters until it has come
// out:
//
//	reader  visit 2 .. answer  visit 3 .. patience ends     visit 4 .. answer ... visit 3: busy ..... visit 3
//	lane 3                     [call .......................................................] ends, no more calls
//
// So a GPU that hangs costs one thread and one moment, and never has two calls at once. Who is at an index that is
// no known GPU's is asked through a door, which is a lane of nobody.
type lane struct {
	line
	out bool // a visit is in; under mu

	// of whoever is in
	menu menu

	// of the reader
	record  record
	settled bool // what is fixed was read, and the GPU was not away since

	// from the waiter to the reader
	hinted  atomic.Bool // something happened to the GPU
	rebound atomic.Bool // it has its driver back
}

func (s *Session) newLane() *lane {
	return &lane{line: line{have: s.reader.have, work: s.reader.work, index: -1}}
}

// lane is the lane of a GPU. It belongs to the reader.
func (s *Session) lane(id core.DeviceID) *lane {
	l, ok := s.lanes[id]
	if !ok {
		l = s.newLane()
		s.mu.Lock()
		s.lanes[id] = l
		s.mu.Unlock()
	}
	return l
}

// openDoors are n doors in which nobody is. It belongs to the reader.
func (s *Session) openDoors(n int) []*lane {
	doors := slices.DeleteFunc(slices.Clone(s.doors), (*lane).isOut)
	for len(doors) < n {
		l := s.newLane()
		doors = append(doors, l)
		s.mu.Lock()
		s.doors = append(s.doors, l)
		s.mu.Unlock()
	}
	return doors[:n]
}

// forget drops the lanes of GPUs that are not there any more, once their calls are back.
func (s *Session) forget(there []identity) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, l := range s.lanes {
		if !l.isOut() && !slices.ContainsFunc(there, func(i identity) bool { return i.id == id }) {
			delete(s.lanes, id)
		}
	}
	s.inherited = slices.DeleteFunc(s.inherited, func(l *lane) bool { return !l.isOut() })
}

// own are the lanes and doors of the session; under mu.
func (s *Session) own() []*lane {
	all := slices.Clone(s.doors)
	for _, l := range s.lanes {
		all = append(all, l)
	}
	return all
}

// stuck are those of them with a visit that nobody waits for.
func (s *Session) stuck() []*lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(s.own(), func(l *lane) bool { return !l.isStuck() })
}

// away is an error while a call about a GPU is out anywhere but in its own lane: in a door, or in an earlier
// session.
func (s *Session) away(id core.DeviceID) error {
	for _, l := range slices.Concat(s.doors, s.inherited) {
		if err := l.concerns(id); err != nil {
			return err
		}
	}
	return nil
}

// isFree reports whether a GPU can be asked now.
func (s *Session) isFree(id core.DeviceID) bool { return s.away(id) == nil && !s.lane(id).isStuck() }

// enter begins a visit, unless a call about the GPU is out.
func (s *Session) enter(t target) error {
	if t.at.GPU != "" {
		if err := s.away(t.at.GPU); err != nil {
			return err
		}
	}
	l := t.lane
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out {
		return l.why()
	}
	l.out, l.index = true, t.index
	l.last = core.Call{At: t.at, Index: t.index}
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
		return 0, l.why()
	}
	return max(left, time.Millisecond), nil
}

// blocked is an error while a visit that nobody waits for is still in there.
func (l *lane) blocked() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out && l.closed {
		return l.why()
	}
	return nil
}

func (l *lane) isStuck() bool { return l.blocked() != nil }

func (l *lane) isOut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out
}

// concerns is an error while a visit about a GPU is in there.
func (l *lane) concerns(id core.DeviceID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out && l.last.At.GPU == id {
		return l.why()
	}
	return nil
}

// why is what the visit that is in there does; under mu.
func (l *lane) why() error {
	return &StuckError{Call: l.last.Name, At: l.last.At, Index: l.index}
}

// Busy is every call in progress, those of Wait excepted; the oldest first. It is safe for concurrent use.
func (s *Session) Busy() []core.Call {
	s.mu.Lock()
	lines := []*line{&s.reader}
	for _, l := range append(s.own(), s.inherited...) {
		lines = append(lines, &l.line)
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
