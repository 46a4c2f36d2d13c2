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
		return core.Snapshot{}, s.gone(err)
	}
	snap := core.Snapshot{Driver: s.driver, Nodes: s.deviceNodes()}
	there, err := s.identify(count)
	if err != nil {
		return core.Snapshot{}, s.gone(err)
	}
	gpus := make([]gpu, count)
	var well []gpu
	for index, r := range s.readAll(there) {
		snap.Excluded = append(snap.Excluded, r.excluded...)
		switch {
		case isGone(r.err):
			return core.Snapshot{}, s.gone(r.err)
		case r.err != nil:
			snap.Excluded = append(snap.Excluded, exclude(index, there[index], r.last, r.err))
			gpus[index] = r.last
			continue
		}
		gpus[index] = r.gpu
		well = append(well, r.gpu)
		snap.Devices = append(snap.Devices, r.gpu.device)
		for _, instance := range r.gpu.instances {
			snap.Devices = append(snap.Devices, instance.device)
		}
	}
	if snap.Links, err = s.readLinks(well); err != nil {
		return core.Snapshot{}, s.gone(err)
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
	targets := make([]target, count)
	for index := range targets {
		targets[index] = target{index, core.Node}
		if index < len(s.gpus) && s.gpus[index].device.ID != "" {
			targets[index].at = core.WholeGPU(s.gpus[index].device.ID)
		}
	}
	there, errs := visitAll(s, targets, func(index int, a *asker) identity { return identifyGPU(a, s.lib, index) })
	for index := range there {
		found := &there[index]
		if found.err = cmp.Or(found.err, errs[index]); isGone(found.err) {
			return nil, found.err
		}
	}
	return there, nil
}

// identifyGPU reads the UUID and, also where that fails, the PCI address: the slot tells who is silent.
func identifyGPU(a *asker, lib nvml.Interface, index int) (found identity) {
	found.handle = required(a, "nvmlDeviceGetHandleByIndex", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByIndex(index)
	})
	if a.err != nil {
		return found
	}
	found.id = core.DeviceID(required(a, "nvmlDeviceGetUUID", found.handle.GetUUID))
	if found.err, a.err = a.err, nil; found.err == nil {
		a.at = core.WholeGPU(found.id)
	}
	info := required(a, "nvmlDeviceGetPciInfo", found.handle.GetPciInfo)
	if a.err == nil {
		found.pci, a.err = pciAddress(info)
	}
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
