package health

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// ObservationKind is the kind of an observation.
type ObservationKind uint8

// Kinds of observations. The zero value has no effect: something happened at the placement, and the next health
// check shows what.
const (
	_                 ObservationKind = iota
	XID                               // the driver reported an XID; Code is its number
	Event                             // the driver raised another NVML event; Code is its type
	Lost                              // NVML_ERROR_GPU_IS_LOST, or the driver does not list the GPU any more
	ProbeFailed                       // a call about the GPU returned another error
	CallPending                       // a call about the GPU has not returned, and the agent stopped waiting for it
	Unresponsive                      // a call about the placement has not returned by its deadline
	InstanceRead                      // a MIG instance was read completely
	Checked                           // the health check of a GPU returned; Sample is its result
	DriverRebound                     // the GPU was unbound from the kernel driver and bound again
	DriverUnavailable                 // the driver can't be called; Code is its DriverState
	DriverUnloaded                    // the kernel module was unloaded: a driver that responds later was loaded again
	DriverAvailable                   // the driver responds; Detail is its version
	Reserved                          // the placement was allocated to a new workload
	KernelLogRead                     // the kernel log was read up to NextSequence; 0 = it is not read
	WasReset                          // the GPU was reset by this agent
	Operational                       // the driver raised an operational event
	KernelLogReplaced                 // the position is of another kernel log: this one is read from its beginning
)

// NotListed is the detail of Lost where the driver does not list a GPU, without a word of a fault: it may not be shown to the agent.
const NotListed = "not listed by the driver"

// KindOf returns the kind of observation for a failure to read a device; 0 for NotFailed.
func KindOf(f gpu.Failure) ObservationKind {
	return [...]ObservationKind{gpu.NotFailed: 0, gpu.FailureLost: Lost, gpu.FailureError: ProbeFailed, gpu.FailurePending: CallPending, gpu.FailureHung: Unresponsive}[f]
}

// Observation is an occurrence at a placement.
type Observation struct {
	At     gpu.Placement
	PCI    gpu.PCIAddress // identifies the GPU if At does not: the kernel log has no UUIDs
	Kind   ObservationKind
	Code   uint64
	Detail string
	Sample Sample // of Checked

	Operational OperationalEvent // of Operational

	// Processes are, of Checked, those with memory of the GPU, by PID; nil = unknown. They are never changed.
	Processes *[]gpu.Process

	// Shared marks, of Reserved, a placement that several workloads can have at a time.
	Shared bool

	// FromKernelLog marks an XID from the kernel log, which NVML may have reported as an event too.
	FromKernelLog bool
	// FromOperational marks an XID of an operational event, which is also an NVML event and in the kernel log.
	FromOperational bool
	// Backlog marks an XID that was in the kernel log before this agent started to follow it. NVML reported its
	// event to an earlier process, or to none.
	Backlog bool
	// Again marks a Backlog that was read from the beginning of the log. An earlier process may have observed it, too.
	Again bool
	// Repeats is how many more lines of the same fault were in the kernel log within seconds.
	Repeats int
	// Age is how long ago it happened when it was reported. It may have been a few seconds more.
	Age Age
	// Reported is when it was reported, if it has waited since until its GPU was known; zero = now.
	Reported time.Time
	// NextSequence is the sequence number after that of the line, for KernelLogRead and FromKernelLog; 0 = unknown.
	NextSequence uint64
	// Complete marks a KernelLogRead after which every XID since the load of the driver has been observed.
	Complete bool
	// Simulated marks a fault that an operator simulates.
	Simulated bool
}

// CallsForCheck reports whether the next health check should be at once, because it may show a change.
func (o Observation) CallsForCheck() bool {
	if o.Kind == KernelLogRead || o.Kind == KernelLogReplaced {
		return false
	}
	return o.Kind != Operational || o.Operational.CallsForCheck()
}

func (o Observation) processes() []gpu.Process {
	if o.Processes == nil {
		return nil
	}
	return *o.Processes
}
