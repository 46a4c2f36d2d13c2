package gpu

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// DeviceID is the NVML UUID of a GPU ("GPU-...") or of a MIG instance ("MIG-..."). It is stable over reboots and
// driver upgrades. An NVML index is not, and therefore never identifies a device.
type DeviceID string

// Whole is the GPU instance ID or compute instance ID of a placement that is not limited to one instance. NVML has
// the same value, 0xFFFFFFFF, in an event that can't be attributed to an instance (nvmlEventData_t).
const Whole = ^uint32(0)

// Placement is a location: the node, a GPU, a GPU instance (GI) or a compute instance (CI). A Placement
// without a GPU is the node.
type Placement struct {
	GPU    DeviceID // the physical GPU, also for a MIG instance; "" = the node
	GI, CI uint32   // instance IDs; Whole = not limited to one instance
}

// Node is the placement of the node itself, which covers every other placement.
var Node = Placement{GI: Whole, CI: Whole}

// WholeGPU returns the placement of a physical GPU with all of its instances.
func WholeGPU(id DeviceID) Placement { return Placement{GPU: id, GI: Whole, CI: Whole} }

// Covers reports whether a fault at p concerns q. A GPU covers its instances; an instance does not cover its GPU.
func (p Placement) Covers(q Placement) bool {
	return (p.GPU == "" || p.GPU == q.GPU) &&
		(p.GI == Whole || p.GI == q.GI) &&
		(p.CI == Whole || p.CI == q.CI)
}

// Overlaps reports whether two placements share hardware. A GPU and its instances do, two instances do not.
func (p Placement) Overlaps(q Placement) bool { return p.Covers(q) || q.Covers(p) }

// String returns the placement for messages: "node", "GPU-...", "GPU-... GI 1 CI 0".
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

// ComparePlacements is the order of placements: by GPU, GPU instance and compute instance.
func ComparePlacements(a, b Placement) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
}

// Device is one GPU or one MIG instance, as one snapshot reports it.
//
// It is comparable (no pointer, slice or map), so that == shows whether anything changed. Zero means unknown or
// not supported by this device, unless a field's comment has another meaning. Adapters leave out values that the driver
// does not report; they never publish them as zero.
type Device struct {
	ID      DeviceID
	At      Placement
	Index   int    // NVML index of the physical GPU; used for order, never for identity
	Model   string // NVML product name; for a MIG instance it ends with the profile
	Profile string // MIG profile such as "1g.10gb"; "" for a full GPU
	MIG     bool   // a full GPU with MIG mode enabled: its instances are the devices to use
	CanMIG  bool   // a full GPU that has a MIG mode, enabled or not
	Serial  string // board serial number; "" if the board has none

	// Instance is the index of a MIG instance on its GPU (nvmlDeviceGetMigDeviceHandleByIndex). Policies can select
	// by it; it is never used for identity.
	Instance int

	PCI      PCIAddress
	PCIeRoot string // root complex of the PCIe bus: "pci0000:00"
	NUMANode int    // -1 = no affinity (sysfs numa_node)
	Minor    int    // N of /dev/nvidiaN; -1 = unknown
	GICap    int    // N of /dev/nvidia-caps/nvidia-capN for the GPU instance; 0 unless MIG
	CICap    int    // as GICap, for the compute instance

	Memory          uint64 // bytes
	MemoryShown     uint64 // bytes of Memory that the driver shows as the total to this process, which is in a control group with a limit; 0 = it shows all
	BAR1            uint64 // bytes
	PowerLimit      uint64 // milliwatts; the power management limit, not the power drawn
	CoreClock       uint64 // MHz, maximum graphics clock
	MemoryClock     uint64 // MHz, maximum memory clock
	PCIeGen         int    // maximum link generation, 1 to 6
	PCIeWidth       int    // maximum link width in lanes
	Compute         Compute
	Architecture    string // "Hopper" (nvmlDeviceGetArchitecture)
	Brand           string // "Tesla", "NVIDIA RTX" (nvmlDeviceGetBrand)
	NVLinks         int    // active NVLinks
	AddressingMode  string // of the host's memory: "ATS", "HMM", "None" (nvmlDeviceGetAddressingMode)
	Slices          Slices // of a MIG instance
	MemorySlices    SliceRange
	ECC             Toggle // mode in force (nvmlDeviceGetEccMode)
	DisplayState    Toggle // whether a display is attached or initialised (nvmlDeviceGetDisplayMode)
	PersistenceMode Toggle
}

