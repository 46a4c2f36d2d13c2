package ownership

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// A GPU can be reset only while no process of the node has it open, and an agent has all GPUs open. So for a reset every agent closes the driver:
//
//	agent that resets    mark . granted . ReleaseDriver: in the mark . closes the driver . reset . OpenDriver: not in the mark . opens it . Release
//	other agents         the GPU is taken                            . close the driver ...........                            . open it
//
// Only one agent of a node resets GPUs at a time. It may have marks of several: of the GPU and of those that are linked with it.

// driverReleased returns the GPU for whose reset the driver is released, by the file as it is on disk then; "" = it is not. An agent that resets a GPU has it
// released while it asks for that, and when it was killed for as long as its nvidia-smi runs. For other processes both
// hold for releasedAtMost at most.
func (n *next) driverReleased() (id gpu.DeviceID) {
	for _, one := range slices.Sorted(maps.Keys(n.file.Taken)) {
		mark := n.file.Taken[one]
		switch {
		case !mark.DriverReleased || mark.Purpose != inventory.Reset:
		case mark.Agent == n.Agent && n.Takes[one].ReleaseDriver && n.is.takes[one].Granted:
			id = cmp.Or(id, one)
		case n.lasts(n.was.releases, n.is.releases, one) && n.resets(mark.Agent):
			id = cmp.Or(id, one)
		}
	}
	return id
}

// resets reports whether another process that has the driver released runs, or the nvidia-smi that it has left, or may.
func (n *next) resets(agent string) bool {
	if n.Running(agent) && agent != n.Agent || n.Follows && agent == n.Agent {
		return true
	}
	runs, _ := n.resetRuns()
	return runs
}

// resetRuns reports whether an nvidia-smi may reset a GPU, and whether that is known. One may if it can't be found out.
func (n *next) resetRuns() (runs, known bool) {
	if n.ResetRuns == nil {
		return false, false
	}
	runs, err := n.ResetRuns()
	return runs || err != nil, err == nil
}

// releasing reports whether this process has the driver released, or asks for that.
func (n *next) releasing() bool {
	for _, want := range n.Takes {
		if want.ReleaseDriver {
			return true
		}
	}
	return false
}

// lasts reports whether what is seen of a GPU has been seen for less than releasedAtMost.
func (n *next) lasts(was, is map[gpu.DeviceID]time.Duration, id gpu.DeviceID) bool {
	since, seen := was[id]
	if !seen {
		since = n.Now
	}
	is[id] = since
	return n.Now-since < releasedAtMost
}

// findOther notes another agent that resets a GPU: one that has a mark for that, and runs or did so until some minutes ago, as what it has begun may go on.
func (n *next) findOther() {
	for _, id := range slices.Sorted(maps.Keys(n.file.Taken)) {
		mark := n.file.Taken[id]
		if mark.Purpose != inventory.Reset || mark.Agent == n.Agent {
			continue
		}
		if n.lasts(n.was.resets, n.is.resets, id) || n.Running(mark.Agent) {
			n.other = mark.Agent + ", which resets " + string(id)
		}
	}
}

// turn returns the other agent whose reset a GPU that is wanted for one waits for; "" = none.
func (n *next) turn(purpose inventory.Purpose) string {
	if purpose != inventory.Reset {
		return ""
	}
	return n.other
}

// driverAway returns why nothing can use the driver, which keeps a GPU from being taken, and from being kept; "" = nothing does. A reset needs it until
// the GPU is granted, and then has it released itself.
func (n *next) driverAway(is Take, purpose inventory.Purpose) string {
	switch {
	case n.NoDriver != "" && (purpose == inventory.Proof || purpose == inventory.Reset && !is.released):
		return n.NoDriver
	case purpose == inventory.Proof && n.was.released != "":
		return inventory.ReleasedFor(n.was.released)
	}
	return ""
}
