package dra

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// The errors of Prepare are one line each: the kubelet puts them into an event of the pod. Those of several devices are joined.

// UIDError means that the claim was deleted and created again under its name.
type UIDError struct {
	Claim     string // "NAMESPACE/NAME"
	Want, Got string
}

// Error names both UIDs.
func (e *UIDError) Error() string {
	return fmt.Sprintf("claim %s has the UID %s now, not %s: it was deleted and created again", e.Claim, e.Got, e.Want)
}

// Errors of a claim that has nothing to prepare.
var (
	ErrNotAllocated = errors.New("the claim is not allocated: its allocation was removed after the pod was scheduled")
	ErrNoDevices    = errors.New("the allocation of the claim has no device of " + resourceslice.Driver)
)

// PoolError means that the device is on another node.
type PoolError struct{ Device, Pool, Node string }

// Error names pool and node.
func (e *PoolError) Error() string {
	return fmt.Sprintf("device %s: pool %q is not of this node, whose pool is %q", e.Device, e.Pool, e.Node)
}

// UnknownDeviceError means that the node does not offer the device through DRA.
type UnknownDeviceError struct {
	Device string
	Driver string        // why there may be no devices; "" = the driver works
	API    inventory.API // through which it is offered; "" = it is not
}

// Error names the device and the state of the driver.
func (e *UnknownDeviceError) Error() string {
	text := fmt.Sprintf("device %s: not offered by this node", e.Device)
	if e.API != "" {
		return text + " through DRA any more, but through " + string(e.API)
	}
	if e.Driver != "" {
		text += " (" + e.Driver + ")"
	}
	return text
}

// HeldError means that something else has the device, or hardware of it: Holder is "claim NAMESPACE/NAME" or "pod NAMESPACE/NAME".
type HeldError struct{ Device, Holder string }

// Error does not name the holder: it becomes an event of the pod that does not get the device, perhaps of another tenant. See holdersOf.
func (e *HeldError) Error() string { return fmt.Sprintf("device %s: held by other work", e.Device) }

// UnreadError means that a claim may have the device whose record can't be read.
type UnreadError struct {
	Device    string
	Record    prepared.Unread
	Namespace string // of the claim that does not get the device
}

// Error names the record for the namespace of its claim alone: the name of the file has the UID of the claim.
func (e *UnreadError) Error() string {
	return fmt.Sprintf("device %s: another claim may have it: %s", e.Device, unreadFor(e.Record, e.Namespace))
}

// unreadFor names a record that can't be read in the event of a claim of a namespace.
func unreadFor(u prepared.Unread, namespace string) string {
	if u.Namespace == namespace || u.UID == "" {
		return u.String()
	}
	return "a record in " + filepath.Dir(u.Path) + " can't be read; `k8s-gpu doctor` names the file"
}

// NotSharedError means that a device was allocated as a share, and the policy does not share it any more.
type NotSharedError struct{ Device string }

// Error has the remedy.
func (e *NotSharedError) Error() string {
	return fmt.Sprintf("device %s: allocated as a share, and is not shared any more: delete the pod, or share the device again", e.Device)
}

// SharesError means that the shares of a device are taken.
type SharesError struct {
	Device          string
	Want, Held, All int
	Holders         []string
}

// Error has the numbers, and like that of HeldError not the holders.
func (e *SharesError) Error() string {
	return fmt.Sprintf("device %s: %d of its %d shares are held, %d more are requested", e.Device, e.Held, e.All, e.Want)
}

// holdersOf are those of an error and of all that it wraps, for the log.
func holdersOf(err error) (all []string) {
	switch e := err.(type) { //nolint:errorlint // the tree is walked
	case *HeldError:
		return []string{e.Holder}
	case *SharesError:
		return e.Holders
	case *UnreadError:
		return []string{e.Record.String()}
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			all = append(all, holdersOf(one)...)
		}
	case interface{ Unwrap() error }:
		return holdersOf(e.Unwrap())
	}
	return all
}

// UsersError means that the memory of a claim's pod can't be limited, because the claim is not one pod's: a limit of each pod's group would be as many limits.
type UsersError struct {
	Users []kubeapi.ClaimConsumerReference
}

// Error has the remedy, and not the names, which may be of other tenants.
func (e *UsersError) Error() string {
	what := fmt.Sprintf("%d pods", len(e.Users))
	switch {
	case len(e.Users) == 0:
		what = "no pod"
	case slices.ContainsFunc(e.Users, func(u kubeapi.ClaimConsumerReference) bool { return u.Resource != userPod }):
		what = "more than pods"
	case len(e.Users) == 1:
		what = "another pod than the one for which it was prepared"
	}
	return "the claim is reserved for " + what + ", and the limit of memory that its pool has holds for one pod: give each pod a claim of its own (resourceClaimTemplateName)"
}

// LimitError means that a pod can't be limited, in a pool where it must be.
type LimitError struct {
	GPU gpu.DeviceID
	Err error
}

// Error has the GPU and the cause.
func (e *LimitError) Error() string {
	return fmt.Sprintf("the memory of the pod on %s is not limited: %v", e.GPU, e.Err)
}

// Unwrap returns the cause.
func (e *LimitError) Unwrap() error { return e.Err }

// HealthError means that the device takes no new work, in the words that Nomad and the health stream have.
type HealthError struct {
	Device string
	Unit   inventory.Unit // with its health
}

// Error has the health.
func (e *HealthError) Error() string { return fmt.Sprintf("device %s: %s", e.Device, e.Unit.Health) }

// CordonedError means that no device of the node takes new work.
type CordonedError struct{ Reason string }

// Error has the reason.
func (e *CordonedError) Error() string { return "no device of this node takes new work: " + e.Reason }

// NoCDIError means that containers can't get the device, because they don't get devices by CDI.
type NoCDIError struct{ Device string }

// Error names the device.
func (e *NoCDIError) Error() string {
	return fmt.Sprintf("device %s: no CDI specification of this agent defines it", e.Device)
}

// PendingError means that something did not happen within the time of a call.
type PendingError struct {
	What   string // "the API server does not answer"
	Waited time.Duration
	Err    error // may be nil
}

// Error has the wait and the cause.
func (e *PendingError) Error() string {
	text := fmt.Sprintf("%s (waited %s)", e.What, e.Waited.Round(time.Second))
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns the cause.
func (e *PendingError) Unwrap() error { return e.Err }

// joined is several errors in one line.
type joined []error

func (j joined) Error() string {
	texts := make([]string, len(j))
	for i, err := range j {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (j joined) Unwrap() []error { return j }

// join returns nil, the error, or all in one line.
func join(errs []error) error {
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return joined(errs)
}

// oneLine is the text of an error in one line.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
