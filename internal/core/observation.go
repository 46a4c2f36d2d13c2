package core

// ObservationKind says what happened.
type ObservationKind uint8

// Kinds of observations. The zero value is a hint: something happened at the placement, and asking
// says what.
const (
	_                 ObservationKind = iota
	XID                               // the driver reported an XID; Code is its number
	Event                             // the driver raised another NVML event; Code is its type
	Lost                              // NVML says the GPU is lost, or it is not listed any more
	ProbeFailed                       // a call about the GPU failed otherwise
	CallPending                       // a call about the GPU has not returned yet, and nobody waits for it any more
	Unresponsive                      // a call about the placement has been outstanding past its deadline
	InstanceRead                      // a MIG instance was read completely
	Checked                           // the GPU answered every question about its health; HealthSample is what it said
	DriverRebound                     // the kernel driver was unbound from the GPU and bound again
	DriverUnavailable                 // the driver can't be asked; Code is its DriverState
	DriverUnloaded                    // the kernel module was unloaded: a driver that answers later was loaded anew
	DriverAvailable                   // the driver can be asked; Detail is its version
	Reserved                          // the placement was handed out to new work
	KernelLogRead                     // the kernel log was read up to Next; if that is 0, it is not read
)

// KindOf is the kind of observation that a failure to read a device is; 0 for none.
func KindOf(f Failure) ObservationKind {
	return [...]ObservationKind{NotFailed: 0, FailureLost: Lost, FailureError: ProbeFailed, FailurePending: CallPending, FailureHung: Unresponsive}[f]
}

// Observation is something that happened to a placement.
type Observation struct {
	At     Placement
	PCI    PCIAddress // names the GPU where At can't: the kernel log knows no UUID
	Kind   ObservationKind
	Code   uint64
	Detail string
	Sample HealthSample // of Checked

	// FromKernelLog marks an XID from the kernel log, which may tell again what an event has told.
	FromKernelLog bool
	// Backlog marks one that the log had before this agent followed it: an event was told to the agent before, or to none.
	Backlog bool
	// NextSequence is the sequence number of the kernel log to go on with after a Logged observation; 0 = not said.
	NextSequence uint64
	// Simulated marks a rehearsal.
	Simulated bool
}
