package nvidia

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// topology is how the GPUs are connected. Reading it takes a call per pair of GPUs and several per NVLink, so it is
// kept until the set of GPUs changes, or a health check counts a different number of NVLinks.
type topology struct {
	gpus    []gpu.DeviceID // by index; nil if it was never read completely
	links   []gpu.Link
	nvlinks map[gpu.DeviceID]nvlinkCount
}

// nvlinkCount is the active NVLinks of a GPU by nvmlDeviceGetNvLinkState, and the number that its latest health check
// had read at that time (NVML field 165). If the two calls never agree, the topology is still not read every time.
type nvlinkCount struct {
	nvlinkEnds
	checked gpu.OptionalUint64
}

// nvlinkEnds are the active NVLinks of one GPU by their remote ends.
type nvlinkEnds struct {
	active     int                    // all of them
	direct     map[gpu.PCIAddress]int // to another GPU
	toSwitch   int                    // to an NVSwitch, which connects all GPUs that have links to one
	generation gpu.NVLinkGeneration   // of the first active one
	complete   bool                   // no call failed
}

// path returns the path between two GPUs as it was read last.
func (t topology) path(a, b gpu.DeviceID) gpu.PCIePath {
	at := slices.IndexFunc(t.links, func(l gpu.Link) bool { return l.A == a && l.B == b })
	if at < 0 {
		return gpu.PathUnknown
	}
	return t.links[at].Path
}

// linkedGPU is one end of a gpu.Link.
type linkedGPU struct {
	pci gpu.PCIAddress
	nvlinkEnds
}

// nvlinks returns the NVLinks between two GPUs as a gpu.Link without names and path. A link that only one of two GPUs
// lists as active is not usable, unless the links of the other one could not be read.
func nvlinks(a, b linkedGPU) gpu.Link {
	direct := min(a.direct[b.pci], b.direct[a.pci])
	if !a.complete || !b.complete {
		direct = max(a.direct[b.pci], b.direct[a.pci])
	}
	switched := min(a.toSwitch, b.toSwitch)
	l := gpu.Link{NVLinks: direct + switched, NVSwitch: switched > 0 && direct == 0}
	if l.NVLinks > 0 {
		l.Generation = min(a.generation, b.generation)
	}
	return l
}

// nvlinksChanged reports whether a health check of a GPU has counted other NVLinks than the topology has.
func (s *Session) nvlinksChanged(g knownGPU) bool {
	count, checked := s.topology.nvlinks[g.device.ID], s.worker(g.device.ID).record.sample.LinksUp
	return checked.OK && checked.Value != uint64(count.active) && checked != count.checked
}

// readLinks returns a link per pair of GPUs, and updates the topology. What can't be read is unknown; only an error of
// the whole driver is returned.
func (s *Session) readLinks(gpus []knownGPU) ([]gpu.Link, error) {
	ids := make([]gpu.DeviceID, len(gpus))
	for i, g := range gpus {
		ids[i] = g.device.ID
	}
	if s.topology.gpus != nil && slices.Equal(ids, s.topology.gpus) && !slices.ContainsFunc(gpus, s.nvlinksChanged) {
		return s.topology.links, nil
	}
	complete, prev := true, s.topology.nvlinks
	read, errs := queryAll(s, s.targetsOf(gpus), func(i int, c *caller) nvlinkEnds { return readNVLinks(c, gpus[i].nvmlDevice) })
	counts, ends := map[gpu.DeviceID]nvlinkCount{}, make([]linkedGPU, len(gpus))
	for i, err := range errs {
		if isDriverLost(err) {
			return nil, err
		}
		complete = complete && read[i].complete && err == nil
		counts[ids[i]] = nvlinkCount{read[i], s.worker(ids[i]).record.sample.LinksUp}
		if err != nil {
			counts[ids[i]] = prev[ids[i]]
		}
		ends[i] = linkedGPU{gpus[i].device.PCI, counts[ids[i]].nvlinkEnds}
	}
	var links []gpu.Link
	for i, a := range gpus {
		p, err := s.readPCIePaths(a, gpus[i+1:])
		if isDriverLost(err) {
			return nil, err
		}
		complete = complete && p.complete && err == nil
		for j, b := range gpus[i+1:] {
			l := nvlinks(ends[i], ends[i+1+j])
			l.A, l.B, l.Path = a.device.ID, b.device.ID, p.to[j]
			if l.Path == gpu.PathUnknown {
				l.Path = s.topology.path(l.A, l.B)
			}
			links = append(links, l)
		}
	}
	s.topology = topology{links: links, nvlinks: counts}
	if complete {
		s.topology.gpus = ids
	}
	return links, nil
}

