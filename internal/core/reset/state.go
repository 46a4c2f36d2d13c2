package reset

import (
	"cmp"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// State is what is known from before; it is on disk. It is a value: no function changes one that it gets. The zero value is that of a node on which no
// GPU was reset, and it stays as it is while none is.
type State struct {
	Version  int       `json:"version"`
	Boot     string    `json:"boot,omitempty"`    // of the last decision, and below, when that was
	BootTime time.Time `json:"bootTime,omitzero"` // on the clock of all times of the state
	Begun    uint64    `json:"begun,omitempty"`   // resets, ever: the number of the latest
	Records  []Record  `json:"gpus,omitempty"`    // by GPU

	// Watchers means that the programs that watch GPUs were stopped for a reset, and are to be started again.
	Watchers bool `json:"watchersStopped,omitempty"`

	started bool // the first decision of this process was made
}

// Record is what is remembered of a GPU. Attempts, Refusals, NotBegun, Retry and Often are of the present fault: they
// are forgotten when the GPU takes work again. A boot alone does not end a fault: one that is there after it has
// outlasted the boot, too.
type Record struct {
	GPU      gpu.DeviceID `json:"gpu"`
	Attempts int          `json:"attempts,omitempty"` // in which nvidia-smi was called to reset it
	Refusals int          `json:"refusals,omitempty"` // because something has it, or may have it
	NotBegun string       `json:"notBegun,omitempty"` // why the latest reset was cancelled, if that was after Last
	Last     *End         `json:"last,omitempty"`     // of the latest attempt or refusal, also of an earlier fault
	Retry    time.Time    `json:"retry,omitzero"`     // not before
	Running  *Running     `json:"running,omitempty"`

	// Day are the ends of the latest attempts, of the present fault and earlier ones, mostInDay at most. Often means
	// that a person decides about the next one: until a person has the GPU reset, or it takes work again.
	Day   []time.Time `json:"day,omitempty"`
	Often bool        `json:"often,omitempty"`

	// Persistence means that the persistence mode was on before a reset that has not restored it so far. A boot sets the mode anew, and ends that.
	Persistence bool `json:"persistence,omitempty"`
}

// Running is a reset that was begun.
type Running struct {
	Number uint64    `json:"number"`
	Began  time.Time `json:"began"`
	Cause  string    `json:"cause"`            // of the fault
	Called bool      `json:"called,omitempty"` // nvidia-smi may have been called

	ByPerson bool `json:"byPerson,omitempty"` // whether the GPU has a fault does not matter
}

// End is how a reset ended.
type End struct {
	Number  uint64        `json:"number"`
	Outcome Outcome       `json:"outcome"`
	At      time.Time     `json:"at"`
	Took    time.Duration `json:"took"`
	Cause   string        `json:"cause"`
	Text    string        `json:"text,omitempty"` // of nvidia-smi, or why it did not begin
}

// String is the end of a reset in one line.
func (e *End) String() string {
	if e.Text == "" {
		return e.Outcome.String()
	}
	return e.Outcome.String() + ": " + e.Text
}

// Outcome is how a reset ended.
type Outcome uint8

// The outcomes. The zero value is no attempt.
const (
	Cancelled   Outcome = iota // before nvidia-smi was called: what was seen before does not hold any more, or the agent ends
	Done                       // nvidia-smi reset the GPU
	InUse                      // something has the GPU, as is found before nvidia-smi is called or by it, or that is not known: tried again later
	Refused                    // nvidia-smi refused for good: not supported, linked to others, without the right
	Failed                     // nvidia-smi failed, or had not ended in time: an attempt
	Interrupted                // the agent or the node ended during the reset: an attempt if nvidia-smi may have been called
)

var outcomeNames = [...]string{"cancelled", "done", "in-use", "refused", "failed", "interrupted"}

// String returns the name of the outcome.
func (o Outcome) String() string { return outcomeNames[o] }

// MarshalText returns the name of the outcome.
func (o Outcome) MarshalText() ([]byte, error) {
	return gpu.MarshalName(o, outcomeNames[:], "outcome")
}

// UnmarshalText parses the output of MarshalText.
func (o *Outcome) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(o, outcomeNames[:], string(text), "outcome")
}

// Of returns the record of a GPU.
func (s State) Of(id gpu.DeviceID) (Record, bool) {
	if i, known := s.find(id); known {
		return s.Records[i], true
	}
	return Record{}, false
}

// Running returns the record of the GPU that is reset; false if none is.
func (s State) Running() (Record, bool) {
	for i := range s.Records {
		if s.Records[i].Running != nil {
			return s.Records[i], true
		}
	}
	return Record{}, false
}

// BegunByPerson returns the state in which the reset of a person has begun, with its number; 0 if another one runs: then it has not begun.
func (s State) BegunByPerson(b Begin, now time.Time) (State, Begin) {
	if _, runs := s.Running(); runs {
		return s, b
	}
	s = s.clone()
	s.started = true // a reset of an earlier process would be among those that run
	b.Number = s.begin(b, true, durable.Clock(now))
	return s, b
}

