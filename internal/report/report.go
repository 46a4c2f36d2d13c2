package report

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

// Where a report comes from.
const (
	FromAgent   = "agent"   // the running agent
	FromReading = "reading" // a reading of the driver, as no agent answered
)

// Report is a state in an operator's words. Its JSON is a promise to scripts: keys are added, never
// changed.
type Report struct {
	Source         string      `json:"source,omitempty"` // FromAgent, FromReading; "" = not said
	Driver         Driver      `json:"driver"`
	Devices        []Device    `json:"devices"`
	Excluded       []Excluded  `json:"excluded"`
	Conditions     []Condition `json:"conditions"`
	Counts         []Count     `json:"counts"`
	PolicyWarnings []string    `json:"findings"` // parts of the policy that concern no device or whose order has changed, pools that are mixed
	Bindings       []Binding   `json:"bindings"` // what the positions of the policy mean
	Overlaps       []Overlap   `json:"contests"`
	Warnings       []string    `json:"notes,omitempty"` // about the agent itself
}

// Driver is the state of the driver.
type Driver struct {
	State   string `json:"state"` // pending, absent, failed, ready
	Version string `json:"version,omitempty"`
	CUDA    string `json:"cuda,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

// Device is one device on offer, well or not: a GPU or a MIG instance, however many units it is offered as. While a
// change of the policy takes effect it may be there twice, with units that come and units that go.
type Device struct {
	ID          core.DeviceID   `json:"id"`                    // its UUID; the ID of its unit, if it has one only
	GPU         core.DeviceID   `json:"gpu"`                   // the physical GPU, also of a MIG instance
	Index       int             `json:"index"`                 // the driver's, now
	Number      string          `json:"policyIndex,omitempty"` // by which a policy selects it, if that is another: "5", "0:1"
	Model       string          `json:"model"`
	Profile     string          `json:"profile,omitempty"` // of a MIG instance
	PCI         core.PCIAddress `json:"pci"`
	NUMANode    int             `json:"numaNode"` // -1 = none
	MemoryBytes uint64          `json:"memoryBytes"`
	Schedulable bool            `json:"schedulable"`
	Health      string          `json:"health"` // the line that both orchestrators' operators see

	State     core.HealthState `json:"state"` // healthy, degraded, unknown, unhealthy, lost
	Cause     string           `json:"cause,omitempty"`
	Since     time.Time        `json:"since,omitzero"`
	Asks      string           `json:"driverAsks,omitempty"` // the driver's verdict, if it wants something
	Action    string           `json:"action,omitempty"`
	Clears    string           `json:"clears,omitempty"`
	Limits    string           `json:"limits,omitempty"` // what can't be seen of it
	Simulated bool             `json:"simulated,omitempty"`
	Advisory  bool             `json:"advisory,omitempty"` // judged, but takes work all the same

	// Device nodes that a container of the device needs and the host lacks, and the command that creates them. The
	// device takes work all the same.
	MissingNodes []string `json:"missingNodes,omitempty"`
	CreateNodes  string   `json:"createNodes,omitempty"`

	Pool          string `json:"pool"`                    // what a request names
	Sharing       string `json:"sharing"`                 // exclusive, time-slicing, mps
	Replicas      int    `json:"replicas,omitempty"`      // units of a device that is shared: "UUID::0" and so on
	OnePerRequest bool   `json:"onePerRequest,omitempty"` // a request for two of its units is refused
	ClientMemory  uint64 `json:"mpsMemoryBytes,omitempty"`
	ClientThreads int    `json:"mpsThreadPercent,omitempty"`

	Instance          *int   `json:"instance,omitempty"` // number of a MIG instance on its GPU, from 0
	Serial            string `json:"serial,omitempty"`
	Architecture      string `json:"architecture,omitempty"`
	Brand             string `json:"brand,omitempty"`
	ComputeCapability string `json:"computeCapability,omitempty"`
	ECC               string `json:"ecc,omitempty"` // Enabled, Disabled
	NVLinks           int    `json:"nvLinks,omitempty"`
}

// Overlap is a device that another agent on this host offers too.
type Overlap struct {
	ID    core.DeviceID `json:"id"`
	Index int           `json:"index"` // of the GPU
	By    string        `json:"by"`
}

// Excluded is a device that was seen and is not offered.
type Excluded struct {
	Index  int             `json:"index"`
	ID     string          `json:"id,omitempty"`
	PCI    core.PCIAddress `json:"pci,omitempty"`
	Reason string          `json:"reason"`
}

// Condition is one standing cause.
type Condition struct {
	At           string           `json:"at"`            // "node", "GPU-...", "GPU-... GI 1 CI 0"
	GPU          core.DeviceID    `json:"gpu,omitempty"` // "" = the node
	Index        int              `json:"index"`         // of the GPU; -1 = the node, or a GPU without one
	Cause        string           `json:"cause"`
	State        core.HealthState `json:"state"`           // its effect
	Noted        bool             `json:"noted,omitempty"` // it has none yet
	Detail       string           `json:"detail,omitempty"`
	Since        time.Time        `json:"since"` // first seen
	Last         time.Time        `json:"last"`  // last happened
	Count        int              `json:"count"`
	Action       string           `json:"action,omitempty"`
	Clears       string           `json:"clears,omitempty"`
	Recovering   *Recovery        `json:"recovering,omitempty"`
	IgnoredUntil time.Time        `json:"ignoredUntil,omitzero"`
	Disregarded  bool             `json:"disregarded,omitempty"` // an operator cleared it, and it is still there
	Simulated    bool             `json:"simulated,omitempty"`
}

// Recovery is how far a condition is on its way back.
type Recovery struct {
	Since        time.Time `json:"since"` // from then on the evidence holds
	Checks       int       `json:"checks"`
	ChecksWanted int       `json:"checksWanted"`
	Held         int       `json:"heldSeconds"`
	HeldWanted   int       `json:"heldSecondsWanted"`
}

// Count is how often a GPU has reported an XID or another event since its history began.
type Count struct {
	GPU   core.DeviceID `json:"gpu"`
	Index int           `json:"index"` // -1 = the GPU has none
	Cause string        `json:"cause"`
	Count uint64        `json:"count"`
	Last  time.Time     `json:"last"`
}
