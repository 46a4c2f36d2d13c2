package reset

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Next decides. It is pure, and gives the same result for the same values.
func (p Policy) Next(s State, n Node, now time.Time) Result { return Result{State: s} }

// Still reports whether a reset that was begun may call nvidia-smi: else why it is cancelled. It is asked after its GPUs were taken, with what the node
// shows then.
func (p Policy) Still(s State, n Node, id gpu.DeviceID) (why string, ok bool) { return "", true }

// ByPerson returns the reset of a GPU that a person asks for, and all that keeps it from beginning now. A fault is not needed, attempts do not count, and
// it does not wait for holders: what is not free is returned.
func (p Policy) ByPerson(n Node, id gpu.DeviceID) (Begin, []Wait) { return Begin{GPU: id}, nil }

// BegunByPerson returns the state in which the reset of a person has begun, with its number.
func (s State) BegunByPerson(b Begin, now time.Time) (State, Begin) { return s, b }

// Ended returns the state after the end of a reset.
func (s State) Ended(id gpu.DeviceID, e End, now time.Time) State { return s }

// Calls returns the state in which nvidia-smi is about to be called for a reset that runs, and whether the persistence mode is to be restored after it.
func (s State) Calls(id gpu.DeviceID, persistence bool) State { return s }

// Restored returns the state in which the persistence mode of a GPU is as it was.
func (s State) Restored(id gpu.DeviceID) State { return s }

// Of returns the record of a GPU.
func (s State) Of(id gpu.DeviceID) (Record, bool) { return Record{}, false }
