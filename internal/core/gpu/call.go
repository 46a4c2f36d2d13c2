package gpu

import "time"

// Call is a driver call in progress.
type Call struct {
	Name  string    // "nvmlDeviceGetMemoryInfo"
	At    Placement // the GPU that the call is about; Node for a call about none
	Index int       // NVML index of that GPU, also before its UUID is known; -1 for a call about none
	Since time.Time
}
