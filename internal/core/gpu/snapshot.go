package gpu

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
	"strings"
)

// DriverState is whether the driver can be called.
type DriverState uint8

// The states of the driver.
const (
	DriverPending DriverState = iota // not called yet
	DriverAbsent                     // no library or no kernel module: a node without GPUs, or a driver that is not loaded yet
	DriverFailed                     // the library or the kernel module is there, but calls fail
	DriverReady
	DriverReleased // not called during maintenance, by an operator's command
)

// String returns the name of the state: "ready".
func (s DriverState) String() string {
	return [...]string{"pending", "absent", "failed", "ready", "released"}[s]
}

// Driver is the driver as one snapshot reports it.
type Driver struct {
	State   DriverState
	Version string // "580.95.05"
	CUDA    string // "13.0"
	Reason  string // why State is not DriverReady; one line, the same for each retry
}

// Branch returns the branch of a driver version, its first number: 570 of "570.124.06"; 0 if there is none.
func Branch(version string) int {
	first, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(first)
	if err != nil {
		return 0
	}
	return n
}

// Snapshot is one complete enumeration of a node's devices. NewSnapshot, NoDriver and Unavailable build one.
type Snapshot struct {
	Driver   Driver
	Devices  []Device    // in canonical order: full GPUs, also those in MIG mode, and MIG instances
	Excluded []Exclusion // devices that can't be read
	Links    []Link      // between full GPUs; A comes before B in canonical order
	Nodes    []string    // paths of NVIDIA's device nodes, sorted: "/dev/nvidia0"
	Unloaded bool        // the kernel module was unloaded
}

// Exclusion is a device that exists but is not offered, with the reason.
type Exclusion struct {
	Index   int // NVML index of the physical GPU
	At      Placement
	PCI     PCIAddress
	Failure Failure // why it can't be read; NotFailed = excluded on purpose
	Reason  string
}

// Failure is the way in which reading a device failed.
type Failure uint8

// The failures. The zero value is NotFailed.
const (
	NotFailed      Failure = iota
	FailureLost            // NVML_ERROR_GPU_IS_LOST, or the driver does not list the GPU any more
	FailureError           // a call returned another error
	FailurePending         // a call is in progress
	FailureHung            // a call has not returned by its deadline
)

// NewSnapshot returns s in canonical order. It does not change the slices of s.
func NewSnapshot(s Snapshot) Snapshot {
	s.Devices = slices.SortedFunc(slices.Values(s.Devices), CompareDevices)
	s.Excluded = slices.SortedFunc(slices.Values(s.Excluded), CompareExclusions)
	s.Links = slices.SortedFunc(slices.Values(s.Links), func(a, b Link) int {
		return cmp.Or(cmp.Compare(a.A, b.A), cmp.Compare(a.B, b.B))
	})
	s.Nodes = slices.Sorted(slices.Values(s.Nodes))
	return s
}

// NoDriver returns the snapshot of a node whose driver can't be called.
func NoDriver(state DriverState, reason string) Snapshot {
	return Snapshot{Driver: Driver{State: state, Reason: reason}}
}

// Unavailable returns the snapshot of a node whose driver failed with err: DriverAbsent for ErrNoDriver, else
// DriverFailed.
func Unavailable(err error) Snapshot {
	state := DriverFailed
	if errors.Is(err, ErrNoDriver) {
		state = DriverAbsent
	}
	s := NoDriver(state, err.Error())
	s.Unloaded = errors.Is(err, ErrUnloaded)
	return s
}

// NVLinks returns the links that have active NVLinks.
func (s Snapshot) NVLinks() []Link {
	return slices.DeleteFunc(slices.Clone(s.Links), func(l Link) bool { return l.NVLinks == 0 })
}

// Equal reports whether two snapshots are equal, whatever Unloaded is.
func (s Snapshot) Equal(t Snapshot) bool {
	return s.Driver == t.Driver &&
		slices.Equal(s.Devices, t.Devices) &&
		slices.Equal(s.Excluded, t.Excluded) &&
		slices.Equal(s.Links, t.Links) &&
		slices.Equal(s.Nodes, t.Nodes)
}

// CompareExclusions is the order of exclusions: by index, placement and reason.
func CompareExclusions(a, b Exclusion) int {
	return cmp.Or(cmp.Compare(a.Index, b.Index), ComparePlacements(a.At, b.At), cmp.Compare(a.Reason, b.Reason))
}

// Unidentified reports whether neither the UUID nor the PCI address of a GPU that failed is known.
func (e Exclusion) Unidentified() bool {
	return e.At.GPU == "" && e.PCI == "" && e.Failure != NotFailed
}

// Matches reports whether e is the exclusion of d: by UUID, or by PCI address where the UUID can't be read.
func (e Exclusion) Matches(d Device) bool {
	if e.At.GPU == "" {
		return e.PCI != "" && e.PCI == d.PCI
	}
	return e.At.Covers(d.At)
}

// GPUAt returns the UUID of the GPU at a PCI address, also of an excluded GPU. It returns false if the UUID is not
// known.
func (s Snapshot) GPUAt(pci PCIAddress) (DeviceID, bool) {
	for _, d := range s.Devices {
		if d.PCI == pci {
			return d.At.GPU, true
		}
	}
	for _, e := range s.Excluded {
		if e.PCI == pci && e.At.GPU != "" {
			return e.At.GPU, true
		}
	}
	return "", false
}

// HasUnidentified reports whether the driver lists a GPU whose UUID can't be read.
func (s Snapshot) HasUnidentified() bool {
	return slices.ContainsFunc(s.Excluded, func(e Exclusion) bool { return e.At.GPU == "" })
}
