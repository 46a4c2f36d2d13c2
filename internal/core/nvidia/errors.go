package nvidia

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// nvmlError is an NVML call that returned an error code. It unwraps to gpu.ErrDriverLost if the code concerns the
// whole driver.
type nvmlError struct {
	Call   string // "nvmlDeviceGetUUID"
	Return nvml.Return

	text string // of nvmlErrorString, read when the call failed, as the library may be unloaded later
}

func (e *nvmlError) Error() string { return e.Call + ": " + e.text }

// Unwrap returns gpu.ErrDriverLost for a code that concerns the whole driver, else nil.
func (e *nvmlError) Unwrap() error {
	switch e.Return {
	case nvml.ERROR_UNINITIALIZED, nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return gpu.ErrDriverLost
	default:
		return nil
	}
}

// hungError means that no call about a GPU is made at present, because an earlier one has not returned.
type hungError struct {
	Call string // the call that has not returned: "nvmlDeviceGetMemoryInfo"
	At   gpu.Placement
}

func (e *hungError) Error() string { return "the driver does not answer (" + e.Call + ")" }

// errAbandoned means that a session was closed while one of its calls had not returned. The library stays
// initialised, as nvmlShutdown during another call is undefined; a later session uses it too.
var errAbandoned = errors.New("driver call has not returned")

// returnCode is the NVML code of an error, nvml.SUCCESS if it has none.
func returnCode(err error) nvml.Return {
	if e, ok := errors.AsType[*nvmlError](err); ok {
		return e.Return
	}
	return nvml.SUCCESS
}

// isUnsupported reports whether a call failed because the GPU, the driver or the user's permissions lack what it
// reads, which is no fault. A function that the library lacks counts as ERROR_FUNCTION_NOT_FOUND.
func isUnsupported(err error) bool { return lacksValue(returnCode(err)) }

func lacksValue(ret nvml.Return) bool {
	switch ret {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NO_PERMISSION,
		nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_ARGUMENT_VERSION_MISMATCH, nvml.ERROR_DEPRECATED:
		return true
	default:
		return false
	}
}

func isLost(err error) bool { return returnCode(err) == nvml.ERROR_GPU_IS_LOST }

// isDriverLost reports whether the whole driver is unusable.
func isDriverLost(err error) bool { return errors.Is(err, gpu.ErrDriverLost) }

func isHung(err error) bool {
	_, ok := errors.AsType[*hungError](err)
	return ok
}

// driverLost wraps an error that ends the session: in gpu.ErrDriverStale if it also ends the process (see
// versionMismatch), else in gpu.ErrDriverLost.
func (s *Session) driverLost(err error) error {
	if returnCode(err) == nvml.ERROR_LIB_RM_VERSION_MISMATCH {
		if err := s.versionMismatch(err); errors.Is(err, gpu.ErrDriverStale) {
			return err
		}
	}
	return fmt.Errorf("%w (%w)", gpu.ErrDriverLost, err)
}

// failureOf classifies the error of a call about a GPU.
func failureOf(err error) gpu.Failure {
	switch {
	case isLost(err), errors.Is(err, errNotListed):
		return gpu.FailureLost
	case isHung(err):
		return gpu.FailurePending
	default:
		return gpu.FailureError
	}
}
