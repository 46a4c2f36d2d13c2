package nvidia

import (
	"errors"
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

// Snapshot reads the whole machine: first who is there, then what each one is. A GPU that does not say
// who it is, or is lost on the way, becomes an exclusion; so does a MIG instance. An error wraps
// core.ErrDriverLost or core.ErrDriverStale and ends the session.
func (s *Session) Snapshot() (core.Snapshot, error) {
	count, err := s.readDriver()
	if err != nil {
		return core.Snapshot{}, s.gone(err)
	}
	snap := core.Snapshot{Driver: s.driver, Nodes: s.nodes.anew(s.dev)}
	gone, settled, err := s.identify(count)
	if err != nil {
		return core.Snapshot{}, s.gone(err)
	}
	for _, g := range gone {
		snap.Excluded = append(snap.Excluded, exclude(g, errUnlisted))
	}
	if !settled { // nobody who is missing from this reading is lost
		s.restless.Store(true)
		snap.Excluded = append(snap.Excluded, core.Exclusion{Index: count, At: core.Node, Failure: core.FailurePending, Reason: comeAndGo})
	}
	var gpus, well []gpu
	for i, r := range s.readAll(s.census.there) {
		found := &s.census.there[i]
		snap.Excluded = append(snap.Excluded, r.excluded...)
		switch {
		case isGone(r.err):
			return core.Snapshot{}, s.gone(r.err)
		case r.err != nil:
			snap.Excluded = append(snap.Excluded, exclude(*found, r.err))
			found.doubt = found.err == nil && isLost(r.err)
			if r.last.device.ID != "" {
				gpus = append(gpus, r.last)
			}
			continue
		}
		gpus, well = append(gpus, r.gpu), append(well, r.gpu)
	}
	if snap.Links, err = s.readLinks(well); err != nil {
		return core.Snapshot{}, s.gone(err)
	}
	for _, g := range well {
		g.device.NVLinks = s.network.counts[g.device.ID].active
		snap.Devices = append(snap.Devices, g.device)
		for _, instance := range g.instances {
			snap.Devices = append(snap.Devices, instance.device)
		}
	}
	s.gpus = gpus
	s.listen(well)
	return core.NewSnapshot(snap), nil
}

// comeAndGo is what there is to say of GPUs that were counted through several times, differently each time. Wait
// brings the next reading about.
const comeAndGo = "GPUs come and go while they are read"

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

// remembered is a GPU as it was read last.
func (s *Session) remembered(id core.DeviceID) gpu {
	for _, g := range s.gpus {
		if g.device.ID == id {
			return g
		}
	}
	return gpu{}
}

// exclude says why somebody is not in the reading, and who it is as far as is known.
func exclude(found identity, err error) core.Exclusion {
	e := core.Exclusion{Index: found.index, At: core.Node, PCI: found.pci, Failure: failureOf(err), Reason: err.Error()}
	if stuck, ok := errors.AsType[*StuckError](err); ok && found.door != nil {
		e.At = stuck.At
	}
	if found.id != "" {
		e.At = core.WholeGPU(found.id)
	}
	return e
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
