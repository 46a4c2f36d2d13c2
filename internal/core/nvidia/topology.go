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

// nvlinkCount is the number of active NVLinks of a GPU by nvmlDeviceGetNvLinkState, and the number that its latest
// health check had read at that time (NVML field 165). If the two calls never agree, the topology is still not read
// every time.
type nvlinkCount struct {
	active  int
	checked gpu.OptionalUint64
}

// nvlinkEnds are the active NVLinks of one GPU by their remote ends.
type nvlinkEnds struct {
	active   int                    // all of them
	direct   map[gpu.PCIAddress]int // to another GPU
	toSwitch int                    // to an NVSwitch, which connects all GPUs that have links to one
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
	complete := true
	ends, errs := queryAll(s, s.targetsOf(gpus), func(i int, c *caller) nvlinkEnds { return readNVLinks(c, gpus[i].handle) })
	counts := map[gpu.DeviceID]nvlinkCount{}
	for i, err := range errs {
		if isDriverLost(err) {
			return nil, err
		}
		complete = complete && err == nil
		counts[ids[i]] = nvlinkCount{ends[i].active, s.worker(ids[i]).record.sample.LinksUp}
		if err != nil {
			counts[ids[i]] = s.topology.nvlinks[ids[i]]
		}
	}
	var links []gpu.Link
	for i, a := range gpus {
		p, err := s.readPCIePaths(a, gpus[i+1:])
		if isDriverLost(err) {
			return nil, err
		}
		complete = complete && p.complete && err == nil
		for j, b := range gpus[i+1:] {
			links = append(links, gpu.Link{
				A: a.device.ID, B: b.device.ID, Path: p.to[j],
				NVLinks: ends[i].direct[b.device.PCI] + min(ends[i].toSwitch, ends[i+1+j].toSwitch),
			})
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
				p.to[i] = supported(pair, "nvmlDeviceGetTopologyCommonAncestor", func() (gpu.PCIePath, nvml.Return) {
					level, ret := from.handle.GetTopologyCommonAncestor(other.handle)
					return pciePath[level], ret
				})
			}
			if isDriverLost(pair.err) {
				c.err = pair.err
			}
			p.complete = p.complete && free[i] && pair.err == nil
		}
		return p
	})
	if err != nil {
		p.to = make([]gpu.PCIePath, len(others))
	}
	return p, err
}

// readNVLinks reads the NVLinks of a GPU. The first link number that the GPU does not have ends the list.
func readNVLinks(c *caller, h nvml.Device) nvlinkEnds {
	e := nvlinkEnds{direct: map[gpu.PCIAddress]int{}}
	for link := range nvml.NVLINK_MAX_LINKS {
		active := required(c, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return h.GetNvLinkState(link)
		})
		if isUnsupported(c.err) {
			c.err = nil
			break
		}
		if c.err != nil || active != nvml.FEATURE_ENABLED {
			continue
		}
		e.active++
		kind := supported(c, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (nvml.IntNvLinkDeviceType, nvml.Return) {
			return h.GetNvLinkRemoteDeviceType(link)
		})
		if kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
			e.toSwitch++
			continue
		}
		info := supported(c, "nvmlDeviceGetNvLinkRemotePciInfo", func() (nvml.PciInfo, nvml.Return) {
			return h.GetNvLinkRemotePciInfo(link)
		})
		if pci, err := pciAddress(info); err == nil {
			e.direct[pci]++
		}
	}
	return e
}
