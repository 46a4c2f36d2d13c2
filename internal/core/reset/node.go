package reset

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Node is what an agent sees of its node.
type Node struct {
	// Boot is the ID of the present boot; "" = not known. BootTime is when the node booted by the wall clock as it is now: it moves when the clock is set.
	Boot     string
	BootTime time.Time

	GPUs   []GPU  // those that the driver lists, and that no other agent has
	Paused string // why no reset begins: maintenance, the driver is not ready, another agent resets a GPU, a proof runs; "" = one may
	Cannot string // why this agent can't reset a GPU at all, with the remedy: the component is missing; "" = it can
}

// GPU is a GPU with all its instances and shares.
type GPU struct {
	ID gpu.DeviceID

	Action       health.RecoveryAction // of the latest check
	ProofFailed  bool                  // it has the condition PROOF_FAILED
	NeedsService bool                  // it has the condition NEEDS_SERVICE
	Cause        string                // of its worst condition: "XID_95"; "" = it has none
	Repair       health.Repair         // what it takes to clear that condition
	TakesWork    bool                  // no condition and no proof keeps work from it: an earlier fault is over

	MIG      bool           // it has MIG instances
	NVSwitch bool           // it is linked through NVSwitches
	Group    []gpu.DeviceID // the other GPUs of its P2P group: linked by NVLinks, directly or over other GPUs
	Moving   string         // why it takes no new work because of a move to another API; "" = it does not move

	Holders   []string // the work that has it or an instance of it
	Processes []string // that NVML shows on it
	Unread    string   // why holders or processes are not known completely; "" = they are
	Never     bool     // of Unread: they will never be
}