// pciePaths are those from one GPU to others, in their order.
type pciePaths struct {
	to       []gpu.PCIePath // gpu.PathUnknown where it could not be read
	complete bool
}

// readPCIePaths reads the paths from one GPU to others. It skips a GPU that hangs, as the call would be a second one
// about it.
func (s *Session) readPCIePaths(from knownGPU, others []knownGPU) (pciePaths, error) {
	free := make([]bool, len(others))
	for i, other := range others {
		free[i] = s.queriedElsewhere(other.device.ID) == nil && !s.worker(other.device.ID).isHung()
	}
	p, err := query(s, s.targetOf(from.device), func(c *caller) pciePaths {
		p := pciePaths{to: make([]gpu.PCIePath, len(others)), complete: true}
		for i, other := range others {
			pair := c.withPlacement(c.at)
			if free[i] {
				p.to[i] = measured(pair, "nvmlDeviceGetTopologyCommonAncestor", func() (gpu.PCIePath, nvml.Return) {
					level, ret := from.handle.GetTopologyCommonAncestor(other.handle)
					return pciePath[level], ret
				})
			}
			if isDriverLost(pair.err) {
				c.err = pair.err
			}
			p.complete = p.complete && free[i] && pair.err == nil && !pair.fellBack
		}
		return p
	})
	if err != nil {
		p.to = make([]gpu.PCIePath, len(others))
	}
	return p, err
}

// linkSubject is what the calls are about that read an NVLink: see caller. MIG mode disables NVLinks.
type linkSubject struct {
	link int
	mig  bool
}

// readNVLinks reads the NVLinks of a GPU. The first link number that the GPU does not have ends the list.
func readNVLinks(c *caller, d nvmlDevice) nvlinkEnds {
	h := d.handle
	e := nvlinkEnds{direct: map[gpu.PCIAddress]int{}}
	for link := range nvml.NVLINK_MAX_LINKS {
		c.subject = linkSubject{link, d.device.MIG}
		active := retained(c, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return h.GetNvLinkState(link)
		})
		if isUnsupported(c.err) {
			c.err = nil
			break
		}
		if c.err != nil || active != nvml.FEATURE_ENABLED {
			continue
		}
		if e.active++; e.active == 1 {
			e.generation = optional(c, "nvmlDeviceGetNvLinkVersion", 0, func() (gpu.NVLinkGeneration, nvml.Return) {
				version, ret := h.GetNvLinkVersion(link)
				return nvlinkGeneration[version], ret
			})
		}
		e.countEnd(c, h, link)
	}
	e.complete = c.err == nil && !c.fellBack
	return e
}

// countEnd reads the remote end of an active link.
func (e *nvlinkEnds) countEnd(c *caller, h nvml.Device, link int) {
	kind := supported(c, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (nvml.IntNvLinkDeviceType, nvml.Return) {
		return h.GetNvLinkRemoteDeviceType(link)
	})
	if c.err == nil && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
		e.toSwitch++
		return
	}
	info := supported(c, "nvmlDeviceGetNvLinkRemotePciInfo", func() (nvml.PciInfo, nvml.Return) {
		return h.GetNvLinkRemotePciInfo(link)
	})
	if pci, err := pciAddress(info); err == nil {
		e.direct[pci]++
	}
}
