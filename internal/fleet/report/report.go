// Package report describes what gpu-fleet knows, has decided and waits for, for people and scripts: as JSON, the same for HTTP and all commands, and
// as text for a terminal.
package report

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Document is a fleet.View. Its JSON is an interface for scripts: keys are added, never changed.
type Document struct {
	At       time.Time `json:"at"`               // of the decision
	Identity string    `json:"identity"`         // of the process that answers
	Leads    bool      `json:"leads"`            // it is the leader
	Leader   string    `json:"leader,omitempty"` // "" = not known

	Alerts []Alert `json:"alerts"`         // what needs a person, the most urgent first
	Stop   *Stop   `json:"stop,omitempty"` // all acts are stopped; nil = they are not
	Ledger Ledger  `json:"ledger"`

	Clusters []Cluster `json:"clusters"`
	Nodes    []Node    `json:"nodes"`
	More     int       `json:"moreNodes,omitempty"` // nodes that were left out: ready, without a fault or a mark

	Acts     []Act     `json:"acts"` // that were due at the decision
	Waits    []Wait    `json:"waits"`
	Refusals []Refusal `json:"refusals"`
	Marks    []Mark    `json:"marks"`
	Free     []Subject `json:"free"` // faulty GPUs that no work holds
	Wake     time.Time `json:"wake,omitzero"`

	Budget   Budget            `json:"budget"`
	History  []Rescue          `json:"history"` // the newest first
	Problems []problem.Problem `json:"problems"`
	Counts   Counts            `json:"counts"`

	DecisionSeconds float64 `json:"decisionSeconds"`
}

// Alert is something that does not end without a person.
type Alert struct {
	Code string `json:"code"` // a rescue.Reason, a problem.Code, or one of the constants below
	Subject
	Text   string    `json:"text"`
	Remedy string    `json:"remedy,omitempty"`
	Since  time.Time `json:"since,omitzero"`
}

// Codes of alerts that are neither a rescue.Reason nor a problem.Code.
const (
	Undecided = "NOT_DECIDED" // nothing was decided
	NoLeader  = "NO_LEADER"   // as far as this process knows
)

// String is the alert in one line, with its remedy.
func (a Alert) String() string { return problem.Problem{Text: a.Text, Remedy: a.Remedy}.String() }

// Stop is why all acts are stopped.
type Stop struct {
	At   time.Time `json:"at"`
	By   string    `json:"by"` // "quorum", or a person
	Text string    `json:"text"`
}

// Ledger is where the ledger is, and how full.
type Ledger struct {
	Where string `json:"where"`
	Error string `json:"error,omitempty"`
	Bytes int    `json:"bytes"`
	Limit int    `json:"limitBytes"`
}

// Cluster is a Kubernetes cluster or a Nomad region.
type Cluster struct {
	Name       string      `json:"name"`
	Kind       fleet.Kind  `json:"kind"`
	Mode       rescue.Mode `json:"mode"`
	Problem    string      `json:"problem,omitempty"` // why it can't be read
	ReadAt     time.Time   `json:"readAt,omitzero"`   // the latest answer of its servers
	AgeSeconds float64     `json:"ageSeconds"`        // of that answer at the decision

	Nodes      int `json:"nodes"` // with GPUs
	GPUs       int `json:"gpus"`
	FaultyGPUs int `json:"faultyGpus"` // with a fault that takes them out of service
	HeldGPUs   int `json:"heldGpus"`   // by work
}

// Node is a node with GPUs.
type Node struct {
	Cluster     string        `json:"cluster"`
	Name        string        `json:"name"`
	Hardware    string        `json:"hardware,omitempty"` // the same in all clusters that have the node
	Ready       bool          `json:"ready"`
	Schedulable bool          `json:"schedulable"`
	Draining    bool          `json:"draining,omitempty"`
	ReportedAt  time.Time     `json:"reportedAt,omitzero"` // the latest report of its agent
	Mark        health.Repair `json:"mark,omitzero"`       // the repair that it is marked for
	MarkIsOurs  bool          `json:"markIsOurs,omitempty"`
	GPUs        []GPU         `json:"gpus"`
	Resources   []Resource    `json:"resources,omitempty"` // of which the servers tell numbers: then GPUs has those of which more is known
	Faults      []Fault       `json:"faults,omitempty"`    // of the node itself
}

// Resource is a number of healthy devices of a node.
type Resource struct {
	Kind  string `json:"kind"` // "nvidia.com/gpu"
	Units int    `json:"units"`
	Held  int    `json:"held"` // by work
}

// GPU is a physical GPU of a node.
type GPU struct {
	ID      gpu.DeviceID `json:"id"`
	Kind    string       `json:"kind,omitempty"`    // what a request names; "" = the instances have several, or it is not offered
	Health  health.State `json:"health"`            // healthy, degraded, unknown, unhealthy, lost: the worst of what servers and faults show
	Devices []Device     `json:"devices,omitempty"` // MIG instances
	Holders []Holder     `json:"holders,omitempty"`
	Faults  []Fault      `json:"faults,omitempty"`
}

// Device is a MIG instance.
type Device struct {
	ID      gpu.DeviceID `json:"id"`
	Kind    string       `json:"kind"`
	Healthy bool         `json:"healthy"`
}

// Holder is work that has the GPU, or an instance of it, by its orchestrator's record.
type Holder struct {
	ID        string       `json:"id"` // of the allocation; UID of the pod
	Namespace string       `json:"namespace"`
	Name      string       `json:"name"`
	Phase     string       `json:"phase"`
	Device    gpu.DeviceID `json:"device,omitempty"` // the instance; "" = the GPU
}

