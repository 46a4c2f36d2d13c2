package nvidia

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// fabric is how the GPUs reach each other. Reading it takes a call per pair and several per NVLink, so
// it is read when the set of GPUs changes and kept.
type fabric struct {
	of    []core.DeviceID // in the order of their indices; nil if never read completely
	links []core.Link
}

// ends are the active NVLinks of one GPU, by where they lead.
type ends struct {
	direct   map[core.PCIAddress]int
	switched int // to an NVSwitch, which reaches every GPU that has links to one
}

// readLinks returns a link per pair of GPUs. What can't be read is unknown; only an error of the driver
// as a whole is an error.
func (s *Session) readLinks(gpus []gpu) ([]core.Link, error) {
	ids := make([]core.DeviceID, len(gpus))
	for i, g := range gpus {
		ids[i] = g.device.ID
	}
	if s.fabric.of != nil && slices.Equal(ids, s.fabric.of) {
		return s.fabric.links, nil
	}
	complete := true
	ask := func(g gpu, questions func(*asker)) error {
		a := &asker{line: &s.reader, at: g.device.At}
		questions(a)
		complete = complete && a.err == nil
		if isGone(a.err) {
			return a.err
		}
		return nil
	}
	reach := make([]ends, len(gpus))
	for i, g := range gpus {
		if err := ask(g, func(a *asker) { reach[i] = readEnds(a, g.handle) }); err != nil {
			return nil, err
		}
	}
	var links []core.Link
	for i, a := range gpus {
		for j := i + 1; j < len(gpus); j++ {
			b := gpus[j]
			link := core.Link{
				A: a.device.ID, B: b.device.ID,
				NVLinks: reach[i].direct[b.device.PCI] + min(reach[i].switched, reach[j].switched),
			}
			err := ask(a, func(q *asker) {
				link.Path = supported(q, "nvmlDeviceGetTopologyCommonAncestor", func() (core.PCIePath, nvml.Return) {
					level, ret := a.handle.GetTopologyCommonAncestor(b.handle)
					return pciePath(level), ret
				})
			})
			if err != nil {
				return nil, err
			}
			links = append(links, link)
		}
	}
	s.fabric = fabric{links: links}
	if complete {
		s.fabric.of = ids
	}
	return links, nil
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
