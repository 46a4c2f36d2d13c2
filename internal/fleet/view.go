package fleet

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// View is what a process of gpu-fleet knows and has decided at one time. It is immutable.
type View struct {
	At       time.Time
	Identity string // of this process
	Leads    bool
	Leader   string // the process that leads; "" = not known

	Policy   rescue.Policy
	Clusters []ClusterView
	Result   rescue.Result // of the latest decision: acts, waits, refusals, and the state with the stored ledger. Without the lead the acts are what this process would do
	Decided  time.Duration // for how long the decision took
	Store    string        // where the ledger is
	StoreErr string        // why it can't be read or written; "" = it can
	Problems []problem.Problem
	Counts   Counts
}

// ClusterView is a cluster as it was decided on.
type ClusterView struct {
	rescue.Cluster
	Kind Kind
}

// Counts are of what this process has done since its start.
type Counts struct {
	Acts      map[ActKey]uint64 // calls by their answer
	Outcomes  map[OutcomeKey]uint64
	Replaced  []Replaced // the latest moves that ended with a replacement, at most 100
	Conflicts uint64     // writes of the ledger that another process was ahead of
}

// ActKey is what calls are counted by. Answer is "accepted", "not-found", "blocked", "denied", "failed", or "listed" in mode report.
type ActKey struct{ Cluster, Answer string }

// OutcomeKey is what ended moves are counted by.
type OutcomeKey struct {
	Cluster string
	Outcome rescue.Outcome
}

// Replaced is how long a move took.
type Replaced struct {
	Cluster string
	At      time.Time
	Fault   time.Duration // from the beginning of the fault to the replacement
	Call    time.Duration // from the call to the replacement
}
