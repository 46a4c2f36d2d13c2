package rescue

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Result is what follows from a state and a fleet.
type Result struct {
	State   State  // if its ledger differs from the one before, it is written before an act is made
	Problem string // why nothing was decided: the ledger can't be used, or another process leads

	Ended    []EndedMove // moves that ended by this decision
	Acts     []Act       // due now
	Marks    []Mark      // of nodes, due now
	Waits    []Wait
	Refusals []Refusal

	// Free are GPUs with a fault that counts and that no work holds, by the records of the clusters that can be read: what may be reset, if the agent of
	// the node agrees.
	Free []Subject

	Wake time.Time // when something is due, if nothing changes; zero = nothing is
}

// Act is an act that is due: a call to the orchestrator.
type Act struct {
	Subject
	Work    []Target
	Device  gpu.DeviceID // the act is on the device; "" = on the one workload
	Try     int          // 1 = the first call
	Term    uint64       // of the leader
	Victims int          // workloads of lower priority that the orchestrator ends for it, with the operator's consent
	Listed  bool         // the mode is report: nothing is to be called
}

// EndedMove is a move that has ended.
type EndedMove struct {
	Subject
	Began time.Time // of the fault
	Move  Move
}

// EndedMoves returns the moves that are open in the ledger before, and have ended in the one after.
func EndedMoves(before, after Ledger) (all []EndedMove) {
	open := map[openKey]bool{}
	for i := range before.Rescues {
		r := &before.Rescues[i]
		for j := range r.Moves {
			if m := &r.Moves[j]; m.Outcome == Open {
				open[openKey{r.key(), m.id(), r.Listed}] = true
			}
		}
	}
	for i := range after.Rescues {
		r := &after.Rescues[i]
		for j := range r.Moves {
			if m := &r.Moves[j]; m.Outcome != Open && open[openKey{r.key(), m.id(), r.Listed}] {
				all = append(all, EndedMove{Subject: m.subject(r), Began: r.Began, Move: *m})
			}
		}
	}
	return all
}

// openKey names an open move: a ledger has one of it.
type openKey struct {
	gpuKey
	id     string
	listed bool
}

// Subject is what a line of a result is about.
type Subject struct {
	Cluster string
	Node    string
	GPU     gpu.DeviceID
	Cause   string
	Work    string // Work.ID of the workload, or of the first of several; "" = all of the GPU
	Name    string // namespace and name of the workload
}

// Wait is something that is to be done later, or is under way.
type Wait struct {
	Subject
	Reason Reason
	Text   string
	Until  time.Time // when it is decided again, if nothing changes; zero = when something changes
	Alert  bool      // it does not end without a person
}

// Refusal is what is not done while nothing changes.
type Refusal struct {
	Subject
	Reason Reason
	Text   string
}

// Reason is why something waits, or is refused, for programs.
type Reason string

// Reasons to wait.
const (
	ReasonUnread      Reason = "CLUSTER_UNREAD"      // the servers do not answer, or not completely
	ReasonStopped     Reason = "STOPPED"             // by quorum, or by a person
	ReasonDelay       Reason = "DELAY"               // the fault has not lasted for long enough
	ReasonSilent      Reason = "AGENT_SILENT"        // the agent of the node does not report
	ReasonHolders     Reason = "HOLDERS_UNKNOWN"     // the records of who has the GPU are not complete, or differ
	ReasonNode        Reason = "NODE_NOT_READY"      // or its work is leaving it
	ReasonNotRunning  Reason = "WORK_NOT_RUNNING"    // the work is pending, ending, or not known
	ReasonNotShown    Reason = "DEVICE_NOT_SHOWN"    // the servers do not show the device as unhealthy yet
	ReasonNoPlace     Reason = "NO_PLACE"            // no free healthy device where the work may run
	ReasonGPUs        Reason = "BUDGET_GPUS"         // of the node within an hour
	ReasonNodes       Reason = "BUDGET_NODES"        // at a time
	ReasonAttempts    Reason = "BUDGET_ATTEMPTS"     // of the GPU within a day
	ReasonLedger      Reason = "LEDGER_FULL"         // as many rescues within a day as the ledger keeps; refused: with longer names than it keeps
	ReasonBlocked     Reason = "BLOCKED"             // the orchestrator does not let the act through now
	ReasonSent        Reason = "SENT"                // the call has no answer yet
	ReasonEnding      Reason = "ENDING"              // the work is ending
	ReasonStuck       Reason = "STUCK"               // the work has not ended in its time
	ReasonReplacement Reason = "REPLACEMENT_PENDING" // the work has ended, its replacement does not run yet
	ReasonNotOurs     Reason = "NODE_CHANGED"        // another program or person has changed the node's eligibility
)

// Reasons to refuse.
const (
	ReasonNotCounted Reason = "FAULT_DOES_NOT_COUNT"
	ReasonController Reason = "NOT_REPLACED"       // nothing starts the work elsewhere
	ReasonAttempt    Reason = "LOSES_ATTEMPT"      // its controller counts the act as a failure
	ReasonPreempts   Reason = "PREEMPTS"           // its replacement may end other work
	ReasonRefused    Reason = "REFUSED_BY_CLUSTER" // the orchestrator refused the act for good
	ReasonDeadline   Reason = "DEADLINE"           // the work could not be moved in the time of the policy
	ReasonListed     Reason = "LISTED"             // in mode report: the act was listed
)

func (r *Result) wait(s Subject, why Reason, text string, until time.Time) {
	r.Waits = append(r.Waits, Wait{Subject: s, Reason: why, Text: text, Until: until})
	r.wake(until)
}

func (r *Result) alert(s Subject, why Reason, text string) {
	r.Waits = append(r.Waits, Wait{Subject: s, Reason: why, Text: text, Alert: true})
}

func (r *Result) refuse(s Subject, why Reason, text string) {
	r.Refusals = append(r.Refusals, Refusal{s, why, text})
}

// wake has the next decision at a time or before it.
func (r *Result) wake(at time.Time) {
	if !at.IsZero() && (r.Wake.IsZero() || at.Before(r.Wake)) {
		r.Wake = at
	}
}
