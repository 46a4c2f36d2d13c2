package proof

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Node is what an agent sees of its node.
type Node struct {
	Name string // by which proofs of many nodes are spread

	// Boot is the ID of the present boot; "" = not known: then no GPU is proved for the reason boot. BootTime is when the node booted by the wall clock as it
	// is now: it moves when the clock is set. Zero = not known.
	Boot     string
	BootTime time.Time

	GPUs      []GPU  // those that the driver lists, and that no other agent has
	Elsewhere int    // proofs of other agents that run on this node
	Cancel    Cancel // why all proofs end, and none begins; "" = they may
}

// GPU is a GPU with all its instances and shares.
type GPU struct {
	ID    gpu.DeviceID
	Pools []string // of its units

	// Health is the worst of its conditions, but for those of a proof; Cause is why.
	Health health.State
	Cause  string
	Reset  time.Time // the latest reset that was seen; zero = none

	Holders   []string // the work that has it or an instance of it: holders.Record.On
	Processes []string // that NVML shows on it, but for those of a proof
	Unread    string   // why holders or processes are not known completely; "" = they are
	Never     bool     // of Unread: they will never be

	Cancel Cancel // why its proof ends, and none begins; "" = it may
}

// takesWork reports whether the GPU takes work by its health.
func (g *GPU) takesWork() bool { return g.Health <= health.Degraded }

// held reports whether work or a process has the GPU, or may have it.
func (g *GPU) held() bool { return g.Unread != "" || len(g.Holders) > 0 || len(g.Processes) > 0 }

// Cancel is why a proof is ended before its result, for programs.
type Cancel string

// What ends a proof. The caller sets those of the first part, Next finds those of the second.
const (
	ByOperator  Cancel = "OPERATOR"
	Reload      Cancel = "RELOAD" // of the configuration, also one by which nothing is proved any more
	Shutdown    Cancel = "SHUTDOWN"
	Maintenance Cancel = "MAINTENANCE"
	Move        Cancel = "MOVE"   // the GPU moves to another API
	Demand      Cancel = "DEMAND" // work waits for the GPU: ends only a proof of a GPU that took work before
	Resetting   Cancel = "RESET"  // a GPU of the node is reset

	Fault   Cancel = "FAULT"          // the GPU takes no work by its health any more
	Held    Cancel = "HELD"           // work has it nevertheless
	Unread  Cancel = "HOLDERS_UNREAD" // what has it is not known any more
	Gone    Cancel = "GONE"           // the GPU is not there any more, or another agent has it
	Overdue Cancel = "OVERDUE"        // the proof has not ended in its time: it could not run
)

var cancelTexts = map[Cancel]string{
	ByOperator: "an operator ended it", Reload: "the configuration is read again", Shutdown: "the agent ends", Maintenance: "maintenance",
	Move: "the GPU moves to another API", Demand: "work waits for the GPU", Resetting: "a GPU of the node is reset", Fault: "the GPU has a fault", Held: "work has the GPU",
	Unread: "what has the GPU is not known", Gone: "the GPU is not this agent's any more", Overdue: "it has not ended in its time",
}

// String returns the reason as text for people.
func (c Cancel) String() string {
	if text, ok := cancelTexts[c]; ok {
		return text
	}
	return string(c)
}
