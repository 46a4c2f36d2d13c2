package gpu

import "fmt"

// Process is a process with memory of a device, as the driver lists it (nvmlDeviceGetComputeRunningProcesses).
type Process struct {
	At     Placement      // the GPU; the MIG instance if the driver names one
	PID    int            // in the PID namespace of the agent
	Memory OptionalUint64 // bytes

	// Started is when the process started, in clock ticks since boot (proc_pid_stat(5), field 22). With PID it identifies a
	// process, as the kernel uses PIDs again.
	Started uint64
}

// String returns the process for messages: "pid 2114 (512 MiB)".
func (p Process) String() string {
	if !p.Memory.OK {
		return fmt.Sprintf("pid %d", p.PID)
	}
	return fmt.Sprintf("pid %d (%d MiB)", p.PID, p.Memory.Value>>20)
}
