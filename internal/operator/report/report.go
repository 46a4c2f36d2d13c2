// Package report describes the state of an agent for operators: as a table and as JSON, the same for both agents.
package report

import (
	"encoding/json"
	"io"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Values of Report.Source.
const (
	FromAgent  = "agent"  // the running agent
	FromDriver = "driver" // one enumeration of the driver by the command itself: no agent answered
)

// Report is the state of an agent. Its JSON is an interface for scripts: keys are added, never changed.
type Report struct {
	Source         string            `json:"source,omitempty"` // FromAgent, FromDriver
	Driver         Driver            `json:"driver"`
	Provisional    bool              `json:"provisional,omitempty"` // the agent has just started: see inventory.Inventory.Provisional
	Devices        []Device          `json:"devices"`
	Excluded       []Excluded        `json:"excluded"`
	Conditions     []Condition       `json:"conditions"`
	Counts         []Count           `json:"counts"`
	Proofs         []Proof           `json:"proofs,omitempty"`       // by GPU; missing = no GPU is proved
	Resets         []Reset           `json:"resets,omitempty"`       // by GPU; missing = none is faulty or was reset, or they are not decided
	MemoryLimits   *MemoryLimits     `json:"memoryLimits,omitempty"` // of device memory; nil = the policy has none, and none of another program was found
	PolicyWarnings []string          `json:"policyWarnings"`         // rules that select no device, positions that changed, pools of mixed sharing
	Bindings       []Binding         `json:"bindings"`
	Overlaps       []Overlap         `json:"overlaps"`
	Injections     []Injection       `json:"injections"`
	CDI            *CDI              `json:"cdi,omitempty"`      // nil = no specification is needed
	DRA            *DRA              `json:"dra,omitempty"`      // nil = the API dra of Kubernetes is not used
	Problems       []problem.Problem `json:"problems,omitempty"` // of the agent itself
	Warnings       []string          `json:"warnings,omitempty"` // Problems as lines

	OwnersUnknown     *Unknown `json:"ownersUnknown,omitempty"`     // a device without owners may have some; nil = it has none, or they are not read (occupancy = off)
	OwnersUnread      bool     `json:"ownersUnread,omitempty"`      // owners were not read: not yet, or never (occupancy = off)
	HealthLimitations []string `json:"healthLimitations,omitempty"` // what this agent sees of no GPU: each device has those of its own
}

// Driver is the state of the driver.
type Driver struct {
	State   string `json:"state"` // pending, absent, failed, ready, released
	Version string `json:"version,omitempty"`
	CUDA    string `json:"cuda,omitempty"`
	Reason  string `json:"reason,omitempty"`

	ResetOf gpu.DeviceID `json:"resetOf,omitempty"` // the GPU for whose reset no process of this agent has the driver open
}

// reset returns for which reset the driver is released, after the version of the driver; "" = for none, or Reason has it.
func (d Driver) reset() string {
	if d.ResetOf == "" {
		return ""
	}
	return ", released for the reset of " + string(d.ResetOf)
}

// Device is one offered device, a GPU or a MIG instance, however many units it is offered as. While a change of the
// policy takes effect it may be listed twice: with the new units and with the withdrawn ones.
type Device struct {
	ID          gpu.DeviceID   `json:"id"`                    // UUID; also the ID of its unit if it is not shared
	GPU         gpu.DeviceID   `json:"gpu"`                   // the physical GPU, also of a MIG instance
	Index       int            `json:"index"`                 // NVML index of the GPU, now
	PolicyIndex string         `json:"policyIndex,omitempty"` // by which a policy selects it, if that differs: "5", "0:1"
	Model       string         `json:"model"`
	Profile     string         `json:"profile,omitempty"` // of a MIG instance
	PCI         gpu.PCIAddress `json:"pci"`
	NUMANode    int            `json:"numaNode"` // -1 = none
	MemoryBytes uint64         `json:"memoryBytes"`
	Schedulable bool           `json:"schedulable"`
	Health      string         `json:"health"` // one line, as both orchestrators show it

	State             health.State `json:"state"` // healthy, degraded, unknown, unhealthy, lost
	Cause             string       `json:"cause,omitempty"`
	Since             time.Time    `json:"since,omitzero"`
	RecoveryAction    string       `json:"recoveryAction,omitempty"`    // that the driver reports (NVML_GPU_RECOVERY_ACTION_*), unless none
	Action            string       `json:"action,omitempty"`            // for the operator
	Clears            string       `json:"clears,omitempty"`            // what clears the cause
	HealthLimitations string       `json:"healthLimitations,omitempty"` // what the driver does not report about its health
	Simulated         bool         `json:"simulated,omitempty"`
	Advisory          bool         `json:"advisory,omitempty"` // the state is reported and not enforced

	// Device nodes that a container of the device needs and the node lacks, and the command that creates them. They
	// do not change whether the device is schedulable.
	MissingNodes       []string `json:"missingNodes,omitempty"`
	CreateNodesCommand string   `json:"createNodesCommand,omitempty"`

	Pool             string `json:"pool"`                    // that a request names
	Sharing          string `json:"sharing"`                 // exclusive, time-slicing, mps
	Replicas         int    `json:"replicas,omitempty"`      // number of units of a shared device: "UUID::0" and so on
	OnePerRequest    bool   `json:"onePerRequest,omitempty"` // a request for two of its units is refused
	MPSMemoryBytes   uint64 `json:"mpsMemoryBytes,omitempty"`
	MemoryLimit      string `json:"memoryLimit,omitempty"`      // of a share of time-slicing: required, best-effort; missing = the driver limits none
	MemoryLimitBytes uint64 `json:"memoryLimitBytes,omitempty"` // to which the driver is to limit a share
	MemoryNotLimited string `json:"memoryNotLimited,omitempty"` // why the driver can't limit a share; missing = it can, or that is not known
	MPSThreadPercent int    `json:"mpsThreadPercent,omitempty"`

	API          string   `json:"api,omitempty"`          // through which it is offered, where that is not always the same: device-plugin, dra
	SliceDevices []string `json:"sliceDevices,omitempty"` // API dra: its names in ResourceSlices, more than one for shares that are devices
	Taints       []Taint  `json:"taints,omitempty"`       // API dra: in ResourceSlices

	Processes []Process `json:"processes,omitempty"` // with memory of the device, as far as the driver lists them
	Owners    []Owner   `json:"owners,omitempty"`
	HeldSince time.Time `json:"heldSince,omitzero"`
	IdleSince time.Time `json:"idleSince,omitzero"` // since when it is held and does nothing
	Usage     *Usage    `json:"usage,omitempty"`    // nil = not read

	Instance          *int   `json:"instance,omitempty"` // number of a MIG instance on its GPU, from 0
	Serial            string `json:"serial,omitempty"`
	Architecture      string `json:"architecture,omitempty"`
	Brand             string `json:"brand,omitempty"`
	ComputeCapability string `json:"computeCapability,omitempty"`
	ECC               string `json:"ecc,omitempty"` // Enabled, Disabled
	NVLinks           int    `json:"nvLinks,omitempty"`
}

// Process is a process with memory of a device.
type Process struct {
	PID         int     `json:"pid"`                   // in the agent's PID namespace
	MemoryBytes *uint64 `json:"memoryBytes,omitempty"` // nil = the driver does not report it

	Name       string `json:"name,omitempty"`       // as procfs shows it
	Owner      *Owner `json:"owner,omitempty"`      // of its control group; nil = it belongs to no work, or that is unknown
	Unreserved bool   `json:"unreserved,omitempty"` // no work to which the device was given runs it
}

// Binding is a position in the policy (an index, a number of devices, the common MIG profile) and the devices that it
// selects until a reboot or the command rebind.
type Binding struct {
	Location string         `json:"location"` // in the policy: "policy.yaml:3: rules[0].select"
	Position string         `json:"position"` // "index 5, 6", "the first 2", "profile 1g.10gb"
	Devices  []gpu.DeviceID `json:"devices"`
}

// Overlap is a device that another agent on this node offers too.
type Overlap struct {
	ID    gpu.DeviceID `json:"id"`
	Index int          `json:"index"` // of the GPU
	Agent string       `json:"agent"` // the other one
}

// Injection is how containers get the devices of some pools.
type Injection struct {
	Pools      []string `json:"pools"`
	Configured string   `json:"configured,omitempty"` // the names by which an operator chose it: "auto", "envvar,cdi-cri"
	Runtime    bool     `json:"runtime"`              // by NVIDIA's container runtime
	Nodes      bool     `json:"nodes"`                // by device nodes
	CDI        bool     `json:"cdi"`                  // by CDI names; with "auto" as it is now
	Libraries  bool     `json:"libraries,omitempty"`  // the driver's files by mounts
	IDs        string   `json:"ids"`                  // by which devices are identified: uuid, index
}

// CDI is the state of this agent's CDI specifications on the node.
type CDI struct {
	Usable    bool        `json:"usable"` // with "auto" a container with it has a working driver, as far as the agent can tell; else it is written
	Reason    string      `json:"reason,omitempty"`
	Problem   string      `json:"problem,omitempty"`
	Folder    string      `json:"folder,omitempty"`
	Kind      string      `json:"kind,omitempty"`
	Defined   int         `json:"defined"` // number of devices
	Undefined []Undefined `json:"undefined,omitempty"`
	Others    []string    `json:"others,omitempty"` // names that each container gets beside those of its devices

	NoMemoryLimits string `json:"noMemoryLimits,omitempty"` // why memory limits that containers ask for have no effect
}

// Undefined is a device that the CDI specification does not define, or not completely.
type Undefined struct {
	ID     gpu.DeviceID `json:"id"`
	Reason string       `json:"reason"`
}

// Excluded is a device that is present and not offered.
type Excluded struct {
	Index  int            `json:"index"`
	ID     string         `json:"id,omitempty"`
	PCI    gpu.PCIAddress `json:"pci,omitempty"`
	Reason string         `json:"reason"`
	Failed bool           `json:"failed,omitempty"` // it can't be read; false = excluded on purpose
}

// Condition is one health condition of the ledger.
type Condition struct {
	Placement        string       `json:"placement"`     // "node", "GPU-...", "GPU-... GI 1 CI 0"
	GPU              gpu.DeviceID `json:"gpu,omitempty"` // "" = the node
	Index            int          `json:"index"`         // of the GPU; -1 = the node, or a GPU without one
	Cause            string       `json:"cause"`
	State            health.State `json:"state"`                  // its effect
	RecordedOnly     bool         `json:"recordedOnly,omitempty"` // it has no effect yet
	Detail           string       `json:"detail,omitempty"`
	Since            time.Time    `json:"since"`    // first occurrence
	LastSeen         time.Time    `json:"lastSeen"` // last occurrence
	Count            int          `json:"count"`
	Action           string       `json:"action,omitempty"`
	Clears           string       `json:"clears,omitempty"`
	Recovery         *Recovery    `json:"recovery,omitempty"` // nil = it has not begun
	IgnoredUntil     time.Time    `json:"ignoredUntil,omitzero"`
	IgnoredUntilGone bool         `json:"ignoredUntilGone,omitempty"` // an operator cleared it, and its level is still present
	Simulated        bool         `json:"simulated,omitempty"`
}

// InEffect reports whether the condition affects the health: it is not only recorded, and no operator ignores it.
func (c Condition) InEffect() bool {
	return !c.RecordedOnly && !c.IgnoredUntilGone && c.IgnoredUntil.IsZero()
}

// Recovery is the progress of a condition towards its end.
type Recovery struct {
	Since           time.Time `json:"since"` // of the evidence
	ChecksPassed    int       `json:"checksPassed"`
	ChecksRequired  int       `json:"checksRequired"`
	SecondsElapsed  int       `json:"secondsElapsed"`
	SecondsRequired int       `json:"secondsRequired"`
}

// Count is how often a GPU has reported an XID or another event since its history began. Operational events are no faults.
type Count struct {
	GPU      gpu.DeviceID `json:"gpu"`
	Index    int          `json:"index"` // -1 = the GPU has none
	Cause    string       `json:"cause"`
	Count    uint64       `json:"count"`
	LastSeen time.Time    `json:"lastSeen"`
	Detail   string       `json:"detail,omitempty"` // of an operational event: severity, XID, attributes
}

// WriteJSON writes a report, or what another command prints, for programs.
func WriteJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
