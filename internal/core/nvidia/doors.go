package nvidia

import (
	"cmp"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// move is a GPU that has said where it is now, and the index that it had.
type move struct {
	was int
	now identity
}

type moves []move

func (m moves) now() []identity {
	all := make([]identity, len(m))
	for i := range m {
		all[i] = m[i].now
	}
	return all
}

// around are the indices, from low to below high, between the neighbours of one that was at an index.
func (m moves) around(index, count int) (low, high int) {
	high = count
	for _, n := range m {
		switch {
		case n.was < index:
			low = max(low, n.now.index+1)
		case n.was > index:
			high = min(high, n.now.index)
		}
	}
	return low, high
}

// strangers are the indices at which there is somebody whom nobody has met: those that are neither of a GPU that
// has answered nor, as far as can be told, of one that is silent. A lookup that leads to a GPU that hangs would be
// a second call about it. Where nothing has moved, the silent are where they were. Else they are between the
// neighbours that they had, as GPUs keep their order; those of whom that leaves a choice are adrift. While one that
// hangs is adrift, it may be at any of these indices, and the error says that none is to be looked up.
//
// The silent are in the order of their indices, and get those that they have now.
func strangers(count int, moved bool, met moves, silent []identity) (free []int, blind error) {
	for index := range count {
		if !slices.ContainsFunc(met, func(m move) bool { return m.now.index == index }) {
			free = append(free, index)
		}
	}
	where := func(i identity) (low, high int) {
		if moved {
			return met.around(i.index, count)
		}
		return i.index, i.index + 1
	}
	was, taken := slices.Clone(silent), []int(nil)
	for i, s := range was {
		low, high := where(s)
		places := slices.DeleteFunc(slices.Clone(free), func(index int) bool { return index < low || index >= high })
		rank, rivals := 0, 0
		for j, other := range was {
			if l, h := where(other); l == low && h == high {
				rivals++
				rank += min(1, max(0, i-j))
			}
		}
		if silent[i].adrift = s.adrift || len(places) != rivals; !silent[i].adrift {
			silent[i].index = places[rank]
			taken = append(taken, places[rank])
		} else if isStuck(s.err) {
			blind = s.err
		}
	}
	return slices.DeleteFunc(free, func(index int) bool { return slices.Contains(taken, index) }), blind
}

// meet adds the strangers to a census, by looking up their indices. A lookup that hangs because a GPU has moved to
// that index since the others were asked costs one more thread, once.
func (s *Session) meet(c *census, strangers []int, blind error) error {
	adrift := 0 // that many of the strangers are none
	for _, i := range c.there {
		if i.adrift {
			adrift++
		}
	}
	if blind != nil {
		for _, index := range strangers[min(adrift, len(strangers)):] {
			c.there = append(c.there, identity{index: index, err: blind})
		}
		return nil
	}
	doors := s.openDoors(len(strangers))
	targets := make([]target, len(strangers))
	for i, index := range strangers {
		targets[i] = target{doors[i], index, core.Node}
	}
	taken := c.handles()
	found, errs := visitAll(s, targets, func(i int, a *asker) identity { return lookUp(a, s.lib, targets[i].index, taken) })
	for i, f := range found {
		f.index = targets[i].index
		f.err = cmp.Or(f.err, errs[i])
		switch {
		case isGone(f.err):
			return f.err
		case f.err == nil:
			c.add(f)
		case adrift > 0:
			adrift--
		default:
			if isStuck(f.err) {
				f.door = doors[i]
			}
			f.id = "" // it is not known before all of it is
			c.there = append(c.there, f)
		}
	}
	return nil
}

// add adds somebody who was met at an index. One that is known and has been silent so far may be met under another
// handle.
func (c *census) add(f identity) {
	at := slices.IndexFunc(c.there, func(i identity) bool { return i.id == f.id })
	switch {
	case at < 0:
		c.there = append(c.there, f)
	case c.there[at].err == nil: // it has moved since it was asked
	case c.there[at].handle == f.handle:
		c.there[at].index, c.there[at].adrift = f.index, false
	default:
		c.there[at] = f
	}
}

// lookUp reads who is at an index: the UUID and, also where that fails, the PCI address, as the slot tells who is
// silent. A known handle says who it is without being asked.
func lookUp(a *asker, lib nvml.Interface, index int, taken map[nvml.Device]core.DeviceID) (found identity) {
	found.handle = required(a, "nvmlDeviceGetHandleByIndex", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByIndex(index)
	})
	if a.err != nil {
		return found
	}
	if found.id = taken[found.handle]; found.id != "" {
		return found
	}
	found.id = core.DeviceID(required(a, "nvmlDeviceGetUUID", found.handle.GetUUID))
	if found.err, a.err = a.err, nil; found.err == nil {
		a.at = core.WholeGPU(found.id)
	}
	found.pci = readPCI(a, found.handle)
	return found
}

// readPCI reads the address of the slot.
func readPCI(a *asker, h nvml.Device) (pci core.PCIAddress) {
	info := required(a, "nvmlDeviceGetPciInfo", h.GetPciInfo)
	if a.err == nil {
		pci, a.err = pciAddress(info)
	}
	return pci
}
