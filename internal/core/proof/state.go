package proof

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/durable"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// State is what is known from before. Its exported parts are on disk; the rest is seen again after a restart. It is a value: no function changes one that
// it gets. The zero value is that of a node on which no GPU was proved.
type State struct {
	Version   int       `json:"version"`
	Boot      string    `json:"boot,omitempty"`     // of the last decision, and below, when that was
	BootTime  time.Time `json:"bootTime,omitzero"`  // on the clock of all times of the state
	IdleBegan time.Time `json:"idleBegan,omitzero"` // the latest proof for the reason idle
	Begun     uint64    `json:"begun,omitempty"`    // proofs, ever: the number of the latest
	Records   []Record  `json:"gpus,omitempty"`     // by GPU

	started time.Time // the first decision of this process; zero = it is to come
	seen    map[gpu.DeviceID]seen
}

// seen is what this process has seen of a GPU.
type seen struct {
	free  time.Time // since when no work has held it; zero = some may
	sick  bool      // it was unhealthy
	ended time.Time // its latest proof
}

// Record is what is remembered of a GPU.
type Record struct {
	GPU gpu.DeviceID `json:"gpu"`

	// A reset and a fault count from Since on: the beginning of the last proof with a verdict, or when an operator has cleared a failure, or when the GPU was
	// first seen. A boot counts if it is another one than Boot.
	Since time.Time `json:"since"`
	Boot  string    `json:"boot,omitempty"`
	Fault time.Time `json:"fault,omitzero"` // when it last became unhealthy

	Last         *Verdict `json:"last,omitempty"`
	Cleared      bool     `json:"cleared,omitempty"`      // an operator has cleared a failure of Last
	NeedsService bool     `json:"needsService,omitempty"` // it failed, was reset, and failed again

	// Day are the ends of the latest proofs after a reset or a fault, mostInDay at most. A fault that ended one is its
	// end.
	Day []time.Time `json:"day,omitempty"`

	Tries   *Tries   `json:"tries,omitempty"` // since Last; nil = none
	Running *Running `json:"running,omitempty"`
}

// Verdict is the result of a proof.
type Verdict struct {
	Passed  bool               `json:"passed"`
	Reason  Reason             `json:"reason"`
	At      time.Time          `json:"at"` // its end
	Took    time.Duration      `json:"took"`
	Boot    string             `json:"boot,omitempty"`
	Summary string             `json:"summary,omitempty"` // of the command
	Values  map[string]float64 `json:"values,omitempty"`
}

// Tries are proofs without a verdict.
type Tries struct {
	Count  int       `json:"count,omitempty"` // that could not run
	At     time.Time `json:"at"`              // the latest, and below, in which boot, and why
	Boot   string    `json:"boot,omitempty"`
	Retry  time.Time `json:"retry"` // not before, unless the GPU is reset or the node booted
	Detail string    `json:"detail"`
}

// Running is a proof that was begun.
type Running struct {
	Number uint64    `json:"number"`
	Reason Reason    `json:"reason"`
	Began  time.Time `json:"began"`            // to wait until its GPU can be taken
	Runs   time.Time `json:"runs,omitzero"`    // since when it has the GPU, and the command runs; zero = it waits
	Cancel Cancel    `json:"cancel,omitempty"` // why it is to end; its result does not count then
}

// End is the end of a proof.
type End struct {
	GPU     gpu.DeviceID
	Number  uint64 // of its Begin
	Outcome Outcome
	Detail  string        // why it could not run
	Took    time.Duration // of the command
	Summary string
	Values  map[string]float64
}

// Failed reports whether the last verdict is a failure that was not cleared.
func (r *Record) Failed() bool { return r.Last != nil && !r.Last.Passed && !r.Cleared }

// Of returns the record of a GPU.
func (s State) Of(id gpu.DeviceID) (Record, bool) {
	if i := s.index(id); i >= 0 {
		return s.Records[i], true
	}
	return Record{}, false
}

// Runs returns the state in which the GPU of a proof was taken, and its command runs.
func (s State) Runs(b Begin, now time.Time) State {
	i := s.index(b.GPU)
	if i < 0 || s.Records[i].Running == nil || s.Records[i].Running.Number != b.Number {
		return s
	}
	s = s.clone()
	s.Records[i].Running.Runs = durable.Clock(now)
	return s
}

// Ended returns the state after the end of a proof, and whether its outcome counts: not if the proof was cancelled, or the GPU has another one or none.
func (s State) Ended(e End, now time.Time) (State, bool) {
	now = durable.Clock(now)
	i := s.index(e.GPU)
	if i < 0 || s.Records[i].Running == nil || s.Records[i].Running.Number != e.Number {
		return s, false
	}
	s = s.clone()
	s.seen[e.GPU] = seen{sick: s.seen[e.GPU].sick, ended: now} // it is not free for SettleTime again before that has passed
	r := &s.Records[i]
	was := *r.Running
	r.Running = nil
	if was.Cancel == "" && e.Outcome != Cancelled || was.Cancel == Fault {
		r.count(was.Reason, now)
	}
	switch {
	case was.Cancel == ByOperator:
		r.putOff(now, s.Boot, was.Cancel.String(), afterCancel)
		return s, false
	case was.Cancel != "" || e.Outcome == Cancelled:
		return s, false
	case e.Outcome == NotRun:
		r.notRun(now, s.Boot, e.Detail)
	default:
		r.judged(e, was, now, s.Boot)
	}
	return s, true
}

