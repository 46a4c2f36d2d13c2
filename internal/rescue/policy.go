package rescue

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Policy is what the operator allows. It is one for the team.
type Policy struct {
	Ignore []string // causes that do not count, beside those that never do

	// Delay is for how long a fault must have lasted. It is the time in which a fault of many nodes shows itself as such (QuorumNodes).
	Delay time.Duration

	MaxGPUs    int // of a node within an hour
	MaxNodes   int // at a time; MaxPercent of the nodes with GPUs, if that is more
	MaxPercent int
	CoolDown   time.Duration // for which a node stays one of MaxNodes after its work has moved
	Attempts   int           // of a GPU within a day

	// QuorumNodes is how many nodes may get a fault of one cause within QuorumTime. One more stops all acts until a person resumes them: that is a
	// driver, a rollout or an agent, and not hardware.
	QuorumNodes int
	QuorumTime  time.Duration

	Deadline time.Duration // after which a move that the orchestrator does not let through is given up; 0 = never

	Preempt    bool // one workload of lower priority may be ended for a replacement
	Ineligible bool // a node of which all GPUs need repair takes no new work
}

// Default is the policy of an operator who has set nothing.
func Default() Policy {
	return Policy{
		Delay: time.Minute, MaxGPUs: 1, MaxNodes: 1, MaxPercent: 10, CoolDown: time.Minute, Attempts: 2,
		QuorumNodes: 2, QuorumTime: 10 * time.Minute,
	}
}

// Check returns all settings that are invalid.
func (p Policy) Check() error {
	var all []error
	whole := func(key string, value, least, most int) {
		if value < least || value > most {
			all = append(all, &setting.Error{Key: key, Value: strconv.Itoa(value), Remedy: fmt.Sprintf("a number from %d to %d", least, most)})
		}
	}
	lasts := func(key string, value, least, most time.Duration) {
		if value < least || value > most {
			all = append(all, &setting.Error{Key: key, Value: value.String(), Remedy: fmt.Sprintf("a time from %v to %v", least, most)})
		}
	}
	whole("max_gpus", p.MaxGPUs, 1, 64)
	whole("max_nodes", p.MaxNodes, 1, 1000)
	whole("max_percent", p.MaxPercent, 0, 50)
	whole("attempts", p.Attempts, 1, 10)
	whole("quorum_nodes", p.QuorumNodes, 1, 1000)
	lasts("quorum_time", p.QuorumTime, time.Minute, day)
	lasts("delay", p.Delay, 0, time.Hour)
	lasts("cool_down", p.CoolDown, 0, day)
	lasts("deadline", p.Deadline, 0, 7*day)
	return errors.Join(all...)
}

// never are causes that are not a fault of the GPU's hardware, or may not be: the driver is missing, released or hangs, or nothing was checked.
var never = []string{
	health.ReasonDriver.String(), health.ReasonMaintenance.String(), health.ReasonUnresponsive.String(), health.ReasonUnchecked.String(),
}

// counts reports whether a fault is a reason to move work; else why not.
func (p Policy) counts(f *Fault) (bool, string) {
	switch {
	case f.State < health.Unhealthy:
		return false, "a GPU that is " + f.State.String() + " keeps its work"
	case slices.Contains(never, f.Cause):
		return false, "it is not known to be a fault of the GPU"
	case slices.Contains(p.Ignore, f.Cause):
		return false, "the policy ignores this cause"
	case f.Simulated:
		return false, "the fault is simulated"
	case f.Advisory:
		return false, "the fault is reported only: the GPU takes work"
	case f.Unconfirmed:
		return false, "only the first check after a start has shown it"
	case f.Repair == health.NoRepair:
		return false, "it needs no reset, reboot or replacement of the GPU"
	}
	return true, ""
}

// Times that are no settings.
const (
	day  = 24 * time.Hour
	hour = time.Hour

	readFor     = time.Minute      // how old the servers' answer may be
	reportFor   = 90 * time.Second // how old the report of an agent may be: it is renewed every 30 s while it has faults
	namedTwice  = 30 * time.Second // between two reports that name a holder, where the servers do not show the device
	retryAfter  = 8 * time.Second  // a call that the orchestrator did not let through: so work is gone 15 s after a disruption budget allows it
	retrySpread = 3 * time.Second  // at most added to retryAfter
	answerIn    = 15 * time.Second // within which a call has an answer, or is repeated; the caller ends a call after 10 s
	stuckAfter  = 30 * time.Second // beyond Work.EndsWithin
	replacedIn  = 10 * time.Minute // for the start of the replacement
)
