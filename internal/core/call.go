package core

import "time"

// Call is a driver call in progress.
type Call struct {
	Name  string    // "nvmlDeviceGetMemoryInfo"
	At    Placement // the GPU that the call is about; Node for a call about none
	Index int       // NVML index of that GPU, -1 for a call about none; tells who hangs before its UUID is known
	Since time.Time
}

// CallStats is what was asked of the driver, the event wait's time excepted.
type CallStats struct {
	Calls    uint64
	Duration time.Duration // spent in calls that have come back
}
