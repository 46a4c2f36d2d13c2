package inventory

import (
	"maps"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// LimitMode is whether the driver limits the device memory of each share of a device that is shared by time-slicing.
type LimitMode uint8

// The modes. With LimitRequired a share takes no work while nothing can limit its memory; with LimitBestEffort it does, without a limit then.
const (
	LimitNone LimitMode = iota
	LimitBestEffort
	LimitRequired
)

var limitModeNames = [...]string{"", "best-effort", "required"}

// String returns the value of the key "limit": "required".
func (m LimitMode) String() string { return limitModeNames[m] }

// LimitPolicy is what all limits of a policy have in common. The zero value is a policy without limits.
type LimitPolicy struct {
	On         bool   // the policy has the switch for limits, which are experimental
	Reserve    uint64 // bytes of each GPU that no share has: for CUDA contexts and the driver
	Overcommit bool   // the limits of the shares of a GPU may be more than its memory without Reserve
}

// Limits is what an agent whose policy has required limits knows of the support for them. It is never changed.
type Limits struct {
	// Withheld is why the shares of a GPU whose limit is required take no new work; a zero value means that they do. A GPU that is missing takes none until
	// that is decided: within milliseconds after the driver is open.
	Withheld map[gpu.DeviceID]LimitMissing
}

// LimitMissing is why no limit can be set on a GPU. The zero value means that one can.
type LimitMissing struct {
	Reason health.Reason // ReasonNoLimit, ReasonNoController
	Detail string        // "driver 580.159.04: want 615 or newer"
}

// Equal reports whether two values have the same content.
func (l *Limits) Equal(o *Limits) bool {
	return l == o || l != nil && o != nil && maps.Equal(l.Withheld, o.Withheld)
}
