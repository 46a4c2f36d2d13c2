// Package problem is what an operator has to know about an agent itself, for as long as it lasts.
package problem

// Problem is one condition of the agent, its files or its surroundings that keeps it from doing all that it should. It is a comparable
// value: two of the same Code and Object are about the same thing.
type Problem struct {
	Code   Code   `json:"code"`
	Object string `json:"object,omitempty"` // the file, agent or resource it is about, if there may be several
	Text   string `json:"text"`             // in one line: what does not work, and what follows
	Remedy string `json:"remedy,omitempty"` // what to do about it
}

// String is the problem in one line, with its remedy.
func (p Problem) String() string {
	if p.Remedy == "" {
		return p.Text
	}
	return p.Text + ": " + p.Remedy
}

// Code is the kind of a problem, for programs. It never changes.
type Code string

// Codes.
const (
	Configuration    Code = "CONFIGURATION_REFUSED"  // an earlier configuration is in force
	DuplicateAgent   Code = "DUPLICATE_AGENT"        // another process of this agent uses the same state directory
	NoAgent          Code = "NO_AGENT"               // no agent answers: the report is of the command itself
	Socket           Code = "CONTROL_SOCKET"         // commands can't reach the agent
	HTTP             Code = "HTTP_SERVER"            // no probes, no metrics, no page
	KernelLog        Code = "KERNEL_LOG_UNAVAILABLE" // XIDs that NVML does not report are missed
	HiddenProcess    Code = "HOST_PROCESSES_HIDDEN"  // a setting needs processes that are in another PID namespace
	UnlistedGPU      Code = "FAULT_OF_UNLISTED_GPU"  // the kernel log has XIDs of a PCI address where no GPU is listed
	ProofNotRun      Code = "PROOF_COULD_NOT_RUN"    // the operator's check of a GPU could not run: nothing is known of the GPU by it
	ProofState       Code = "PROOFS_NOT_RECORDED"    // the record of proofs can't be read or written: no GPU is proved
	ResetState       Code = "RESET_STATE"            // the record of resets can't be read or written: no GPU is reset
	ResetCannot      Code = "RESET_CANNOT"           // no GPU can be reset by this agent as it is set up
	PersistenceMode  Code = "PERSISTENCE_MODE"       // the persistence mode of a GPU is off, and was on before its reset
	WatchersStopped  Code = "WATCHERS_STOPPED"       // programs that watch GPUs were stopped for a reset, and can't be started again
	LimitUnsupported Code = "LIMIT_UNSUPPORTED"      // the policy has limits of device memory that nothing on the node can hold
	LimitsUnknown    Code = "LIMITS_UNKNOWN"         // which limits of device memory the driver has can't be read
	LimitNotCounted  Code = "LIMIT_NOT_COUNTED"      // the driver has the limit of work, and counts nothing of what it uses
	LimitController  Code = "LIMIT_CONTROLLER_OFF"   // the controller by which the driver limits memory is off in the control group of work
	LimitOverridden  Code = "LIMIT_OVERRIDDEN"       // work had another limit of device memory than that of the policy
	StaleLimit       Code = "STALE_LIMIT"            // work had the limit of a control group that has ended
	LimitState       Code = "LIMITS_NOT_RECORDED"    // the record of limits can't be read or written
	MemoryTotal      Code = "MEMORY_TOTAL_LIMITED"   // the agent is in a control group with a limit, and the driver shows it that limit as the memory of a GPU
	Usage            Code = "USAGE_UNKNOWN"          // what the devices do, or which processes use them, can't be read
	Owners           Code = "OWNERS_UNKNOWN"         // which work has which devices can't be read
	HistorySave      Code = "HISTORY_NOT_SAVED"      // faults are forgotten at a restart
	HistoryLoad      Code = "HISTORY_NOT_READ"       // a history was not read completely: faults of before a start may be unknown
	Boot             Code = "REBOOT_UNDETECTED"      // the boot ID can't be read
	AgentFileWrite   Code = "AGENT_FILE_NOT_WRITTEN" // other agents do not see what this one offers
	AgentFileRead    Code = "AGENT_FILES_NOT_READ"   // what other agents offer is unknown
	AgentFileDamaged Code = "AGENT_FILE_DAMAGED"     // the file of one other agent can't be used
	DeviceKept       Code = "DEVICE_KEPT"            // a GPU stays recorded, as its workload's end is not known
	StoppedAgent     Code = "AGENT_STOPPED"          // an agent that does not run has recorded devices of this one
	OwnershipFile    Code = "OWNERSHIP_FILE"         // no GPU changes its API
	CDI              Code = "CDI_SPECIFICATION"      // containers may not get their devices by CDI
	NodeLabels       Code = "NODE_LABELS"            // the file or the object of labels can't be written
	NodeUnread       Code = "NODE_UNREAD"            // the labels of the Node can't be read: a change of them has no effect
	ConfigLabel      Code = "CONFIGURATION_LABEL"    // the configuration in force is not the one that the node's label selects, or is not recorded
	HandOver         Code = "HANDOVER"               // GPUs that need a repair are not reported in Kubernetes' API
	Unguarded        Code = "HANDOVER_UNGUARDED"     // no admission policy limits what the agent may change in a Node: it changes nothing
	Pause            Code = "DRIVER_NOT_RELEASED"    // the GPU Operator changes the driver, and this agent has it open, or does not open it again
	Retained         Code = "DEVICE_IDS_RETAINED"    // IDs are listed only because pods may hold them
	Checkpoint       Code = "KUBELET_CHECKPOINT"     // the kubelet's checkpoint is not understood
	Leftovers        Code = "DRA_LEFTOVERS"          // claims or targets of DRA that this agent can't serve
	Registration     Code = "DRA_REGISTRATION"       // the kubelet has refused the DRA driver
	ForeignClaims    Code = "DRA_FOREIGN_CLAIMS"     // pods have devices through claims of another driver
	PodClaims        Code = "DRA_CLAIMS_OF_PODS"     // the kubelet does not list the claims of pods
	PreparedClaims   Code = "DRA_PREPARED_CLAIMS"    // what is prepared does not fit what the kubelet has
	ClaimUnread      Code = "DRA_CLAIM_UNREAD"       // the record of a prepared claim can't be read
	ClaimState       Code = "DRA_STATE"              // prepared claims can't be read or written
	ClaimCDI         Code = "DRA_CLAIM_CDI"          // the CDI specification of a claim can't be written
	Evictions        Code = "DRA_EVICTIONS"          // no pods are evicted: their record can't be read or written
	DroppedTaints    Code = "DRA_TAINTS_DROPPED"     // the API server drops the taints of devices
	NomadUnread      Code = "NOMAD_DOES_NOT_READ"    // Nomad does not read the devices
	Ledger           Code = "LEDGER_UNUSABLE"        // gpu-fleet moves no work: its ledger is missing or damaged
	LedgerStore      Code = "LEDGER_STORE"           // gpu-fleet moves no work: its ledger can't be read or written now
	Election         Code = "ELECTION"               // gpu-fleet moves no work: no leader can be elected
	ClusterUnread    Code = "CLUSTER_UNREAD"         // gpu-fleet moves no work in a cluster: it can't be read, or not completely
	MissingRight     Code = "RIGHT_MISSING"          // gpu-fleet lacks a right in a cluster
	FaultReport      Code = "FAULT_REPORT_UNREAD"    // gpu-fleet moves no work from or to a node: it can't read the faults that the agent reports
)

// Lines are problems as operators read them.
func Lines(all []Problem) (lines []string) {
	for _, p := range all {
		lines = append(lines, p.String())
	}
	return lines
}

// Each returns a problem of one code for each text.
func Each(code Code, texts ...string) (all []Problem) {
	for _, text := range texts {
		all = append(all, Problem{Code: code, Text: text})
	}
	return all
}
