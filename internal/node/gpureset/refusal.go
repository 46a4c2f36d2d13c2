package gpureset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
)

// Refusal is why nvidia-smi did not reset a GPU.
type Refusal uint8

// Refusals.
const (
	Other        Refusal = iota // see the text
	InUse                       // by a process, or by another part of the driver
	NotSupported                // by this GPU, or it is that of the display
	Linked                      // it is reset only together with others
	NotPermitted                // this process lacks a right
	NotFound                    // the driver does not have the GPU
	TimedOut                    // it had not ended in time; the GPU may be in any state
)

var refusalNames = [...]string{"OTHER", "IN_USE", "NOT_SUPPORTED", "LINKED", "NOT_PERMITTED", "NOT_FOUND", "TIMED_OUT"}

// String is the refusal as logs and metrics have it.
func (r Refusal) String() string { return refusalNames[r] }

// MarshalText returns the refusal as String does.
func (r Refusal) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads a refusal. One of another version is Other.
func (r *Refusal) UnmarshalText(text []byte) error {
	*r = Refusal(max(slices.Index(refusalNames[:], string(text)), 0))
	return nil
}

// RefusedError is that nvidia-smi did not do what it was called for: a reset, or a step before it. It is final for this attempt.
type RefusedError struct {
	GPU     gpu.DeviceID
	Refusal Refusal
	Text    string // what nvidia-smi printed, in one line
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("nvidia-smi failed for %s: %s: %s", e.GPU, e.Refusal, e.Text)
}

// refusals are parts of the texts with which nvidia-smi refuses, in lower case, in the order in which they count. Its exit status shows less: 255 with
// most texts, 3 with "is not supported.", 6 with "GPU is lost".
var refusals = []struct {
	part string
	is   Refusal
}{
	// "GPU 00000000:1A:00.0: In use by another client" below "The following GPUs could not be reset:" (NVIDIA/NVSentinel#1690, NVIDIA/mig-parted#181).
	// A kernel module can be the client: nvidia_drm.
	{"in use by another client", InUse},
	{"currently in use by another process", InUse},       // "GPU 00000000:C1:00.0 is currently in use by another process." (NVIDIA/gpu-operator#118)
	{"being used by one or more other processes", InUse}, // "1 device is currently being used by one or more other processes (e.g., Fabric Manager" (both)
	{"being used by some other process", InUse},          // "Unable to reset this GPU because it's being used by some other process (e.g. CUDA" (older drivers)
	{"insufficient permissions", NotPermitted},           // NVML_ERROR_NO_PERMISSION; "... persistence mode for GPU 00000000:00:04.0: Insufficient Permissions"
	{"is the primary gpu", NotSupported},                 // "GPU Reset couldn't run because GPU 00000000:01:00.0 is the primary GPU." (a display uses it)
	{"nvlink", Linked},                                   // nvidia-smi(1), --gpu-reset: before Ampere, and without Fabric Manager, GPUs that NVLinks connect are reset in one call
	{"peer", Linked},                                     // the same
	{"not supported", NotSupported},                      // "Resetting GPU 00000000:00:03.0 is not supported." (in a guest); "GPU 00000000:8B:00.0: Not Supported"
	{"gpu is lost", NotFound},                            // "Unable to determine the device handle for GPU0000:0C:00.0: GPU is lost.  Reboot the system to recover this GPU"
	{"no devices were found", NotFound},                  // with -i of a GPU that is not there
	{"unable to determine the device handle", NotFound},  // "...: Unknown Error"
	{"communicate with the nvidia driver", NotFound},     // "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
	{"failed to initialize nvml", NotFound},              // "Failed to initialize NVML: Driver/library version mismatch"
}

// maxText is how much of nvidia-smi's text an error has: its longest refusal has 400 characters.
const maxText = 1000

// refused is the error of a call that did not succeed.
func refused(id gpu.DeviceID, printed string, err error) error {
	e := &RefusedError{GPU: id, Text: proofcommand.Line(printed, maxText)}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		e.Refusal = TimedOut
		e.Text = strings.TrimSpace("it had not ended in time. " + e.Text)
	case err != nil:
		return fmt.Errorf("nvidia-smi: %w", err)
	case e.Text == "":
		e.Text = "it printed nothing"
	default:
		low := strings.ToLower(e.Text)
		for _, one := range refusals {
			if strings.Contains(low, one.part) {
				e.Refusal = one.is
				break
			}
		}
	}
	return e
}
