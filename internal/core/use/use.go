package use

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Process is a process with memory of a device.
type Process struct {
	gpu.Process
	Name       string       // as procfs shows it (comm); "" = unknown
	Owner      holders.Work // of its control group; the zero value = it belongs to no work that an orchestrator started, or that is unknown
	Group      string       // control group of version 2, as the agent sees its path; "" = unknown, or none
	Unreserved bool         // no work to which the device was given runs it: see Table.Next
	MPSServer  bool         // the clients of a device that is shared by MPS use it through this process, which has no use of its own
	Since      time.Time    // since when no work to which the device was given runs it, as far as observed; zero = work does, or that is unknown
}

// Device is the use of one offered device.
type Device struct {
	ID        gpu.DeviceID
	Usage     gpu.Usage        // the latest reading; Usage.At is zero if the device did not respond
	Holders   []holders.Holder // in order, distinct
	Processes []Process        // by PID; nil if unknown

	HeldSince time.Time // since when it is held, as far as recorded or observed; zero = it is not held
	IdleSince time.Time // since when it is held and its utilisation is zero, as far as this process observed; zero = it is not idle, or its utilisation is unknown
}

// Owners returns the work that has the device, each once, in order.
func (d Device) Owners() []holders.Work {
	var owners []holders.Work
	for _, h := range d.Holders {
		if !slices.Contains(owners, h.Work) {
			owners = append(owners, h.Work)
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

	// HoldersKnown means that the orchestrator's record of holders was read: a device without holders is free.
	HoldersKnown bool
	Unknown      Unknown           // why not, unless one of Problems has it
	RecordAt     time.Time         // when the complete record was read last; zero = never. Holders may be of that time, see Table.Next
	Recorded     []holders.Holder  // by the records, of all devices: see holders.Record.Since
	Problems     []problem.Problem // why something is not known
}

// Unknown is why it is not known which work has the devices.
type Unknown struct {
	Reason string // "" = an error, which is among the problems, or the record will be complete in a moment
	Remedy string // what to set, in some words; "" = nothing
}

// Device returns the use of a device.
func (t Table) Device(id gpu.DeviceID) (Device, bool) {
	i := slices.IndexFunc(t.Devices, func(d Device) bool { return d.ID == id })
	if i < 0 {
		return Device{}, false
	}
	return t.Devices[i], true
}
