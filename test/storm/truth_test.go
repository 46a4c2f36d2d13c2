package storm

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// cause is why a GPU must not be offered.
type cause string

const (
	lost    cause = "lost"              // off the bus, pulled, without its kernel driver
	verdict cause = "the driver's word" // the recovery action is not none
	fatal   cause = "a fatal XID"       // heard, and not reset since
	hung    cause = "hanging calls"     // every check of it hangs
	daemon  cause = "no MPS daemon"     // it is shared by MPS, and nothing answers
)

// truth is what is known to be wrong with the machine, and since when. The runner tells it of a fault before the
// fault is made to go and after it was made to come, so that it never claims too much. It is safe for concurrent
// use.
type truth struct {
	bound time.Duration // from a fault to the end of every offer
	hangs time.Duration // how much longer it takes if it is calls that hang

	mu     sync.Mutex
	slots  map[int]*slot
	owner  map[string]int       // the slot of each unit that ever was
	gone   map[string]time.Time // units that are no more, and since when
	back   map[string]time.Time // units that are again, since when
	former map[string]former    // devices that are no more, whatever they were offered as
	new    map[string]time.Time // units that were seen before the truth was told of them, since when
	driver time.Time            // since when it is unloaded; zero = it is not
	blamed bool                 // something happened to the driver as a whole since the last calm
	claims map[cause]int        // how many held
	stalls int                  // how often the test's own machine stood still
}

// former is a device that was in a slot until a time.
type former struct {
	slot int
	left time.Time
}

// slot is what is true of a GPU.
type slot struct {
	bad    map[cause]time.Time
	ended  func(cause, time.Duration) // is told of causes that are over
	blamed bool                       // something happened to it since the last calm
	blind  int                        // faults of calls in force: it may be unable to say what the driver wants
	wants  bool                       // the driver wants something done about it
	resets int                        // how often it may have looked reset: from then on an earlier XID is no claim
	reset  time.Time                  // the latest of them
	units  []string                   // that it should be offered as
	all    []string                   // devices: the GPU, and its instances
}

func newTruth(bound, hangs time.Duration) *truth {
	return &truth{bound: bound, hangs: hangs, slots: map[int]*slot{}, owner: map[string]int{}, gone: map[string]time.Time{}, back: map[string]time.Time{}, former: map[string]former{}, new: map[string]time.Time{}, claims: map[cause]int{}}
}

// own enters the GPU in a slot, the devices that are there to be offered, and the units of each. Those that were there
// before and are no more are gone. A GPU in MIG mode may be offered as a whole while it fails to say that it is cut.
func (t *truth) own(n int, uuid string, devices []string, units func(devices ...string) []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.slots[n] == nil {
		t.slots[n] = &slot{bad: map[cause]time.Time{}, ended: t.held}
	}
	all := append([]string{uuid}, devices...)
	for _, id := range t.slots[n].all {
		t.former[id] = former{n, time.Now()}
	}
	for _, id := range all {
		delete(t.former, id)
	}
	now := units(all...)
	for id, at := range t.owner {
		if at == n && !slices.Contains(now, id) && t.gone[id].IsZero() {
			t.gone[id] = time.Now()
		}
	}
	for _, id := range now {
		t.owner[id] = n
		if !t.gone[id].IsZero() {
			t.back[id] = time.Now()
		}
		delete(t.gone, id)
		delete(t.new, id)
	}
	t.slots[n].units, t.slots[n].all = units(devices...), all
}

// change changes what is true of a slot.
func (t *truth) change(n int, how func(*slot)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	how(t.slots[n])
}

// begin enters a cause, since now.
func (s *slot) begin(c cause) {
	if s.bad[c].IsZero() {
		s.bad[c] = time.Now()
	}
}

// end enters that a cause is over, and counts for how long it was.
func (s *slot) end(c cause) {
	if since, there := s.bad[c]; there {
		s.ended(c, time.Since(since))
	}
	delete(s.bad, c)
}

// held counts the claims that stood for so long that a unit which was offered would have been seen.
func (t *truth) held(c cause, lasted time.Duration) {
	if c == hung {
		lasted -= t.hangs
	}
	if lasted > t.bound {
		t.claims[c]++
	}
}

// renewed enters that the GPU may look as if it had been reset.
func (s *slot) renewed() {
	s.resets, s.reset = s.resets+1, time.Now()
	s.end(fatal)
}