// begin has a reset run in a state that may be changed, and returns its number.
func (s *State) begin(b Begin, byPerson bool, now time.Time) uint64 {
	s.Begun++
	s.record(b.GPU).Running = &Running{Number: s.Begun, Began: now, Cause: oneline.Of(b.Cause, maxCause), ByPerson: byPerson}
	return s.Begun
}

// Calls returns the state in which nvidia-smi is about to be called for a reset that runs, and whether the persistence mode is to be restored after it.
func (s State) Calls(id gpu.DeviceID, persistence bool) State {
	return s.change(id, func(r *Record) {
		if r.Running != nil {
			r.Running.Called = true
			r.Persistence = r.Persistence || persistence // that of an earlier reset is restored, too
		}
	})
}

// Restored returns the state in which the persistence mode of a GPU is as it was.
func (s State) Restored(id gpu.DeviceID) State {
	return s.change(id, func(r *Record) { r.Persistence = false })
}

// Ended returns the state after the end of a reset. One whose number is not that of the reset that runs changes nothing.
func (s State) Ended(id gpu.DeviceID, e End, now time.Time) State {
	return s.change(id, func(r *Record) {
		if r.Running != nil && r.Running.Number == e.Number {
			r.end(e, durable.Clock(now))
		}
	})
}

// end records the end of the reset that runs.
func (r *Record) end(e End, now time.Time) {
	was := *r.Running
	r.Running = nil
	text := oneline.Of(e.Text, maxText)
	if e.Outcome == Cancelled || e.Outcome == Interrupted && !was.Called {
		r.NotBegun, r.Retry = cmp.Or(text, e.Outcome.String()), now.Add(afterCancel)
		return
	}
	r.Last = &End{Number: was.Number, Outcome: e.Outcome, At: now, Took: max(e.Took, 0), Cause: was.Cause, Text: text}
	r.NotBegun = ""
	if e.Outcome == InUse {
		r.Refusals = min(r.Refusals+1, maxCount)
		r.Retry = now.Add(afterInUse[min(r.Refusals, len(afterInUse))-1])
		return
	}
	r.Attempts = min(r.Attempts+1, maxCount)
	r.Retry = now.Add(afterAttempt)
	if was.ByPerson { // who goes on by that
		r.Day, r.Often = nil, false
		return
	}
	r.Day = append(r.Day, now)
	r.Day = r.Day[max(len(r.Day)-mostInDay, 0):]
}

// isEmpty reports whether nothing is remembered.
func (r *Record) isEmpty() bool {
	return r.Attempts+r.Refusals+len(r.Day) == 0 && r.NotBegun == "" && r.Last == nil &&
		r.Retry.IsZero() && r.Running == nil && !r.Often && !r.Persistence
}

// over forgets the fault of a GPU.
func (r *Record) over() {
	r.Attempts, r.Refusals, r.NotBegun, r.Retry, r.Often = 0, 0, "", time.Time{}, false
}

// old forgets the attempts of more than a day ago.
func (r *Record) old(now time.Time) {
	r.Day = slices.DeleteFunc(r.Day, func(at time.Time) bool { return now.Sub(at) >= day })
	if len(r.Day) == 0 {
		r.Day = nil
	}
}

// change returns a state in which the record of a GPU is changed, if there is one.
func (s State) change(id gpu.DeviceID, do func(*Record)) State {
	i, known := s.find(id)
	if known {
		s = s.clone()
		do(&s.Records[i])
	}
	return s
}

// record returns the record of a GPU, which is a new one if there is none. It is good until another one is added.
func (s *State) record(id gpu.DeviceID) *Record {
	i, known := s.find(id)
	if !known {
		s.Records = slices.Insert(s.Records, i, Record{GPU: id})
	}
	return &s.Records[i]
}

// find returns where the record of a GPU is, or belongs.
func (s State) find(id gpu.DeviceID) (int, bool) {
	return slices.BinarySearchFunc(s.Records, id, func(r Record, id gpu.DeviceID) int { return cmp.Compare(r.GPU, id) })
}

// clone returns a state that can be changed without effect on s.
func (s State) clone() State {
	s.Records = slices.Clone(s.Records)
	for i := range s.Records {
		r := &s.Records[i]
		if r.Last != nil {
			r.Last = new(*r.Last)
		}
		if r.Running != nil {
			r.Running = new(*r.Running)
		}
		r.Day = slices.Clone(r.Day)
	}
	return s
}

// times are those of a state that may be changed.
type times struct{ *State }

// Booted implements durable.State.
func (s times) Booted() (*string, *time.Time) { return &s.Boot, &s.BootTime }

// EachPast implements durable.State.
func (s times) EachPast(do func(*time.Time)) {
	for i := range s.Records {
		r := &s.Records[i]
		if r.Last != nil {
			do(&r.Last.At)
		}
		if r.Running != nil {
			do(&r.Running.Began)
		}
		for j := range r.Day {
			do(&r.Day[j])
		}
	}
}

// EachDue implements durable.State.
func (s times) EachDue(do func(*time.Time)) {
	for i := range s.Records {
		do(&s.Records[i].Retry)
	}
}
