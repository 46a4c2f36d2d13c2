package core

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// DeviceID is the NVML UUID of a GPU ("GPU-...") or of a MIG instance ("MIG-..."). It is stable over
// reboots and driver upgrades; an index is not, and never identifies a device here.
type DeviceID string

// Whole as a GPU or compute instance id says "all of it" (NVML: 0xFFFFFFFF, "not attributable").
const Whole = ^uint32(0)

// Placement says where on the machine something is: a node, a GPU, a GPU instance (GI) or a compute
// instance (CI). The zero GPU is the node itself.
type Placement struct {
	GPU    DeviceID // the physical GPU, also for a MIG instance; "" is the whole node
	GI, CI uint32   // Whole unless a MIG instance is meant
}

// Node is the placement of the whole machine.
var Node = Placement{GI: Whole, CI: Whole}

// WholeGPU is the placement of a physical GPU with everything on it.
func WholeGPU(id DeviceID) Placement { return Placement{GPU: id, GI: Whole, CI: Whole} }

// Covers reports whether something at p concerns q: a GPU covers its instances, never the reverse.
func (p Placement) Covers(q Placement) bool {
	return (p.GPU == "" || p.GPU == q.GPU) &&
		(p.GI == Whole || p.GI == q.GI) &&
		(p.CI == Whole || p.CI == q.CI)
}

// Overlaps reports whether two placements share hardware: a GPU and its instances do, two instances do not.
func (p Placement) Overlaps(q Placement) bool { return p.Covers(q) || q.Covers(p) }

func (p Placement) String() string {
	switch {
	case p.GPU == "":
		return "node"
	case p.GI == Whole:
		return string(p.GPU)
	case p.CI == Whole:
		return fmt.Sprintf("%s GI %d", p.GPU, p.GI)
	}
	return fmt.Sprintf("%s GI %d CI %d", p.GPU, p.GI, p.CI)
}

func ComparePlacements(a, b Placement) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
}

// Device is one GPU or one MIG instance, as one reading of the driver gives it.
//
// It is comparable on purpose (no pointer, slice or map), so that "did anything change" is ==. Zero
// means unknown or not supported by this device, unless a field says otherwise: what the driver does
// not answer is absent on every wire, never a zero.
type Device struct {
	ID      DeviceID
	At      Placement
	Index   int    // NVML index of the physical GPU; orders, never identifies
	Model   string // NVML product name, for a MIG instance with its profile
	Profile string // MIG profile such as "1g.10gb"; "" for a full GPU
	MIG     bool   // a full GPU with MIG mode on: its instances are the devices to use
	Serial  string // of the board; "" for a board without one

	// Instance is the number of a MIG instance on its GPU (nvmlDeviceGetMigDeviceHandleByIndex). As Index, it
	// selects and never identifies.
	Instance int

	PCI      PCIAddress
	NUMANode int // -1 = no affinity (as in sysfs)
	Minor    int // N of /dev/nvidiaN; -1 = unknown
	GICap    int // N of /dev/nvidia-caps/nvidia-capN for the GPU instance; 0 unless MIG
	CICap    int // the same for the compute instance

	Memory          uint64 // bytes
	BAR1            uint64 // bytes
	PowerLimit      uint64 // milliwatts, the management limit, not the draw
	CoreClock       uint64 // MHz, maximum graphics clock
	MemoryClock     uint64 // MHz, maximum memory clock
	PCIeGen         int    // maximum link generation, 1 to 6
	PCIeWidth       int    // maximum link width in lanes
	Compute         Compute
	Architecture    string // "Hopper" (nvmlDeviceGetArchitecture)
	Brand           string // "Tesla", "NVIDIA RTX" (nvmlDeviceGetBrand)
	NVLinks         int    // active NVLinks
	Slices          Slices // of a MIG instance
	ECC             Toggle // mode in force (nvmlDeviceGetEccMode)
	DisplayState    Toggle // a display is attached or initialised (nvmlDeviceGetDisplayMode)
	PersistenceMode Toggle
}

// Slices are what a MIG instance has of its GPU (nvmlDeviceGetAttributes_v2).
type Slices struct {
	GPU, Compute                    int // slices of the GPU instance and of the compute instance
	Multiprocessors                 int
	CopyEngines, Decoders, Encoders int // shared with other compute instances of the GPU instance
	JPEGDecoders, OFAs              int // OFA: optical flow accelerator
}

// Compute is a CUDA compute capability; the zero value is unknown.
type Compute struct{ Major, Minor int }

func (c Compute) String() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

// Toggle is a switch whose position may be unknown (the zero value).
type Toggle uint8

// The positions of a Toggle; their texts are those of nvidia-smi.
const (
	ToggleUnknown Toggle = iota
	Disabled
	Enabled
)

func (t Toggle) String() string { return [...]string{"", "Disabled", "Enabled"}[t] }

// PCIBandwidth is the bandwidth of the device's fastest link in MB/s, 0 if unknown. One lane of
// generation g is counted as 256·2^(g-1) MB/s: for generations 3 and 4 that is the number that
// nomad-device-nvidia publishes, and 1, 2, 5 and 6 follow the same rule.
func (d Device) PCIBandwidth() int {
	if d.PCIeGen < 1 || d.PCIeGen > 6 || d.PCIeWidth < 1 {
		return 0
	}
	return d.PCIeWidth * (256 << (d.PCIeGen - 1))
}

// CompareDevices is the canonical order of devices: by GPU, the GPU before its instances.
func CompareDevices(a, b Device) int {
	return cmp.Or(
		cmp.Compare(a.Index, b.Index),
		cmp.Compare(a.At.GPU, b.At.GPU),
		cmp.Compare(a.At.GI+1, b.At.GI+1), // Whole + 1 wraps to 0: the full GPU comes first
		cmp.Compare(a.At.CI+1, b.At.CI+1),
		cmp.Compare(a.ID, b.ID),
	)
}

// Product is the NVML product name of the GPU: without the profile that the name of a MIG instance ends with.
func (d Device) Product() string {
	model, _, _ := strings.Cut(d.Model, " MIG ")
	return model
}

// DeviceIndex is a device by number, "0" or "0:1": the second MIG instance of the first GPU. A device has the numbers that
// NVML gave it when it was first seen, which select and never identify: see Binding.
type DeviceIndex struct {
	GPU      int
	Instance int // -1 = the GPU, and all of its instances
}

// String is the index as a policy has it.
func (i DeviceIndex) String() string {
	if i.Instance < 0 {
		return strconv.Itoa(i.GPU)
	}
	return strconv.Itoa(i.GPU) + ":" + strconv.Itoa(i.Instance)
}
