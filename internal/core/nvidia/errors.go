package nvidia

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// CallError is a driver call that failed. It unwraps to core.ErrDriverLost where the code concerns the driver
// as a whole.
type CallError struct {
	Call   string         // "nvmlDeviceGetUUID"
	At     core.Placement // core.Node for a call that is about no GPU
	Return nvml.Return

	text string // the driver's words, taken while its library was there to be asked
}

func (e *CallError) Error() string { return e.Call + ": " + e.text }

func (e *CallError) Unwrap() error {
	switch e.Return {
	case nvml.ERROR_UNINITIALIZED, nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return core.ErrDriverLost
	default:
		return nil
	}
}

// StuckError says that a GPU is not asked at present, because a call about it has not come back.
type StuckError struct {
	Call  string // "nvmlDeviceGetMemoryInfo"
	At    core.Placement
	Index int // NVML index of the GPU
}

func (e *StuckError) Error() string { return "the driver does not answer (" + e.Call + ")" }

// ErrAbandoned says that a session was closed with a call in the driver. The library stays initialised, as
// nvmlShutdown under a call in progress is undefined; a later session shares it.
var ErrAbandoned = errors.New("a driver call was abandoned")

func returned(err error) nvml.Return {
	if e, ok := errors.AsType[*CallError](err); ok {
		return e.Return
	}
	return nvml.SUCCESS
}

// isUnsupported reports whether a call failed because this device, driver or user does not have what was
// asked for, which is a fact and not a fault. A missing function answers ERROR_FUNCTION_NOT_FOUND.
func isUnsupported(err error) bool {
	switch returned(err) {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NO_PERMISSION,
		nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_ARGUMENT_VERSION_MISMATCH, nvml.ERROR_DEPRECATED:
		return true
	default:
		return false
	}
}

func isLost(err error) bool { return returned(err) == nvml.ERROR_GPU_IS_LOST }

// isGone reports whether the driver as a whole can't be asked any more.
func isGone(err error) bool { return errors.Is(err, core.ErrDriverLost) }

// gone says that err ends the session, and whether the process too: see mismatch.
func (s *Session) gone(err error) error {
	if returned(err) == nvml.ERROR_LIB_RM_VERSION_MISMATCH {
		if err := s.mismatch(err); errors.Is(err, core.ErrDriverStale) {
			return err
		}
	}
	return fmt.Errorf("%w (%w)", core.ErrDriverLost, err)
}

// failureOf classifies the error of a call about a GPU.
func failureOf(err error) core.Failure {
	switch {
	case isLost(err), errors.Is(err, errUnlisted):
		return core.FailureLost
	case isStuck(err):
		return core.FailurePending
	default:
		return core.FailureError
	}
}

func isStuck(err error) bool {
	_, ok := errors.AsType[*StuckError](err)
	return ok
}
