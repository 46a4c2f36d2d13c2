package reset

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// State is what is known from before; it is on disk. It is a value: no function changes one that it gets. The zero value is that of a node on which no
// GPU was reset.
type State struct {
	Version  int       `json:"version"`
	Boot     string    `json:"boot,omitempty"`    // of the last decision, and below, when that was
	BootTime time.Time `json:"bootTime,omitzero"` // on the clock of all times of the state
	Begun    uint64    `json:"begun,omitempty"`   // resets, ever: the number of the latest
	Records  []Record  `json:"gpus,omitempty"`    // by GPU

	started bool // the first decision of this process was made
}

// Record is what is remembered of a GPU. Attempts are those of the present fault; they are forgotten when the GPU takes work again.
type Record struct {
	GPU      gpu.DeviceID `json:"gpu"`
	Attempts int          `json:"attempts,omitempty"` // in which nvidia-smi was called to reset it
	Refusals int          `json:"refusals,omitempty"` // without a call of nvidia-smi, or by it because the GPU is in use
	Last     *End         `json:"last,omitempty"`     // of the latest attempt or refusal, also of an earlier fault
	Retry    time.Time    `json:"retry,omitzero"`     // not before
	Running  *Running     `json:"running,omitempty"`

	// Persistence means that the persistence mode was on before a reset that has not restored it so far.
	Persistence bool `json:"persistence,omitempty"`
}

// Running is a reset that was begun.
type Running struct {
	Number uint64    `json:"number"`
	Began  time.Time `json:"began"`
	Cause  string    `json:"cause"`            // of the fault
	Called bool      `json:"called,omitempty"` // nvidia-smi may have been called
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

// Outcome is how a reset ended.
type Outcome uint8

// The outcomes. The zero value is no attempt.
const (
	Cancelled   Outcome = iota // before nvidia-smi was called: what was seen before does not hold any more, or the agent ends
	Done                       // nvidia-smi reset the GPU
	InUse                      // a process has the GPU open, as /proc or nvidia-smi shows it: tried again later
	Refused                    // nvidia-smi refused for good: not supported, linked to others, without the right
	Failed                     // nvidia-smi failed, or had not ended in time: an attempt
	Interrupted                // the agent or the node ended during the reset: an attempt
)
