package core

import (
	"cmp"
	"errors"
	"slices"
)

// DriverState says whether the driver can be asked at all.
type DriverState uint8

// The states of the driver, as far as one reading can tell.
const (
	DriverPending DriverState = iota // not asked yet
	DriverAbsent                     // no library or no kernel module: a node without GPUs, or not yet
	DriverFailed                     // there, but it does not work (or no longer)
	DriverReady
	DriverReleased // left alone for maintenance, by an operator's order
)

func (s DriverState) String() string {
	return [...]string{"pending", "absent", "failed", "ready", "released"}[s]
}

// Driver is the driver as one reading gives it.
type Driver struct {
	State   DriverState
	Version string // "580.95.05"
	CUDA    string // "13.0"
	Reason  string // why it is not ready; one line, stable over retries
}

// Snapshot is one complete reading of the machine. Build one with NewSnapshot or NoDriver.
type Snapshot struct {
	Driver   Driver
	Devices  []Device    // in canonical order; a GPU in MIG mode and its instances
	Excluded []Exclusion // seen, but not readable
	Links    []Link      // between full GPUs, A before B in canonical order
	Nodes    []string    // NVIDIA's device nodes present on the host, sorted: "/dev/nvidia0"
	Unloaded bool        // there is no driver NewHealth the kernel module was unloaded
}

// Exclusion is a device that was seen and can't be offered, with the reason.
type Exclusion struct {
	Index   int // NVML index of the physical GPU
	At      Placement
	PCI     PCIAddress
	Failure Failure // why it can't be read; 0 = excluded by intent
	Reason  string
}

// Failure is how reading a device failed.
type Failure uint8

// The failures.
const (
	NotFailed      Failure = iota
	FailureLost            // the driver reports it lost (NVML_ERROR_GPU_IS_LOST), or does not list it any more
	FailureError           // a call failed otherwise
	FailurePending         // a call is in progress
	FailureHung            // a call has not returned before its deadline
)

// Link is how two GPUs reach each other.
type Link struct {
	A, B    DeviceID
	Path    PCIePath
	NVLinks int // active NVLinks between the two (directly or over NVSwitch)
}

// PCIePath is the nearest common ancestor of two GPUs (NVML: nvmlGpuTopologyLevel_t); a larger value
// is a shorter path. The zero value is unknown.
type PCIePath uint8

// PCIe paths, from far to near.
const (
	PathUnknown      PCIePath = iota
	PathSystem                // across NUMA nodes
	PathNUMA                  // across host bridges of one NUMA node
	PathHostBridge            // one host bridge
	PathMultiSwitch           // several PCIe switches
	PathSingleSwitch          // one PCIe switch
	PathBoard                 // one board
)

// NewSnapshot returns s in canonical order. The slices of s are not changed.
func NewSnapshot(s Snapshot) Snapshot {
	s.Devices = slices.SortedFunc(slices.Values(s.Devices), CompareDevices)
	s.Excluded = slices.SortedFunc(slices.Values(s.Excluded), CompareExclusions)
	s.Links = slices.SortedFunc(slices.Values(s.Links), func(a, b Link) int {
		return cmp.Or(cmp.Compare(a.A, b.A), cmp.Compare(a.B, b.B))
	})
	s.Nodes = slices.Sorted(slices.Values(s.Nodes))
	return s
}

// NoDriver is the reading of a machine whose driver can't be asked: a value like any other.
func NoDriver(state DriverState, reason string) Snapshot {
	return Snapshot{Driver: Driver{State: state, Reason: reason}}
}

// Unavailable is the reading of a machine whose driver can't be asked for that reason.
func Unavailable(err error) Snapshot {
	state := DriverFailed
	if errors.Is(err, ErrNoDriver) {
		state = DriverAbsent
	}
	s := NoDriver(state, err.Error())
	s.Unloaded = errors.Is(err, ErrUnloaded)
	return s
}

// NVLinks are the links that have any.
func (s Snapshot) NVLinks() []Link {
	return slices.DeleteFunc(slices.Clone(s.Links), func(l Link) bool { return l.NVLinks == 0 })
}

// Equal reports whether two readings say the same.
func (s Snapshot) Equal(t Snapshot) bool {
	return s.Driver == t.Driver &&
		slices.Equal(s.Devices, t.Devices) &&
		slices.Equal(s.Excluded, t.Excluded) &&
		slices.Equal(s.Links, t.Links) &&
		slices.Equal(s.Nodes, t.Nodes)
}

func CompareExclusions(a, b Exclusion) int {
	return cmp.Or(cmp.Compare(a.Index, b.Index), ComparePlacements(a.At, b.At), cmp.Compare(a.Reason, b.Reason))
}

// Unidentified reports whether e is somebody at an index who does not say who it is, and of whom not even the slot is
// known.
func (e Exclusion) Unidentified() bool {
	return e.At.GPU == "" && e.PCI == "" && e.Failure != NotFailed
}

// Matches reports whether e is about d: by identity, or by slot where the GPU's UUID can't be read.
func (e Exclusion) Matches(d Device) bool {
	if e.At.GPU == "" {
		return e.PCI != "" && e.PCI == d.PCI
	}
	return e.At.Covers(d.At)
}

// GPUAt is the GPU at a PCI address, also one that is excluded, if its UUID is known.
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

// HasUnidentified reports whether a GPU is listed whose UUID can't be read.
func (s Snapshot) HasUnidentified() bool {
	return slices.ContainsFunc(s.Excluded, func(e Exclusion) bool { return e.At.GPU == "" })
}
