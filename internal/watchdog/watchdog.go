// Package watchdog tells whether the goroutines of an agent still turn. Each long-lived one beats whenever it comes
// round and says when it will be back; one that is not is stuck, in our code, on a disk or in a peer that does not
// read. Driver calls are watched where they are made.
package watchdog

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Registry has a line for each loop. It is safe for concurrent use; a nil *Board notes nothing.
type Registry struct {
	mu    sync.Mutex
	loops map[*Task]Status
}

// NewRegistry returns an empty board.
func NewRegistry() *Registry { return &Registry{loops: map[*Task]Status{}} }

// Task is one goroutine on a board. A nil *Loop does nothing.
type Task struct{ board *Registry }

// Status is the latest of a loop.
type Status struct {
	Name   string
	Began  time.Time
	Last   time.Time     // its latest beat
	Within time.Duration // it said to be back within this time; 0 = it waits for what may never come
	Beats  uint64
}

// slack is what a loaded machine may add to what a loop promised.
const slack = 5 * time.Second

// Late reports whether the loop is not back though it should be.
func (s Status) Late(now time.Time) bool { return s.Within > 0 && now.Sub(s.Last) > s.Within+slack }

// Register enters a loop, which promises nothing yet. Leave when it ends.
func (b *Registry) Register(name string) *Task {
	if b == nil {
		return nil
	}
	l := &Task{b}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.loops[l] = Status{Name: name, Began: now, Last: now}
	return l
}

// Heartbeat says that the loop has come round and will again within that time; 0 = it is about to wait for something
// that may never come.
func (l *Task) Heartbeat(within time.Duration) {
	if l == nil {
		return
	}
	l.board.mu.Lock()
	defer l.board.mu.Unlock()
	if s, ok := l.board.loops[l]; ok {
		s.Last, s.Within = time.Now(), within
		s.Beats++
		l.board.loops[l] = s
	}
}

// Late reports whether this loop is late.
func (l *Task) Late(now time.Time) bool {
	if l == nil {
		return false
	}
	l.board.mu.Lock()
	defer l.board.mu.Unlock()
	return l.board.loops[l].Late(now)
}

// Done takes the loop off the board.
func (l *Task) Done() {
	if l == nil {
		return
	}
	l.board.mu.Lock()
	defer l.board.mu.Unlock()
	delete(l.board.loops, l)
}

// Tasks are all that have joined and not left, by name and then by age.
func (b *Registry) Tasks() []Status {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]Status, 0, len(b.loops))
	for _, s := range b.loops {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Status) int { return cmp.Or(cmp.Compare(a.Name, b.Name), a.Began.Compare(b.Began)) })
	return all
}

// Late are those of Loops that are late.
func (b *Registry) Late(now time.Time) []Status {
	return slices.DeleteFunc(b.Tasks(), func(s Status) bool { return !s.Late(now) })
}
