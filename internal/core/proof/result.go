package proof

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Result is what follows from a state and a node.
type Result struct {
	State  State // if its text differs from the one before, it is written before a proof begins
	Begin  []Begin
	Cancel []Cancelling // each time until it has ended

	Withheld []Withheld
	Failures []Failure
	Waits    []Wait

	Wake time.Time // when something is due, if nothing changes; zero = nothing is
}

// Begin is a proof to begin.
type Begin struct {
	GPU    gpu.DeviceID
	Number uint64 // for End
	Reason Reason
}

// Cancelling is a proof to end.
type Cancelling struct {
	GPU    gpu.DeviceID
	Number uint64
	Why    Cancel
}

// Withheld is a GPU that takes no new work until it is proved.
type Withheld struct {
	GPU    gpu.DeviceID
	Reason Reason
	Text   string
}

// Failure is a GPU that failed its proof: it has the condition until a proof passes or an operator clears it.
type Failure struct {
	GPU          gpu.DeviceID
	State        health.State // Policy.OnFail
	NeedsService bool         // it failed again after a reset or a boot; unhealthy with any policy
	Since        time.Time
	Summary      string // of the command
}

// Wait is why no proof of a GPU runs now.
type Wait struct {
	GPU    gpu.DeviceID
	Reason Reason // of the proof
	Code   Code
	Text   string
	Until  time.Time // when it is decided again, if nothing changes; zero = when something changes
	Alert  bool      // it does not end without a person
}

// Code is why a proof waits, for programs.
type Code string

// Codes.
const (
	WaitService   Code = "NEEDS_SERVICE"  // it failed again after a reset or a boot
	WaitRepair    Code = "NEEDS_RESET"    // it failed, and is proved again after a reset or a boot
	WaitBackOff   Code = "COULD_NOT_RUN"  // the check is tried again later
	WaitDue       Code = "NOT_DUE"        // for the reason idle: the last verdict is not old
	WaitPaused    Code = "PAUSED"         // what ends proofs, also has none begin
	WaitFault     Code = "UNHEALTHY"      // the GPU takes no work by its health
	WaitUnread    Code = "HOLDERS_UNREAD" // what has the GPU is not known completely
	WaitHeld      Code = "HELD"           // work has it, or an instance of it
	WaitProcesses Code = "PROCESSES"      // processes use it
	WaitSettle    Code = "SETTLING"       // it was not free for long enough
	WaitOften     Code = "PROVED_OFTEN"   // it was proved twice within a day, and has failed again each time: a person decides
	WaitIdle      Code = "NOT_IDLE"       // it was not free for Policy.IdleFor
	WaitSpread    Code = "SPREAD"         // nodes that start together begin one after the other
	WaitWindow    Code = "WINDOW"         // no window is open
	WaitSpaced    Code = "SPACED"         // another GPU of the node was proved for the reason idle just now
	WaitLastFree  Code = "LAST_FREE"      // a pool would have no free GPU
	WaitTurn      Code = "MAX_PER_NODE"   // as many proofs run on the node as may
	WaitTaking    Code = "TAKING"         // it has begun: its GPU is taken when no work has had it for 30 s
)

func (r *Result) wait(w Wait) {
	r.Waits = append(r.Waits, w)
	r.wake(w.Until)
}

// wake has the next decision at a time or before it.
func (r *Result) wake(at time.Time) {
	if !at.IsZero() && (r.Wake.IsZero() || at.Before(r.Wake)) {
		r.Wake = at
	}
}