// WithKnown returns d with the values of an earlier reading of the same device where this one has none.
func (d Device) WithKnown(was Device) Device {
	if d.NUMANode < 0 {
		d.NUMANode = was.NUMANode
	}
	if d.Minor < 0 {
		d.Minor = was.Minor
	}
	if !d.MIG && !d.CanMIG {
		d.CanMIG, d.MIG = was.CanMIG, was.MIG
	}
	d.Model, d.Serial = cmp.Or(d.Model, was.Model), cmp.Or(d.Serial, was.Serial)
	d.Architecture, d.Brand = cmp.Or(d.Architecture, was.Architecture), cmp.Or(d.Brand, was.Brand)
	d.AddressingMode, d.PCIeRoot = cmp.Or(d.AddressingMode, was.AddressingMode), cmp.Or(d.PCIeRoot, was.PCIeRoot)
	d.GICap, d.CICap = cmp.Or(d.GICap, was.GICap), cmp.Or(d.CICap, was.CICap)
	d.Memory, d.BAR1 = cmp.Or(d.Memory, was.Memory), cmp.Or(d.BAR1, was.BAR1)
	d.PowerLimit = cmp.Or(d.PowerLimit, was.PowerLimit)
	d.CoreClock, d.MemoryClock = cmp.Or(d.CoreClock, was.CoreClock), cmp.Or(d.MemoryClock, was.MemoryClock)
	d.PCIeGen, d.PCIeWidth = cmp.Or(d.PCIeGen, was.PCIeGen), cmp.Or(d.PCIeWidth, was.PCIeWidth)
	d.Compute = cmp.Or(d.Compute, was.Compute)
	d.Slices, d.MemorySlices = cmp.Or(d.Slices, was.Slices), cmp.Or(d.MemorySlices, was.MemorySlices)
	d.ECC, d.DisplayState = cmp.Or(d.ECC, was.ECC), cmp.Or(d.DisplayState, was.DisplayState)
	d.PersistenceMode = cmp.Or(d.PersistenceMode, was.PersistenceMode)
	return d
}

// Slices are the parts of a GPU that a MIG instance has (nvmlDeviceGetAttributes_v2).
type Slices struct {
	GPU, Compute                    int // GPU slices and compute slices
	Multiprocessors                 int
	CopyEngines, Decoders, Encoders int // shared with the other compute instances of the GPU instance
	JPEGDecoders, OFAs              int // OFA: optical flow accelerator
}

// SliceRange is which of a GPU's memory slices, of which it has four or eight, the GPU instance of a MIG instance has
// (nvmlGpuInstanceGetInfo, placement). Count 0 = unknown.
type SliceRange struct{ First, Count int }

// Compute is a CUDA compute capability. The zero value is unknown.
type Compute struct{ Major, Minor int }

// String returns the capability in NVIDIA's notation: "9.0".
func (c Compute) String() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

// Toggle is a feature that is enabled, disabled or unknown (the zero value).
type Toggle uint8

// The values of a Toggle. Their texts are those of nvidia-smi.
const (
	ToggleUnknown Toggle = iota
	Disabled
	Enabled
)

// String returns the value in the words of nvidia-smi; "" if unknown.
func (t Toggle) String() string { return [...]string{"", "Disabled", "Enabled"}[t] }

// PCIBandwidth returns the bandwidth of the device's PCIe link in MB/s, 0 if unknown. One lane of generation g
// counts as 256·2^(g-1) MB/s. For generations 3 and 4 this is the number that nomad-device-nvidia publishes; 1, 2,
// 5 and 6 follow the same rule.
func (d Device) PCIBandwidth() int {
	if d.PCIeGen < 1 || d.PCIeGen > 6 || d.PCIeWidth < 1 {
		return 0
	}
	return d.PCIeWidth * (256 << (d.PCIeGen - 1))
}

// CompareDevices is the canonical order of devices: by NVML index of the GPU, and each GPU before its instances.
func CompareDevices(a, b Device) int {
	return cmp.Or(
		cmp.Compare(a.Index, b.Index),
		cmp.Compare(a.At.GPU, b.At.GPU),
		cmp.Compare(a.At.GI+1, b.At.GI+1), // Whole+1 wraps to 0, so the full GPU comes first
		cmp.Compare(a.At.CI+1, b.At.CI+1),
		cmp.Compare(a.ID, b.ID),
	)
}

// Product returns the NVML product name of the GPU. For a MIG instance this is Model without " MIG " and the
// profile.
func (d Device) Product() string {
	model, _, _ := strings.Cut(d.Model, " MIG ")
	return model
}

// CurrentIndex returns the index by which NVIDIA's container runtime and nvidia-smi know the device in this reading.
func (d Device) CurrentIndex() DeviceIndex {
	if d.Profile == "" {
		return DeviceIndex{GPU: d.Index, Instance: -1}
	}
	return DeviceIndex{GPU: d.Index, Instance: d.Instance}
}

// DeviceIndex is the number by which a policy selects a device: "0", or "0:1" for the second MIG instance of the
// first GPU. A device gets the index that NVML reported when the device was first seen, and keeps it: see Binding.
type DeviceIndex struct {
	GPU      int
	Instance int // -1 = the GPU and all of its instances
}

// String returns the index as a policy spells it.
func (i DeviceIndex) String() string {
	if i.Instance < 0 {
		return strconv.Itoa(i.GPU)
	}
	return strconv.Itoa(i.GPU) + ":" + strconv.Itoa(i.Instance)
}
