package gpureset

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Limits of the calls of nvidia-smi.
const (
	ResetAtMost = 2 * time.Minute
	callAtMost  = 20 * time.Second // for another one: a driver can hang
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

// RefusedError is that nvidia-smi did not reset a GPU. It is final for this attempt.
type RefusedError struct {
	GPU     gpu.DeviceID
	Refusal Refusal
	Text    string // what nvidia-smi printed, in one line
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("nvidia-smi did not reset %s: %s: %s", e.GPU, e.Refusal, e.Text)
}

// InUseError is that processes have a GPU open. Nothing was done.
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

// Call runs nvidia-smi, and returns all that it printed and its exit status. The error is that it could not be started, or had not ended when
// the context did.
type Call func(ctx context.Context, args ...string) (printed string, status int, err error)

// Local resets GPUs in this process, which is root on the node. Its fields must not change while it is used.
type Local struct {
	Proc string // where procfs is mounted
	Call Call
}

// Check returns why a GPU can't be reset now, without a change: what Reset would do first.
func (r Local) Check(d gpu.Device) error {
	clients, err := Clients(r.Proc, d.Minor)
	if err == nil && len(clients) > 0 {
		err = &InUseError{d.At.GPU, clients}
	}
	return err
}

// Reset resets a whole GPU. It returns within ResetAtMost and the time of three more calls. If ctx ends, no further step begins; a reset that
// has begun is awaited, because it can't be taken back.
func (r Local) Reset(ctx context.Context, d gpu.Device) (err error) {
	if err := errors.Join(r.Check(d), ctx.Err()); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	on, err := r.persistence(ctx, d.At.GPU)
	if err != nil {
		return err
	}
	if on {
		if err := r.setPersistence(ctx, d.At.GPU, "0"); err != nil {
			return err
		}
		defer func() {
			if failed := r.setPersistence(ctx, d.At.GPU, "1"); failed != nil {
				err = errors.Join(err, &PersistenceError{d.At.GPU, failed})
			}
		}()
	}
	printed, status, err := r.call(ctx, ResetAtMost, "--gpu-reset", "-i", string(d.At.GPU))
	if err == nil && status == 0 && strings.Contains(printed, "was successfully reset") {
		return nil
	}
	return refused(d.At.GPU, printed, err)
}

// persistence reports whether a GPU's persistence mode is on. With it the driver, or nvidia-persistenced, has the GPU open, and it can't be reset.
func (r Local) persistence(ctx context.Context, id gpu.DeviceID) (bool, error) {
	printed, status, err := r.call(ctx, callAtMost, "--query-gpu=persistence_mode", "--format=csv,noheader", "-i", string(id))
	switch text := strings.TrimSpace(printed); {
	case err == nil && status == 0 && text == "Enabled":
		return true, nil
	case err == nil && status == 0 && (text == "Disabled" || text == "[N/A]" || text == "[Not Supported]"):
		return false, nil
	}
	return false, refused(id, printed, err)
}

func (r Local) setPersistence(ctx context.Context, id gpu.DeviceID, to string) error {
	printed, status, err := r.call(ctx, callAtMost, "-pm", to, "-i", string(id))
	if err == nil && status == 0 {
		return nil
	}
	return refused(id, printed, err)
}

func (r Local) call(ctx context.Context, atMost time.Duration, args ...string) (string, int, error) {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	return r.Call(ctx, args...)
}

// refusals are parts of the texts with which nvidia-smi of drivers 440 to 580 refuses, in lower case, in the order in which they count.
var refusals = []struct {
	part string
	is   Refusal
}{
	{"in use by another client", InUse},
	{"currently in use by another process", InUse},
	{"being used by one or more other processes", InUse},
	{"being used by some other process", InUse},
	{"insufficient permissions", NotPermitted},
	{"not supported", NotSupported},
	{"primary gpu", NotSupported},
	{"nvlink", Linked},
	{"peer", Linked},
	{"gpu is lost", NotFound},
	{"no devices were found", NotFound},
	{"unable to determine the device handle", NotFound},
}

// refused is the error of a call that did not succeed.
func refused(id gpu.DeviceID, printed string, err error) error {
	e := &RefusedError{GPU: id, Text: strings.Join(strings.Fields(printed), " ")}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		e.Refusal = TimedOut
	case err != nil:
		return fmt.Errorf("nvidia-smi: %w", err)
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
