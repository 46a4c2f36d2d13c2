package nvidia

import (
	"cmp"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// gpu is a GPU as the session holds it: the zero value is a GPU that was never read.
type gpu struct {
	held
	instances []held
}

// held is a device with the handle to ask about it. The handle never leaves the session.
type held struct {
	handle nvml.Device
	device core.Device
}

// identity is what the first pass over the GPUs finds at one index.
type identity struct {
	handle nvml.Device
	id     core.DeviceID
	pci    core.PCIAddress
	err    error
}

// Snapshot reads the whole machine: first who is there, then what each one is. A GPU that does not say
// who it is, or is lost on the way, becomes an exclusion; so does a MIG instance. An error wraps
// core.ErrDriverLost or core.ErrDriverStale and ends the session.
func (s *Session) Snapshot() (core.Snapshot, error) {
	count, err := s.readDriver()
	if err != nil {
		return core.Snapshot{}, gone(err)
	}
	snap := core.Snapshot{Driver: s.driver, Nodes: s.deviceNodes()}
	there, err := s.identify(count)
	if err != nil {
		return core.Snapshot{}, gone(err)
	}
	gpus := make([]gpu, count)
	var well []gpu
	for index, found := range there {
		last := s.remembered(index, there)
		g, excluded, err := s.readGPU(index, found, last)
		snap.Excluded = append(snap.Excluded, excluded...)
		switch {
		case isGone(err):
			return core.Snapshot{}, gone(err)
		case err != nil:
			snap.Excluded = append(snap.Excluded, exclude(index, found, last, err))
			gpus[index] = last
			continue
		}
		gpus[index] = g
		well = append(well, g)
		snap.Devices = append(snap.Devices, g.device)
		for _, instance := range g.instances {
			snap.Devices = append(snap.Devices, instance.device)
		}
	}
	if snap.Links, err = s.readLinks(well); err != nil {
		return core.Snapshot{}, gone(err)
	}
	s.gpus = gpus
	s.listen(well)
	return core.NewSnapshot(snap), nil
}

// readDriver counts the GPUs and reads the versions. Any error here concerns the whole driver.
func (s *Session) readDriver() (count int, err error) {
	a := asker{line: &s.reader, at: core.Node}
	count = required(&a, "nvmlDeviceGetCount", s.lib.DeviceGetCount)
	s.driver.Version = optional(&a, "nvmlSystemGetDriverVersion", s.driver.Version, s.lib.SystemGetDriverVersion)
	s.driver.CUDA = optional(&a, "nvmlSystemGetCudaDriverVersion", s.driver.CUDA, func() (string, nvml.Return) {
		v, ret := s.lib.SystemGetCudaDriverVersion_v2()
		return cudaVersion(v), ret
	})
	return count, a.err
}

// identify asks every index who is there. Only an error of the driver as a whole is an error.
func (s *Session) identify(count int) ([]identity, error) {
	there := make([]identity, count)
	for index := range there {
		there[index] = s.identifyGPU(index)
		if err := there[index].err; isGone(err) {
			return nil, err
		}
	}
	return there, nil
}

// identifyGPU reads the UUID and, also where that fails, the PCI address: the slot tells who is silent.
func (s *Session) identifyGPU(index int) (found identity) {
	at := core.Node
	if index < len(s.gpus) && s.gpus[index].device.ID != "" {
		at = core.WholeGPU(s.gpus[index].device.ID)
	}
	a := asker{line: &s.reader, at: at}
	found.handle = required(&a, "nvmlDeviceGetHandleByIndex", func() (nvml.Device, nvml.Return) {
		return s.lib.DeviceGetHandleByIndex(index)
	})
	if found.err = a.err; found.err != nil {
		return found
	}
	found.id = core.DeviceID(required(&a, "nvmlDeviceGetUUID", found.handle.GetUUID))
	if found.err, a.err = a.err, nil; found.err == nil {
		a.at = core.WholeGPU(found.id)
	}
	info := required(&a, "nvmlDeviceGetPciInfo", found.handle.GetPciInfo)
	err := a.err
	if err == nil {
		found.pci, err = pciAddress(info)
	}
	found.err = cmp.Or(found.err, err)
	return found
}

// remembered is the GPU that was read at this index (or, if it said who it is, under this UUID) before.
// An index is trusted only while nothing speaks against it: its GPU does not answer elsewhere, and sits
// in the same slot.
func (s *Session) remembered(index int, there []identity) gpu {
	found := there[index]
	if found.id != "" {
		for _, g := range s.gpus {
			if g.device.ID == found.id {
				return g
			}
		}
		return gpu{}
	}
	if index >= len(s.gpus) {
		return gpu{}
	}
	g := s.gpus[index]
	for _, other := range there {
		if other.id != "" && other.id == g.device.ID {
			return gpu{}
		}
	}
	if found.pci != "" && found.pci != g.device.PCI {
		return gpu{}
	}
	return g
}

// exclude says why the GPU at index is not in the reading, and which one it is as far as is known.
func exclude(index int, found identity, last gpu, err error) core.Exclusion {
	at := core.Node
	if id := cmp.Or(found.id, last.device.ID); id != "" {
		at = core.WholeGPU(id)
	}
	return core.Exclusion{
		Index: index, At: at, PCI: cmp.Or(found.pci, last.device.PCI), Kind: silence(err), Reason: err.Error(),
	}
}

// readGPU reads what the GPU is, and its instances if MIG mode is on. Exclusions are of instances.
func (s *Session) readGPU(index int, found identity, last gpu) (gpu, []core.Exclusion, error) {
	if found.err != nil {
		return gpu{}, nil, found.err
	}
	was := last.device
	if was.ID == "" {
		was = core.Device{Minor: -1, NUMANode: -1}
	}
	a := &asker{line: &s.reader, at: core.WholeGPU(found.id)}
	h := found.handle
	d := core.Device{
		ID: found.id, At: a.at, Index: index, PCI: found.pci, NUMANode: s.numaNode(found.pci),
		Model: strings.TrimSpace(supported(a, "nvmlDeviceGetName", h.GetName)),
		// Whether MIG is on must be known: a GPU that is cut up is not offered whole.
		MIG: supported(a, "nvmlDeviceGetMigMode", func() (bool, nvml.Return) {
			current, _, ret := h.GetMigMode()
			return current == nvml.DEVICE_MIG_ENABLE, ret
		}),
		// One more than the minor, so that zero is unknown here as everywhere else.
		Minor: optional(a, "nvmlDeviceGetMinorNumber", was.Minor+1, func() (int, nvml.Return) {
			minor, ret := h.GetMinorNumber()
			return minor + 1, ret
		}) - 1,
	}
	readBoard(a, h, &d, was)
	readPCIe(a, h, &d, was)
	if a.err != nil {
		return gpu{}, nil, a.err
	}
	g := gpu{held: held{handle: h, device: d}}
	if !d.MIG {
		return g, nil, nil
	}
	instances, excluded, err := s.readInstances(g.held, last.instances)
	g.instances = instances
	return g, excluded, err
}

// readBoard reads memory, power, clocks and modes.
func readBoard(a *asker, h nvml.Device, d *core.Device, was core.Device) {
	d.Memory = optional(a, "nvmlDeviceGetMemoryInfo", was.Memory, func() (uint64, nvml.Return) {
		m, ret := h.GetMemoryInfo()
		return m.Total, ret
	})
	d.BAR1 = optional(a, "nvmlDeviceGetBAR1MemoryInfo", was.BAR1, func() (uint64, nvml.Return) {
		m, ret := h.GetBAR1MemoryInfo()
		return m.Bar1Total, ret
	})
	d.PowerLimit = optional(a, "nvmlDeviceGetPowerManagementLimit", was.PowerLimit, wide(h.GetPowerManagementLimit))
	if d.PowerLimit == 0 {
		d.PowerLimit = optional(a, "nvmlDeviceGetEnforcedPowerLimit", was.PowerLimit, wide(h.GetEnforcedPowerLimit))
	}
	clock := func(kind nvml.ClockType, last uint64) uint64 {
		return optional(a, "nvmlDeviceGetMaxClockInfo", last, wide(func() (uint32, nvml.Return) {
			return h.GetMaxClockInfo(kind)
		}))
	}
	d.CoreClock, d.MemoryClock = clock(nvml.CLOCK_GRAPHICS, was.CoreClock), clock(nvml.CLOCK_MEM, was.MemoryClock)
	d.Compute = optional(a, "nvmlDeviceGetCudaComputeCapability", was.Compute, func() (core.Compute, nvml.Return) {
		major, minor, ret := h.GetCudaComputeCapability()
		return core.Compute{Major: major, Minor: minor}, ret
	})
	mode := func(f func() (nvml.EnableState, nvml.Return)) func() (core.Toggle, nvml.Return) {
		return func() (core.Toggle, nvml.Return) {
			state, ret := f()
			return toggle(state), ret
		}
	}
	d.DisplayState = optional(a, "nvmlDeviceGetDisplayMode", was.DisplayState, mode(h.GetDisplayMode))
	d.PersistenceMode = optional(a, "nvmlDeviceGetPersistenceMode", was.PersistenceMode, mode(h.GetPersistenceMode))
}

// readPCIe reads the fastest link that GPU and slot can have together.
func readPCIe(a *asker, h nvml.Device, d *core.Device, was core.Device) {
	d.PCIeGen = optional(a, "nvmlDeviceGetMaxPcieLinkGeneration", was.PCIeGen, h.GetMaxPcieLinkGeneration)
	d.PCIeWidth = optional(a, "nvmlDeviceGetMaxPcieLinkWidth", was.PCIeWidth, h.GetMaxPcieLinkWidth)
}

// wide makes a 32-bit answer a 64-bit one.
func wide(f func() (uint32, nvml.Return)) func() (uint64, nvml.Return) {
	return func() (uint64, nvml.Return) {
		v, ret := f()
		return uint64(v), ret
	}
}

// numaNode is the kernel's word on which NUMA node a PCI function is nearest to; -1 if it has none.
func (s *Session) numaNode(pci core.PCIAddress) int {
	text, err := fs.ReadFile(s.sys, path.Join("bus/pci/devices", string(pci), "numa_node"))
	if err != nil {
		return -1
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1
	}
	return max(node, -1)
}

// deviceNodes lists NVIDIA's device nodes under the names that they have in a container.
func (s *Session) deviceNodes() []string {
	var nodes []string
	for _, pattern := range []string{"nvidia*", "nvidia-caps/nvidia-cap*"} {
		matches, _ := fs.Glob(s.dev, pattern) // only a bad pattern is an error
		for _, name := range matches {
			if info, err := fs.Stat(s.dev, name); err == nil && !info.IsDir() {
				nodes = append(nodes, fmt.Sprintf("/dev/%s", name))
			}
		}
	}
	return nodes
}
