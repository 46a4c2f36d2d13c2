package report

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// Owner is work that has a device: a container of a pod, or a task of a Nomad allocation.
type Owner struct {
	Orchestrator string `json:"orchestrator"` // kubernetes, nomad
	Namespace    string `json:"namespace,omitempty"`
	Name         string `json:"name,omitempty"`      // of the pod; ID of the Nomad job
	Container    string `json:"container,omitempty"` // of the pod; task of the Nomad job
	ID           string `json:"id,omitempty"`        // UID of the pod; ID of the Nomad allocation
	Claim        string `json:"claim,omitempty"`     // resource claim through which a pod has the device
}

// Usage is the latest reading of what a device does. What the device does not report is missing.
type Usage struct {
	At                   time.Time `json:"at"`
	GPUPercent           *uint64   `json:"gpuPercent,omitempty"`
	MemoryPercent        *uint64   `json:"memoryPercent,omitempty"` // of the time with memory traffic
	MemoryUsedBytes      *uint64   `json:"memoryUsedBytes,omitempty"`
	MemoryTotalBytes     *uint64   `json:"memoryTotalBytes,omitempty"`
	PowerMilliwatts      *uint64   `json:"powerMilliwatts,omitempty"`
	PowerLimitMilliwatts *uint64   `json:"powerLimitMilliwatts,omitempty"`
	TemperatureCelsius   *uint64   `json:"temperatureCelsius,omitempty"`
}

// Unknown is why it is not known which work has the devices.
type Unknown struct {
	Reason string `json:"reason,omitempty"` // missing: a problem OWNERS_UNKNOWN has it, or it will be known in a moment
	Remedy string `json:"remedy,omitempty"` // what to set: "set nomad_address"
}

// WithUse returns the report with the use of its devices, and why some of it is not known as problems. The devices of r are changed.
func (r Report) WithUse(t use.Table) Report {
	r = r.WithProblems(t.Problems...)
	r.OwnersUnread = t.At.IsZero() && len(r.Devices) > 0
	if !t.At.IsZero() && !t.HoldersKnown && len(r.Devices) > 0 {
		r.OwnersUnknown = new(Unknown(t.Unknown))
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		u, ok := t.Device(d.ID)
		if !ok {
			continue
		}
		d.HeldSince, d.IdleSince, d.Usage = u.HeldSince, u.IdleSince, describeUsage(u.Usage)
		for _, o := range u.Owners() {
			d.Owners = append(d.Owners, Owner(o))
		}
		if u.Processes != nil { // else those of the latest health check, if it read any
			d.Processes = nil
		}
		for _, p := range u.Processes {
			d.Processes = append(d.Processes, describeProcess(p))
		}
	}
	return r
}

func describeProcess(p use.Process) Process {
	one := Process{PID: p.PID, MemoryBytes: number(p.Memory), Name: p.Name, Unreserved: p.Unreserved}
	if p.Owner != (holders.Work{}) {
		one.Owner = new(Owner(p.Owner))
	}
	return one
}

func describeUsage(u gpu.Usage) *Usage {
	if u.At.IsZero() {
		return nil
	}
	return &Usage{
		At: u.At, GPUPercent: number(u.GPU), MemoryPercent: number(u.Memory), MemoryUsedBytes: number(u.MemoryUsed), MemoryTotalBytes: number(u.MemoryTotal),
		PowerMilliwatts: number(u.Power), PowerLimitMilliwatts: number(u.PowerLimit), TemperatureCelsius: number(u.Temperature),
	}
}

func number(n gpu.OptionalUint64) *uint64 {
	if !n.OK {
		return nil
	}
	return &n.Value
}