// Fault is a condition of a GPU or of an instance of it.
type Fault struct {
	Cause       string        `json:"cause"`
	State       health.State  `json:"state"`
	Repair      health.Repair `json:"repair"`
	Since       time.Time     `json:"since,omitzero"`
	At          string        `json:"at,omitempty"` // the instance: "GI 1 CI 0"; "" = the GPU
	Simulated   bool          `json:"simulated,omitempty"`
	Advisory    bool          `json:"advisory,omitempty"`
	Unconfirmed bool          `json:"unconfirmed,omitempty"`
}

// Subject is what an entry is about.
type Subject struct {
	Cluster string       `json:"cluster,omitempty"`
	Node    string       `json:"node,omitempty"`
	GPU     gpu.DeviceID `json:"gpu,omitempty"`
	Cause   string       `json:"cause,omitempty"`
	Work    string       `json:"work,omitempty"` // ID of the allocation, UID of the pod; "" = all of the GPU
	Name    string       `json:"name,omitempty"` // namespace/name of the work
}

// Act is a call that is due; one that is listed is never made.
type Act struct {
	Subject
	Workloads []Workload   `json:"workloads"`
	Device    gpu.DeviceID `json:"device,omitempty"` // the act is on the device; "" = on the work
	Try       int          `json:"try"`
	Victims   int          `json:"victims,omitempty"` // workloads of lower priority that end for it
	Listed    bool         `json:"listed,omitempty"`
}

// Workload is the work of an act.
type Workload struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}

// Wait is something that is done later, or is under way.
type Wait struct {
	Subject
	Reason rescue.Reason `json:"reason"`
	Text   string        `json:"text"`
	Until  time.Time     `json:"until,omitzero"` // when it is decided again, if nothing changes; none = when something changes
	Alert  bool          `json:"alert,omitempty"`
}

// Refusal is what is not done while nothing changes.
type Refusal struct {
	Subject
	Reason rescue.Reason `json:"reason"`
	Text   string        `json:"text"`
}

// Mark is a change of a node that is due.
type Mark struct {
	Cluster  string        `json:"cluster"`
	Node     string        `json:"node"`
	Repair   health.Repair `json:"repair"`             // none = the mark is removed
	Eligible *bool         `json:"eligible,omitempty"` // what it is made; nil = it stays as it is
	Listed   bool          `json:"listed,omitempty"`
}

// Budget is what of the policy's budgets is in use. The lists have what is in use.
type Budget struct {
	Nodes    Used   `json:"nodes"`    // at a time
	GPUs     []Used `json:"gpus"`     // of a node within an hour
	Attempts []Used `json:"attempts"` // of a GPU within a day
	Quorum   []Used `json:"quorum"`   // nodes with a fault of one cause; one more than the limit stops all acts
	Rescues  Used   `json:"rescues"`  // of the ledger
	Moves    Used   `json:"moves"`    // of the ledger

	LimitGPUs     int `json:"limitGpus"`     // of each in GPUs, also of a node that is not listed
	LimitAttempts int `json:"limitAttempts"` // of each in Attempts
	LimitQuorum   int `json:"limitQuorum"`   // of each in Quorum
}

// Used is how much of a limit is in use.
type Used struct {
	Of     string `json:"of,omitempty"` // the node, GPU or cause
	Used   int    `json:"used"`
	Listed int    `json:"listed,omitempty"` // more, had the acts of mode report been made
	Limit  int    `json:"limit"`
	Free   int    `json:"free"`
}

// Rescue is one attempt to move the work of a GPU.
type Rescue struct {
	Cluster  string       `json:"cluster"`
	Node     string       `json:"node"`
	GPU      gpu.DeviceID `json:"gpu"`
	Cause    string       `json:"cause"`
	Began    time.Time    `json:"began"` // of the fault
	Reserved time.Time    `json:"reserved"`
	Over     time.Time    `json:"over,omitzero"` // when the fault had ended
	Listed   bool         `json:"listed,omitempty"`
	Moves    []Move       `json:"moves"`
	Done     int          `json:"done,omitempty"` // moves that have ended and are not listed any more
}

// Move is one act of a rescue.
type Move struct {
	Workloads []Workload     `json:"workloads"`
	Device    gpu.DeviceID   `json:"device,omitempty"`
	Outcome   rescue.Outcome `json:"outcome"`
	Tries     int            `json:"tries"`
	Answer    string         `json:"answer,omitempty"`
	Remedy    string         `json:"remedy,omitempty"`
	Accepted  time.Time      `json:"accepted,omitzero"`
	Ended     time.Time      `json:"ended,omitzero"`
}

// Counts are of what the process has done since its start.
type Counts struct {
	Acts      []ActCount     `json:"acts"`
	Outcomes  []OutcomeCount `json:"outcomes"`
	Replaced  []Replaced     `json:"replaced"`  // the latest moves that ended with a replacement
	Conflicts uint64         `json:"conflicts"` // writes of the ledger that another process was ahead of
}

// ActCount is how many calls had an answer.
type ActCount struct {
	Cluster string `json:"cluster"`
	Answer  string `json:"answer"`
	Count   uint64 `json:"count"`
}

// OutcomeCount is how many moves ended in a way.
type OutcomeCount struct {
	Cluster string         `json:"cluster"`
	Outcome rescue.Outcome `json:"outcome"`
	Count   uint64         `json:"count"`
}

// Replaced is how long a move took until the replacement of the work ran.
type Replaced struct {
	Cluster      string    `json:"cluster"`
	At           time.Time `json:"at"`
	FaultSeconds float64   `json:"faultSeconds"` // from the beginning of the fault
	CallSeconds  float64   `json:"callSeconds"`  // from the call
}
