package inventory

import "github.com/tandem-gpu/tandem/internal/core/gpu"

// OccupancyMode configures what is done about processes that use a device which no work was given.
type OccupancyMode string

// The occupancy modes.
const (
	OccupancyOff      OccupancyMode = "off"      // owners and processes are not read
	OccupancyReport   OccupancyMode = "report"   // they are shown
	OccupancyWithhold OccupancyMode = "withhold" // such a device is unhealthy (health.ReasonOccupied) until it is free
)

// Occupied is a device with processes that no work runs to which the device was given.
type Occupied struct {
	Device gpu.DeviceID
	Detail string // "pid 2114 (512 MiB)"
}
