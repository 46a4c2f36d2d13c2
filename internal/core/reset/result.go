package reset

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Result is what follows from a state and a node.
type Result struct {
	State State   // if its text differs from the one before, it is written before a reset begins
	Begin []Begin // at most one; with Report it is not begun, and the state has nothing of it
	Waits []Wait  // one for each faulty GPU that is not reset now, in the order of the node

	// Restore are the GPUs whose persistence mode is to be turned on again: a reset has ended without that. State.Restored has it done.
	Restore []gpu.DeviceID

	Wake time.Time // when something is due, if nothing changes; zero = nothing is
}

// Begin is a reset to begin.
type Begin struct {
	GPU    gpu.DeviceID
	Number uint64         // for End; 0 = it has not begun
	Cause  string         // of the fault
	With   []gpu.DeviceID // its P2P group, which must be free and taken, too
}

// Wait is why no reset of a faulty GPU begins now.
type Wait struct {
	GPU   gpu.DeviceID
	Code  Code
	Text  string
	Until time.Time // when it is decided again, if nothing changes; zero = when something changes
	Alert bool      // it does not end without a person
}

// Code is why a reset waits, for programs.
type Code string

// Codes.
const (
	WaitHandedOver Code = "HANDED_OVER"      // the driver asks for another repair than a reset, or for none that is known
	WaitService    Code = "NEEDS_SERVICE"    // it needs service
	WaitAttempts   Code = "ATTEMPTS_USED"    // the fault outlasts Policy.Attempts resets
	WaitOften      Code = "RESET_OFTEN"      // two attempts were made within a day, and a person decides about a third one
	WaitRefused    Code = "REFUSED"          // nvidia-smi refused for good
	WaitCannot     Code = "CANNOT"           // this agent can't reset GPUs
	WaitMIG        Code = "MIG_LAYOUT"       // a reset would remove its MIG instances
	WaitProof      Code = "NOT_PROVED"       // it was reset because it failed its proof, and is proved next
	WaitBackOff    Code = "BACK_OFF"         // after an attempt or a refusal
	WaitPaused     Code = "PAUSED"           // no reset begins on the node now
	WaitMoving     Code = "MOVING"           // it moves to another API
	WaitUnread     Code = "HOLDERS_UNREAD"   // which work has it is not known completely
	WaitHeld       Code = "HELD"             // work has it, or an instance of it
	WaitProcesses  Code = "PROCESSES"        // processes use it
	WaitGroup      Code = "P2P_GROUP_IN_USE" // its P2P group is not free
	WaitTurn       Code = "ANOTHER_RESET"    // another GPU of the node is reset
	WaitUnknown    Code = "UNKNOWN_GPU"      // for ByPerson: this agent does not have it
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
