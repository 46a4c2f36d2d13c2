package health

import (
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// LastCheck is what the latest reading of a GPU showed that its health does not: one check that fails makes no GPU unhealthy, and
// processes never do.
type LastCheck struct {
	Failed    bool          // the GPU did not answer
	Failure   string        // the call, with its error if it returned; may be empty
	Processes []gpu.Process // with memory of the GPU, by PID; nil if unknown. Not to be changed
}

// LastCheck returns the latest check of a GPU; the zero value if there was none since the agent started.
func (l Ledger) LastCheck(id gpu.DeviceID) LastCheck {
	if h := l.histories[id]; h != nil {
		return h.lastCheck
	}
	return LastCheck{}
}

// OnDevice returns the processes with memory of a device at a placement: all those of a GPU, and those that the driver attributes to
// a MIG instance.
func (c LastCheck) OnDevice(at gpu.Placement) []gpu.Process {
	return slices.DeleteFunc(slices.Clone(c.Processes), func(p gpu.Process) bool { return !at.Covers(p.At) })
}
