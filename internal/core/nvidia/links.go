package nvidia

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// network is how the GPUs reach each other. Reading it takes a call per pair and several per NVLink, so
// it is kept until the set of GPUs changes, or a check counts other NVLinks than were counted for it.
type network struct {
	of     []core.DeviceID // in the order of their indices; nil if never read completely
	links  []core.Link
	counts map[core.DeviceID]linkCount
}

// linkCount are the active NVLinks of a GPU, and what its checks had counted then. The two are different calls: should
// they never agree, the network is not read each time.
type linkCount struct {
	active  int
	checked core.OptionalUint64
}

// ends are the active NVLinks of one GPU, by where they lead.
type ends struct {
	active   int // all of them
	direct   map[core.PCIAddress]int
	switched int // to an NVSwitch, which reaches every GPU that has links to one
}

// recounted reports whether a check of a GPU has counted other NVLinks than the network has.
func (s *Session) recounted(g gpu) bool {
	was, now := s.network.counts[g.device.ID], s.lane(g.device.ID).record.vitals.LinksUp
	return now.OK && now.Value != uint64(was.active) && now != was.checked
}

// readLinks returns a link per pair of GPUs, and counts the NVLinks of each. What can't be read is unknown; only an
// error of the driver as a whole is an error.
func (s *Session) readLinks(gpus []gpu) ([]core.Link, error) {
	ids := make([]core.DeviceID, len(gpus))
	for i, g := range gpus {
		ids[i] = g.device.ID
	}
	if s.network.of != nil && slices.Equal(ids, s.network.of) && !slices.ContainsFunc(gpus, s.recounted) {
		return s.network.links, nil
	}
	complete := true
	targets := make([]target, len(gpus))
	for i, g := range gpus {
		targets[i] = s.at(g.device)
	}
	reach, errs := visitAll(s, targets, func(i int, a *asker) ends { return readEnds(a, gpus[i].handle) })
	count := map[core.DeviceID]linkCount{}
	for i, err := range errs {
		if isGone(err) {
			return nil, err
		}
		complete = complete && err == nil
		count[ids[i]] = linkCount{reach[i].active, s.lane(ids[i]).record.vitals.LinksUp}
		if err != nil {
			count[ids[i]] = s.network.counts[ids[i]]
		}
	}
	var links []core.Link
	for i, a := range gpus {
		p, err := s.readPaths(a, gpus[i+1:])
		if isGone(err) {
			return nil, err
		}
		complete = complete && p.complete && err == nil
		for j, b := range gpus[i+1:] {
			links = append(links, core.Link{
				A: a.device.ID, B: b.device.ID, Path: p.to[j],
				NVLinks: reach[i].direct[b.device.PCI] + min(reach[i].switched, reach[i+1+j].switched),
			})
		}
	}
	s.network = network{links: links, counts: count}
	if complete {
		s.network.of = ids
	}
	return links, nil
}

// paths are those from one GPU to others, in their order; unknown where the driver does not say.
type paths struct {
	to       []core.PCIePath
	complete bool
}

// readPaths asks how a GPU reaches others. One that is stuck is not asked about, as that would be a second
// call on it.
func (s *Session) readPaths(from gpu, others []gpu) (paths, error) {
	free := make([]bool, len(others))
	for i, other := range others {
		free[i] = s.isFree(other.device.ID)
	}
	p, err := visit(s, s.at(from.device), func(a *asker) paths {
		p := paths{to: make([]core.PCIePath, len(others)), complete: true}
		for i, other := range others {
			q := a.about(a.at)
			if free[i] {
				p.to[i] = supported(q, "nvmlDeviceGetTopologyCommonAncestor", func() (core.PCIePath, nvml.Return) {
					level, ret := from.handle.GetTopologyCommonAncestor(other.handle)
					return pciePath(level), ret
				})
			}
			if isGone(q.err) {
				a.err = q.err
			}
			p.complete = p.complete && free[i] && q.err == nil
		}
		return p
	})
	if err != nil {
		p.to = make([]core.PCIePath, len(others))
	}
	return p, err
}

// readEnds follows the NVLinks of a GPU. The first link that a GPU does not have ends them.
func readEnds(a *asker, h nvml.Device) ends {
	e := ends{direct: map[core.PCIAddress]int{}}
	for link := range nvml.NVLINK_MAX_LINKS {
		active := required(a, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return h.GetNvLinkState(link)
		})
		if isUnsupported(a.err) {
			a.err = nil
			break
		}
		if a.err != nil || active != nvml.FEATURE_ENABLED {
			continue
		}
		e.active++
		kind := supported(a, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (nvml.IntNvLinkDeviceType, nvml.Return) {
			return h.GetNvLinkRemoteDeviceType(link)
		})
		if kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
			e.switched++
			continue
		}
		info := supported(a, "nvmlDeviceGetNvLinkRemotePciInfo", func() (nvml.PciInfo, nvml.Return) {
			return h.GetNvLinkRemotePciInfo(link)
		})
		if pci, err := pciAddress(info); err == nil {
			e.direct[pci]++
		}
	}
	return e
}
