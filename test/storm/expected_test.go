package storm

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// cause is why a GPU must not be offered.
type cause string

const (
	lost      cause = "lost"            // off the bus, removed, without its kernel driver
	actionSet cause = "recovery action" // other than none
	fatal     cause = "fatal XID"       // recorded, and no reset since
	hung      cause = "hanging calls"   // every check of it hangs
	noDaemon  cause = "no MPS daemon"   // it is shared by MPS, and no daemon answers
)

// expectedState is which faults the machine certainly has, and since when. The goroutine that makes a fault removes it here before it
// ends and adds it after it began, so that nothing is required too early or for too long. It is safe for concurrent use.
type expectedState struct {
	bound time.Duration // from a fault until the GPU must not be offered
	hangs time.Duration // and so much more if calls hang

	mu        sync.Mutex
	slots     map[int]*slot
	owner     map[string]int       // the slot of each unit that ever existed
	gone      map[string]time.Time // units that no longer exist, and since when
	returned  map[string]time.Time // units that exist again, and since when
	former    map[string]former    // devices that no longer exist
	unknown   map[string]time.Time // units that an orchestrator had before setDevices, and since when
	unloaded  time.Time            // since when the driver is; zero = it is loaded
	disturbed bool                 // the driver as a whole had a fault since the last quiet period
	noticed   map[cause]int        // faults that lasted so long that an agent had to notice them
	stops     int                  // how often this process did not run for a while
}

// former is a device that was in a slot until a time.
type former struct {
	slot int
	left time.Time
}

// slot is the state of the GPU in a slot.
type slot struct {
	faults    map[cause]time.Time
	cleared   func(cause, time.Duration)
	disturbed bool      // it had a fault since the last quiet period
	failing   int       // faults of calls in force: its recovery action may not be readable
	action    bool      // the driver reports a recovery action
	resets    int       // how often it may have looked reset: an XID before the latest no longer counts
	reset     time.Time // the latest of them
	units     []string  // that must be offered
	all       []string  // devices: the GPU and its instances
}

func newExpectedState(bound, hangs time.Duration) *expectedState {
	return &expectedState{
		bound: bound, hangs: hangs, slots: map[int]*slot{}, owner: map[string]int{}, gone: map[string]time.Time{},
		returned: map[string]time.Time{}, former: map[string]former{}, unknown: map[string]time.Time{}, noticed: map[cause]int{},
	}
}

// setDevices records the GPU in a slot, its devices to offer, and the units of each. A GPU in MIG mode may be offered as a whole while
// its MIG mode can't be read.
func (t *expectedState) setDevices(n int, uuid string, devices []string, units func(devices ...string) []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.slots[n] == nil {
		t.slots[n] = &slot{faults: map[cause]time.Time{}, cleared: t.countNoticed}
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
			t.returned[id] = time.Now()
		}
		delete(t.gone, id)
		delete(t.unknown, id)
	}
	t.slots[n].units, t.slots[n].all = units(devices...), all
}

// change changes the state of a slot.
func (t *expectedState) change(n int, how func(*slot)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	how(t.slots[n])
}

// all changes the state of every slot because of a fault of the driver as a whole.
func (t *expectedState) all(how func(*slot)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.disturbed = true
	for _, s := range t.slots {
		how(s)
	}
}

func (s *slot) set(c cause) {
	if s.faults[c].IsZero() {
		s.faults[c] = time.Now()
	}
}

func (s *slot) clear(c cause) {
	if since, set := s.faults[c]; set {
		s.cleared(c, time.Since(since))
	}
	delete(s.faults, c)
}

// countNoticed counts a fault that is over if it lasted so long that an offer of the GPU would have been a violation.
func (t *expectedState) countNoticed(c cause, lasted time.Duration) {
	if c == hung {
		lasted -= t.hangs
	}
	if lasted > t.bound {
		t.noticed[c]++
	}
}

