package use

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// The orchestrators.
const (
	Kubernetes = "kubernetes"
	Nomad      = "nomad"
)

// Owner is work that has devices: a container of a pod, or a task of a Nomad allocation. It is comparable; "" is unknown.
type Owner struct {
	Orchestrator string // Kubernetes, Nomad
	Namespace    string // of the pod or the job
	Name         string // of the pod; ID of the Nomad job
	Container    string // of the pod; task of the Nomad job
	ID           string // UID of the pod; ID of the Nomad allocation
	Claim        string // name of the resource claim through which a pod has the device; "" = a device plugin
}

// Hold is a unit that an orchestrator gave to work.
type Hold struct {
	Owner    Owner
	Resource string           // name of the resource in the request, such as "nvidia.com/gpu" or "nvidia/gpu"
	Unit     inventory.UnitID // of a device or a replica of it; "" = not known which
	Device   gpu.DeviceID

	// Observed means that a process is the only evidence: no record shows what its work holds.
	Observed bool
}

// Process is a process with memory of a device.
type Process struct {
	gpu.Process
	Name       string    // as procfs shows it (comm); "" = unknown
	Owner      Owner     // of its control group; the zero value = it belongs to no work that an orchestrator started, or that is unknown
	Unreserved bool      // no work to which the device was given runs it: see Table.Next
	Since      time.Time // since when no work to which the device was given runs it, as far as observed; zero = work does, or that is unknown
}

// Device is the use of one offered device.
type Device struct {
	ID        gpu.DeviceID
	Usage     gpu.Usage // the latest reading; Usage.At is zero if the device did not respond
	Holds     []Hold    // in order, distinct
	Processes []Process // by PID; nil if unknown

	HeldSince time.Time // since when it is held, as far as observed; zero = it is not held
	IdleSince time.Time // since when it is held and its utilisation is zero; zero = it is not idle, or its utilisation is unknown
}

// Owners returns the owners of the holds, each once, in order.
func (d Device) Owners() []Owner {
	var owners []Owner
	for _, h := range d.Holds {
		if !slices.Contains(owners, h.Owner) {
			owners = append(owners, h.Owner)
		}
	}
	return owners
}

// Unreserved returns the processes with memory of the device that no work runs to which it was given.
func (d Device) Unreserved() []Process {
	return slices.DeleteFunc(slices.Clone(d.Processes), func(p Process) bool { return !p.Unreserved })
}

// Table is the use of all devices at one time. It is immutable.
type Table struct {
	At      time.Time // when it was made; zero = not yet
	Devices []Device  // in the order of the inventory. Not to be changed

	// HoldersKnown means that the orchestrator's record of holders was read: a device without holds is free.
	HoldersKnown bool
	RecordAt     time.Time         // when the complete record was read last; zero = never. Holds may be of that time, see Table.Next
	Problems     []problem.Problem // why something is not known
}

// Device returns the use of a device.
func (t Table) Device(id gpu.DeviceID) (Device, bool) {
	i := slices.IndexFunc(t.Devices, func(d Device) bool { return d.ID == id })
	if i < 0 {
		return Device{}, false
	}
	return t.Devices[i], true
}