// blindfold enters that the GPU may be unable to say what the driver wants. What it has said for long enough
// stands all the same.
func (s *slot) blindfold(bound time.Duration) {
	s.blind++
	if since := s.bad[verdict]; !since.IsZero() && time.Since(since) < bound {
		s.end(verdict)
	}
}

// readable enters that the calls about a GPU work again. What was cut anew meanwhile could not be known.
func (t *truth) readable(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.slots[n].unblind()
	for id := range t.gone {
		if t.owner[id] == n {
			t.gone[id] = time.Now()
		}
	}
	for id, f := range t.former {
		if f.slot == n {
			t.former[id] = former{n, time.Now()}
		}
	}
}

func (s *slot) unblind() {
	if s.blind--; s.blind == 0 && s.wants {
		s.begin(verdict)
	}
}

// want enters whether the driver wants something done.
func (s *slot) want(yes bool) {
	switch s.wants = yes; {
	case !yes:
		s.end(verdict)
		s.renewed() // which is how a reset looks
	case s.blind == 0:
		s.begin(verdict)
	}
}

// all changes what is true of every slot, and blames the driver as a whole.
func (t *truth) all(how func(*slot)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blamed = true
	for _, s := range t.slots {
		how(s)
	}
}

// stall enters that the machine on which the test runs stood still: what an agent was late for, it may have been
// late for because of that, and a call of the driver may have seemed to hang.
func (t *truth) stall(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blamed, t.stalls = true, t.stalls+1
	later := func(at time.Time) time.Time {
		if at.IsZero() {
			return at
		}
		return at.Add(d)
	}
	t.driver = later(t.driver)
	for id, at := range t.gone {
		t.gone[id] = later(at)
	}
	for id, at := range t.back {
		t.back[id] = later(at)
	}
	for _, s := range t.slots {
		for c, at := range s.bad {
			s.bad[c] = later(at)
		}
	}
}

// load enters whether the driver is loaded. It may look reset either way.
func (t *truth) load(is bool) {
	t.all((*slot).renewed)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.driver = time.Now(); is {
		t.driver = time.Time{}
	}
}

// broken says since when and why a unit is broken so that it must not be offered any more; zero if nothing is known
// against it.
func (t *truth) broken(id string) (since time.Time, why cause) {
	first := func(at time.Time, c cause) {
		if !at.IsZero() && (since.IsZero() || at.Before(since)) {
			since, why = at, c
		}
	}
	first(t.driver, "no driver")
	first(t.gone[id], "being no more")
	for c, at := range t.slots[t.owner[id]].bad {
		if c == hung {
			at = at.Add(t.hangs)
		}
		first(at, c)
	}
	return since, why
}

// judge says what is wrong with telling an orchestrator, at a time, that a unit is healthy or not; nil if
// nothing is known to be.
func (t *truth) judge(id string, healthy bool, at time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, known := t.owner[id]
	if !known {
		return t.stranger(id, at)
	}
	since, why := t.broken(id)
	switch {
	case healthy && !since.IsZero() && at.Sub(since) > t.bound:
		return fmt.Errorf("GPU %d (%s) is offered, %v after %s", n, id, at.Sub(since).Round(time.Millisecond), why)
	case !healthy && !t.blamed && !t.slots[n].blamed && t.gone[id].IsZero():
		return fmt.Errorf("GPU %d (%s) is not offered, and nothing happened to it", n, id)
	}
	return nil
}

// stranger says what is wrong with a unit that is not known: nothing, if the runner is about to tell of it.
func (t *truth) stranger(id string, at time.Time) error {
	first, seen := t.new[id]
	switch {
	case !seen:
		t.new[id] = at
	case at.Sub(first) > t.bound:
		return fmt.Errorf("%s was never there", id)
	}
	return nil
}

// units are those that should be offered, by slot.
func (t *truth) units() map[string]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := map[string]int{}
	for n, s := range t.slots {
		for _, id := range s.units {
			of[id] = n
		}
	}
	return of
}

// calm enters that everything is well, and forgets who is gone.
func (t *truth) calm() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blamed, t.driver = false, time.Time{}
	for _, s := range t.slots {
		s.blamed, s.blind, s.wants, s.bad = false, 0, false, map[cause]time.Time{}
	}
	for id := range t.gone {
		delete(t.owner, id)
	}
	clear(t.gone)
	clear(t.former)
	clear(t.new)
}