// looksReset records that the GPU may look as if it had been reset.
func (s *slot) looksReset() {
	s.resets, s.reset = s.resets+1, time.Now()
	s.clear(fatal)
}

// setAction records whether the driver reports a recovery action.
func (s *slot) setAction(action bool) {
	switch s.action = action; {
	case !action:
		s.clear(actionSet)
		s.looksReset()
	case s.failing == 0:
		s.set(actionSet)
	}
}

// hideAction records that the recovery action may not be readable. One that was readable for long enough still counts.
func (s *slot) hideAction(bound time.Duration) {
	s.failing++
	if since := s.faults[actionSet]; !since.IsZero() && time.Since(since) < bound {
		s.clear(actionSet)
	}
}

func (s *slot) showAction() {
	if s.failing--; s.failing == 0 && s.action {
		s.set(actionSet)
	}
}

// readable records that the calls about a GPU work again. Another MIG layout could not be read before.
func (t *expectedState) readable(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.slots[n].showAction()
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

// setLoaded records whether the driver is loaded. GPUs may look reset either way.
func (t *expectedState) setLoaded(loaded bool) {
	t.all((*slot).looksReset)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.unloaded = time.Now(); loaded {
		t.unloaded = time.Time{}
	}
}

// stopped records that this process did not run for a while: all limits are extended, and a driver call may have been overdue.
func (t *expectedState) stopped(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.disturbed, t.stops = true, t.stops+1
	extend := func(times map[string]time.Time) {
		for id, at := range times {
			times[id] = at.Add(d)
		}
	}
	if !t.unloaded.IsZero() {
		t.unloaded = t.unloaded.Add(d)
	}
	extend(t.gone)
	extend(t.returned)
	for _, s := range t.slots {
		for c, at := range s.faults {
			s.faults[c] = at.Add(d)
		}
	}
}

// fault returns since when and why a unit must not be offered; zero if it may be.
func (t *expectedState) fault(id string) (since time.Time, why cause) {
	earliest := func(at time.Time, c cause) {
		if !at.IsZero() && (since.IsZero() || at.Before(since)) {
			since, why = at, c
		}
	}
	earliest(t.unloaded, "unloaded driver")
	earliest(t.gone[id], "removed")
	for c, at := range t.slots[t.owner[id]].faults {
		if c == hung {
			at = at.Add(t.hangs)
		}
		earliest(at, c)
	}
	return since, why
}

// check returns an error if a unit must not be healthy, or unhealthy, at a time.
func (t *expectedState) check(id string, healthy bool, at time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, known := t.owner[id]
	if !known {
		first, seen := t.unknown[id]
		if !seen {
			t.unknown[id] = at // setDevices may follow
		} else if at.Sub(first) > t.bound {
			return fmt.Errorf("%s was never in the machine", id)
		}
		return nil
	}
	since, why := t.fault(id)
	switch {
	case healthy && !since.IsZero() && at.Sub(since) > t.bound:
		return fmt.Errorf("GPU %d (%s) is offered, %v after %s", n, id, at.Sub(since).Round(time.Millisecond), why)
	case !healthy && !t.disturbed && !t.slots[n].disturbed && t.gone[id].IsZero():
		return fmt.Errorf("GPU %d (%s) is not offered, and had no fault", n, id)
	}
	return nil
}

// units are those that must be offered, with their slots.
func (t *expectedState) units() map[string]int {
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

// forget records that there are no faults, and forgets what no longer exists.
func (t *expectedState) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.disturbed, t.unloaded = false, time.Time{}
	for _, s := range t.slots {
		s.disturbed, s.failing, s.action, s.faults = false, 0, false, map[cause]time.Time{}
	}
	maps.DeleteFunc(t.owner, func(id string, _ int) bool { _, gone := t.gone[id]; return gone })
	clear(t.gone)
	clear(t.former)
	clear(t.unknown)
}
