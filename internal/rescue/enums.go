package rescue

import "github.com/tandem-gpu/tandem/internal/core/gpu"

// Mode is what is done in a cluster. The zero value is ModeOff.
type Mode uint8

// Modes.
const (
	ModeOff    Mode = iota
	ModeReport      // acts are listed, and not made
	ModeAct
)

var modeNames = [...]string{"off", "report", "act"}

// String returns the name of the mode.
func (m Mode) String() string { return modeNames[m] }

// MarshalText returns the name of the mode.
func (m Mode) MarshalText() ([]byte, error) { return gpu.MarshalName(m, modeNames[:], "mode") }

// UnmarshalText parses the output of MarshalText.
func (m *Mode) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(m, modeNames[:], string(text), "mode")
}

// Controller is what replaces work. The zero value is nothing: such work is never moved.
type Controller uint8

// Controllers.
const (
	Unmanaged   Controller = iota // a bare pod, or work of a controller that is not known
	Service                       // Nomad's type service; a Deployment, StatefulSet or the like
	Batch                         // Nomad's type batch; a Job
	System                        // Nomad's type system; a DaemonSet: each node has one
	SystemBatch                   // Nomad's type sysbatch: once on each node
	Static                        // a mirror pod: of the kubelet's own files
)

var controllerNames = [...]string{"no controller", "service", "batch", "system", "system batch", "static"}

// String returns the name of the controller.
func (c Controller) String() string { return controllerNames[c] }

// Phase is where work is in its life. The zero value is that this is not known: its node is away.
type Phase uint8

// Phases.
const (
	Unknown Phase = iota
	Pending
	Running
	Ending // it was stopped, by whom ever, and has not ended
	Ended
)

var phaseNames = [...]string{"unknown", "pending", "running", "ending", "ended"}

// String returns the name of the phase.
func (p Phase) String() string { return phaseNames[p] }

// Shown is how the orchestrator's servers show a device that work holds.
type Shown uint8

// What is shown. The zero value is nothing.
const (
	NotShown Shown = iota
	ShownHealthy
	ShownUnhealthy
)

// Outcome is how a move ended. The zero value is that it has not.
type Outcome uint8

// Outcomes.
const (
	Open        Outcome = iota
	Moved               // the work has ended, and its replacement runs where the orchestrator tells that
	NotReplaced         // the work has ended, and no replacement has started in time
	EndedItself         // the work ended before it was stopped
	Cancelled           // the fault ended before the work was stopped
	GivenUp             // the deadline of the policy passed before the work was stopped
	Refused             // the orchestrator refused the act for good
	Listed              // in mode report: it was listed
)

var outcomeNames = [...]string{"open", "moved", "not-replaced", "ended-itself", "cancelled", "given-up", "refused", "listed"}

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