// judged records a verdict. A GPU that failed is proved again only after a reset or a boot: if it fails again, it needs service.
func (r *Record) judged(e End, was Running, now time.Time, boot string) {
	failed := e.Outcome == Failed
	r.NeedsService = failed && r.Failed()
	r.Last = &Verdict{
		Passed: !failed, Reason: was.Reason, At: now, Took: max(e.Took, 0), Boot: boot,
		Summary: oneline.Of(e.Summary, maxSummary), Values: bounded(e.Values),
	}
	r.Since, r.Boot, r.Cleared, r.Tries = was.Began, boot, false, nil
}

// count counts a proof in the day, unless the same fault had one that could not run.
func (r *Record) count(reason Reason, now time.Time) {
	again := reason == Recovery && r.Tries != nil && !r.Fault.After(r.Tries.At)
	if (reason == Reset || reason == Recovery) && !again {
		r.Day = append(r.Day, now)
		r.Day = r.Day[max(len(r.Day)-mostInDay, 0):]
	}
}

// often returns when a GPU may be proved after a fault again, if that was done mostInDay times within a day before.
func (r *Record) often(now time.Time) (until time.Time, is bool) {
	if len(r.Day) < mostInDay {
		return until, false
	}
	until = r.Day[0].Add(day)
	return until, now.Before(until)
}

// notRun counts a check that could not run.
func (r *Record) notRun(now time.Time, boot, why string) {
	count := 1
	if r.Tries != nil {
		count += r.Tries.Count
	}
	r.putOff(now, boot, why, backOff[min(count, len(backOff))-1])
	r.Tries.Count = min(count, maxCount)
}

// putOff has the next proof after a time.
func (r *Record) putOff(now time.Time, boot, why string, wait time.Duration) {
	count := 0
	if r.Tries != nil {
		count = r.Tries.Count
	}
	r.Tries = &Tries{Count: count, At: now, Boot: boot, Retry: now.Add(wait), Detail: oneline.Of(why, maxDetail)}
}

// Clear returns the state in which an operator has cleared the failure of a GPU; false if it has none.
func (s State) Clear(id gpu.DeviceID, now time.Time) (State, bool) {
	i := s.index(id)
	if i < 0 || !s.Records[i].Failed() {
		return s, false
	}
	s = s.clone()
	r := &s.Records[i]
	r.Cleared, r.NeedsService, r.Since, r.Boot, r.Tries = true, false, durable.Clock(now), s.Boot, nil
	return s, true
}

// index is that of a GPU's record; negative = there is none.
func (s State) index(id gpu.DeviceID) int {
	if i, known := s.find(id); known {
		return i
	}
	return -1
}

// find returns where the record of a GPU is, or belongs.
func (s State) find(id gpu.DeviceID) (int, bool) {
	return slices.BinarySearchFunc(s.Records, id, func(r Record, id gpu.DeviceID) int { return cmp.Compare(r.GPU, id) })
}

// clone returns a state that can be changed without effect on s. Values are never changed.
func (s State) clone() State {
	s.Records = slices.Clone(s.Records)
	for i := range s.Records {
		r := &s.Records[i]
		r.Last, r.Tries, r.Running, r.Day = copied(r.Last), copied(r.Tries), copied(r.Running), slices.Clone(r.Day)
	}
	was := s.seen
	s.seen = make(map[gpu.DeviceID]seen, len(was))
	maps.Copy(s.seen, was)
	return s
}

func copied[T any](v *T) *T {
	if v == nil {
		return nil
	}
	return new(*v)
}

// times are those of a state that may be changed.
type times struct{ *State }

// Booted implements durable.State.
func (s times) Booted() (*string, *time.Time) { return &s.Boot, &s.BootTime }

// EachPast implements durable.State.
func (s times) EachPast(do func(*time.Time)) {
	do(&s.IdleBegan)
	do(&s.started)
	for id, one := range s.seen {
		do(&one.free)
		do(&one.ended)
		s.seen[id] = one
	}
	for i := range s.Records {
		r := &s.Records[i]
		do(&r.Since)
		do(&r.Fault)
		if r.Last != nil {
			do(&r.Last.At)
		}
		if r.Tries != nil {
			do(&r.Tries.At)
		}
		if r.Running != nil {
			do(&r.Running.Began)
			do(&r.Running.Runs)
		}
		for j := range r.Day {
			do(&r.Day[j])
		}
	}
}

// EachDue implements durable.State.
func (s times) EachDue(do func(*time.Time)) {
	for i := range s.Records {
		if t := s.Records[i].Tries; t != nil {
			do(&t.Retry)
		}
	}
}
