package gpu

import "time"

// Call is a driver call in progress.
type Call struct {
	Name  string    // "nvmlDeviceGetMemoryInfo"
	At    Placement // the GPU that the call is about; Node for a call about none
	Index int       // NVML index of that GPU, also before its UUID is known; -1 for a call about none
	Since time.Time
}

// CallCount counts the calls of one function of the driver that have returned, since the process started.
type CallCount struct {
	Function string // "nvmlDeviceGetMemoryInfo", without the version
	Calls    uint64
	Errors   uint64        // calls that failed; an answer that the device or the driver lacks the value is no failure
	Time     time.Duration // in all calls together
}
