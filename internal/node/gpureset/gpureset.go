package gpureset

import (
	"context"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Target is a whole GPU.
type Target struct {
	GPU   gpu.DeviceID `json:"gpu"`
	Minor int          `json:"minor"` // N of its device node /dev/nvidiaN
}

// Look is what a reset would find.
type Look struct {
	Clients     []Client `json:"clients"`     // that have the GPU open
	Persistence bool     `json:"persistence"` // its persistence mode is on
}

// Resetter resets GPUs: Local in this process, Remote in the component that has the rights for it. Its methods are safe for concurrent use, and fail
// with the same typed errors: *InUseError, *RefusedError, *PersistenceError, *UnavailableError.
type Resetter interface {
	// Ready returns why no GPU can be reset at all, with the remedy: nvidia-smi is missing, the process is not root, the component does not answer.
	Ready(ctx context.Context) error

	// Look changes nothing. The persistence mode is not read while clients have the GPU open.
	Look(ctx context.Context, t Target) (Look, error)

	// Reset resets a GPU that no process has open; else it fails with *InUseError, and has changed nothing. The persistence mode is as before afterwards,
	// or *PersistenceError is among the errors. It returns within 3.5 minutes. If ctx ends, no further step begins; a reset that has begun is awaited,
	// because it can't be taken back.
	Reset(ctx context.Context, t Target) error

	// Restore turns the persistence mode on again, after a reset whose process was killed.
	Restore(ctx context.Context, id gpu.DeviceID) error
}
