package nvidia

import (
	"errors"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// knownGPU is a GPU and its MIG instances; the zero value is a GPU that was never read.
type knownGPU struct {
	nvmlDevice
	instances []nvmlDevice
}

// nvmlDevice is a device with its NVML handle, which is valid for this session only.
type nvmlDevice struct {
	handle nvml.Device
	device gpu.Device
}

// enumerationUnstable is the reason given while GPUs are added or removed during a reading. Wait reports it too, so
// that another reading follows.
const enumerationUnstable = "GPUs are being added or removed"

// Snapshot reads the whole node: it enumerates the GPUs, then reads each of them. A GPU that can't be identified, or
// is lost meanwhile, becomes an exclusion; so does a MIG instance. An error wraps gpu.ErrDriverLost or
// gpu.ErrDriverStale and ends the session. It belongs to the reader.
func (s *Session) Snapshot() (gpu.Snapshot, error) {
	count, err := s.readDriver()
	if err != nil {
		return gpu.Snapshot{}, s.driverLost(err)
	}
	snap := gpu.Snapshot{Driver: s.driver, Nodes: s.nodes.relist(s.dev)}
	gone, stable, err := s.enumerate(count)
	if err != nil {
		return gpu.Snapshot{}, s.driverLost(err)
	}
	for _, g := range gone {
		snap.Excluded = append(snap.Excluded, exclusionOf(g, errNotListed))
	}
	if !stable { // a GPU that is missing from this reading is not lost
		s.unstable.Store(true)
		snap.Excluded = append(snap.Excluded, gpu.Exclusion{Index: count, At: gpu.Node, Failure: gpu.FailurePending, Reason: enumerationUnstable})
	}
	var all, answered []knownGPU
	for i, r := range s.readAll(s.enumeration.gpus) {
		found := &s.enumeration.gpus[i]
		snap.Excluded = append(snap.Excluded, r.excluded...)
		switch {
		case isDriverLost(r.err):
			return gpu.Snapshot{}, s.driverLost(r.err)
		case r.err != nil:
			snap.Excluded = append(snap.Excluded, exclusionOf(*found, r.err))
			found.handleStale = found.err == nil && isLost(r.err)
			if r.last.device.ID != "" {
				all = append(all, r.last)
			}
			continue
		}
		all, answered = append(all, r.gpu), append(answered, r.gpu)
	}
	if snap.Links, err = s.readLinks(answered); err != nil {
		return gpu.Snapshot{}, s.driverLost(err)
	}
	for _, g := range answered {
		g.device.NVLinks = s.topology.nvlinks[g.device.ID].active
		snap.Devices = append(snap.Devices, g.device)
		for _, instance := range g.instances {
			snap.Devices = append(snap.Devices, instance.device)
		}
	}
	s.gpus = all
	s.updateEventSet(answered)
	return gpu.NewSnapshot(snap), nil
}

// readDriver reads the number of GPUs and the versions. Any error concerns the whole driver.
func (s *Session) readDriver() (count int, err error) {
	count, err = s.readCount()
	c := caller{slot: &s.reader, at: gpu.Node, err: err}
	s.driver.Version = optional(&c, "nvmlSystemGetDriverVersion", "", textOf(s.lib.SystemGetDriverVersion))
	s.driver.CUDA = optional(&c, "nvmlSystemGetCudaDriverVersion", "", converted(s.lib.SystemGetCudaDriverVersion_v2, cudaVersion))
	return count, c.err
}

// readCount reads the number of GPUs. Any error concerns the whole driver.
func (s *Session) readCount() (int, error) {
	c := caller{slot: &s.reader, at: gpu.Node}
	count := retained(&c, "nvmlDeviceGetCount", s.lib.DeviceGetCount)
	return count, c.err
}

// lastRead is a GPU as it was read last.
func (s *Session) lastRead(id gpu.DeviceID) knownGPU {
	for _, g := range s.gpus {
		if g.device.ID == id {
			return g
		}
	}
	return knownGPU{}
}

// exclusionOf is the exclusion of a GPU, with its identity as far as it is known.
func exclusionOf(found identity, err error) gpu.Exclusion {
	e := gpu.Exclusion{Index: found.index, At: gpu.Node, PCI: found.pci, Failure: failureOf(err), Reason: err.Error()}
	if stuck, ok := errors.AsType[*hungError](err); ok && found.lookupWorker != nil {
		e.At = stuck.At
	}
	if found.id != "" {
		e.At = gpu.WholeGPU(found.id)
	}
	return e
}
