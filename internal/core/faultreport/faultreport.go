// Package faultreport is the texts in which agents report the faults of their GPUs to programs outside of the node: the annotation of a Kubernetes
// Node (Report), and Nomad's HealthDescription of a device (Description). They are interfaces that stay: fields are only added.
package faultreport

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Annotation of the Node that has the report, and how long it may be.
const (
	Annotation = "tandem.dev/gpu-faults"
	MaxBytes   = 16 << 10
)

// Version of the report.
const Version = 1

// Renewed is how often an agent writes a report that has faults, also if nothing changes. A reader takes one that is older than three times that
// as the report of an agent that does not run.
const Renewed = 30 * time.Second

// Report has the faults of one node, the worst first.
type Report struct {
	Version int       `json:"v"`
	At      time.Time `json:"at"` // by the clock of the node
	Boot    string    `json:"boot,omitempty"`
	Faults  []Fault   `json:"faults"`
	More    int       `json:"more,omitempty"` // faults that did not fit

	// Devices that take work, by extended resource, of those that the agent offers to the kubelet's device manager. A resource that is missing has
	// none. The kubelet counts a device that became unhealthy as allocatable in the Node's status for up to 10 s more (nodeStatusUpdateFrequency).
	Devices map[string]int `json:"devices,omitempty"`
}

// Fault is a condition of a GPU or of a MIG instance.
type Fault struct {
	GPU gpu.DeviceID `json:"gpu"`
	PCI string       `json:"pci,omitempty"`
	GI  *uint32      `json:"gi,omitempty"` // nil = the whole GPU
	CI  *uint32      `json:"ci,omitempty"` // nil = the whole GPU instance

	State  health.State  `json:"state"`
	Repair health.Repair `json:"repair"`
	Cause  string        `json:"cause"` // as health.Condition.Cause names it
	Since  time.Time     `json:"since"`

	Simulated   bool `json:"simulated,omitempty"`   // by an operator
	Advisory    bool `json:"advisory,omitempty"`    // reported only: the device takes work
	Unconfirmed bool `json:"unconfirmed,omitempty"` // only the first check after a start has shown it

	Holders      []string `json:"holders,omitempty"` // UIDs of pods that have the hardware
	HoldersKnown bool     `json:"holdersKnown"`      // false = the agent has no complete record of them
}

// Placement returns where the fault is.
func (f Fault) Placement() gpu.Placement {
	at := gpu.WholeGPU(f.GPU)
	if f.GI != nil {
		at.GI = *f.GI
	}
	if f.CI != nil {
		at.CI = *f.CI
	}
	return at
}

// Encode returns the text of a report. If that would be longer than MaxBytes, faults at the end are left out, and More has their number.
func Encode(r Report) (string, error) {
	r.Version = Version
	if r.Faults == nil {
		r.Faults = []Fault{}
	}
	for {
		text, err := json.Marshal(r)
		if err != nil {
			return "", fmt.Errorf("encode the report of faults: %w", err)
		}
		if over := len(text) - MaxBytes; over <= 0 || len(r.Faults) == 0 {
			return string(text), nil
		}
		r.Faults, r.More = r.Faults[:len(r.Faults)-1], r.More+1
	}
}

// Parse reads the text of a report. A text that it does not understand in whole is an error: a part of a report is not what the node has.
func Parse(text string) (Report, error) {
	if len(text) > MaxBytes {
		return Report{}, fmt.Errorf("the report of faults has %d bytes, and %d are the most", len(text), MaxBytes)
	}
	var r Report
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return Report{}, fmt.Errorf("read the report of faults: %w", err)
	}
	if r.Version != Version {
		return Report{}, fmt.Errorf("the report of faults has version %d, and this program reads %d", r.Version, Version)
	}
	for i, f := range r.Faults {
		if err := f.check(); err != nil {
			return Report{}, fmt.Errorf("fault %d of the report %w", i, err)
		}
	}
	return r, nil
}

// The longest names, in bytes: readers keep them.
const (
	maxCause = 64
	maxGPU   = 128
)

// check returns why a fault is none that an agent writes. A reader puts it beside those of other nodes, in what it stores and shows.
func (f Fault) check() error {
	switch {
	case f.GPU == "" || len(f.GPU) > maxGPU || strings.ContainsFunc(string(f.GPU), func(c rune) bool { return c <= ' ' || c > '~' }):
		return fmt.Errorf("names GPU %.140q", f.GPU)
	case !isCause(f.Cause):
		return fmt.Errorf("names cause %.80q", f.Cause)
	case !f.Since.IsZero() && f.Since.Unix() < 0:
		return fmt.Errorf("has since %v, which is before 1970", f.Since)
	}
	return nil
}
