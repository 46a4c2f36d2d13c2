package core

import "time"

// Call is a driver call in progress.
type Call struct {
	Name  string    // "nvmlDeviceGetMemoryInfo"
	At    Placement // the GPU that the call is about; Node for a call about none
	Since time.Time // zero if nothing is in progress
}
