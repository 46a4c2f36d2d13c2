package gpureset

import (
	"context"
	"fmt"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Target is a whole GPU.
type Target struct {
	GPU   gpu.DeviceID `json:"gpu"`
	Minor int          `json:"minor"` // N of its device node /dev/nvidiaN

	// Persistence means that its persistence mode was on when the driver last reported it. It counts while nvidia-smi
	// does not show the mode.
	Persistence bool `json:"persistence,omitempty"`
}

// Look is what a reset would find.
type Look struct {
	Clients     []Client `json:"clients,omitempty"`     // that have the GPU open
	Persistence bool     `json:"persistence,omitempty"` // its persistence mode is on
}

// Resetter resets GPUs: Local in this process, resetserver.Client by the component that has the rights for it. Its methods are safe for concurrent use, and fail
// with the same typed errors: *InUseError, *RefusedError, *PersistenceError, *UnavailableError, *BusyError.
type Resetter interface {
	// Ready returns why no GPU can be reset at all, with the remedy: nvidia-smi is missing, the process is not root, the component does not answer.
	Ready(ctx context.Context) error

	// Look changes nothing. The persistence mode is not read while clients have the GPU open.
	Look(ctx context.Context, t Target) (Look, error)

	// Reset resets a GPU that no process has open; else it fails with *InUseError, and has reset nothing. The persistence mode is as before afterwards,
	// or *PersistenceError is among the errors. It returns within five minutes. If ctx ends, no further step begins; a reset that has begun is awaited,
	// because it can't be taken back.
	Reset(ctx context.Context, t Target) error

	// Restore turns the persistence mode on again, after a reset whose process was killed. It fails with *BusyError
	// while the nvidia-smi of that process may run.
	Restore(ctx context.Context, id gpu.DeviceID) error
}

// InUseError is that processes have a GPU open. It was not reset.
type InUseError struct {
	GPU     gpu.DeviceID
	Clients []Client
}

func (e *InUseError) Error() string {
	names := make([]string, len(e.Clients))
	for i, c := range e.Clients {
		names[i] = c.String()
	}
	return fmt.Sprintf("%s is open in %s", e.GPU, strings.Join(names, ", "))
}

// PersistenceError is that the persistence mode of a GPU is not as it was. The reset may have been done.
type PersistenceError struct {
	GPU gpu.DeviceID
	Err error
}

func (e *PersistenceError) Error() string {
	return fmt.Sprintf("the persistence mode of %s, which was on, is off: run nvidia-smi -pm 1 -i %s: %v", e.GPU, e.GPU, e.Err)
}

func (e *PersistenceError) Unwrap() error { return e.Err }

// UnavailableError is that no GPU can be reset by this process or node as it is set up.
type UnavailableError struct {
	Remedy string
	Err    error
}

func (e *UnavailableError) Error() string {
	return fmt.Sprintf("no GPU can be reset: %v: %s", e.Err, e.Remedy)
}

func (e *UnavailableError) Unwrap() error { return e.Err }
