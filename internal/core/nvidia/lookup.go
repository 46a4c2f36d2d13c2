package nvidia

import (
	"cmp"
	"errors"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// indexRange is where a GPU can be that was at an index: from low to below high, between its former neighbours, which were
// found.
func indexRange(oldIndex, count int, found []identity) (low, high int) {
	high = count
	for _, f := range found {
		switch {
		case f.oldIndex < oldIndex:
			low = max(low, f.index+1)
		case f.oldIndex > oldIndex:
			high = min(high, f.index)
		}
	}
	return low, high
}

// unassignedIndices are the indices that belong neither to a GPU that has answered nor, as far as it can be
// determined, to one that does not (unresponsive). They are looked up; the lookup of a GPU that hangs would be a second call
// about it.
//
// If no GPU has moved, the unresponsive ones have their old indices. Otherwise each is between its former neighbours, as
// the order of GPUs does not change; if that leaves a choice, its indexUnknown is set. A GPU that hangs can then be at any
// unassigned index: blocked is its error, and none may be looked up.
//
// unresponsive is sorted by index; its elements get the indices that are determined here.
func unassignedIndices(count int, moved bool, found, unresponsive []identity) (free []int, blocked error) {
	for index := range count {
		if !slices.ContainsFunc(found, func(f identity) bool { return f.index == index }) {
			free = append(free, index)
		}
	}
	candidates := func(i identity) (low, high int) {
		if moved {
			return indexRange(i.index, count, found)
		}
		return i.index, i.index + 1
	}
	old, taken := slices.Clone(unresponsive), []int(nil)
	for i, s := range old {
		low, high := candidates(s)
		places := slices.DeleteFunc(slices.Clone(free), func(index int) bool { return index < low || index >= high })
		rank, rivals := 0, 0 // among the unresponsive GPUs with the same candidates
		for j, other := range old {
			if l, h := candidates(other); l == low && h == high {
				rivals++
				rank += min(1, max(0, i-j))
			}
		}
		if unresponsive[i].indexUnknown = s.indexUnknown || len(places) != rivals; !unresponsive[i].indexUnknown {
			unresponsive[i].index = places[rank]
			taken = append(taken, places[rank])
		} else if isHung(s.err) {
			blocked = s.err
		}
	}
	return slices.DeleteFunc(free, func(index int) bool { return slices.Contains(taken, index) }), blocked
}

// lookUpUnassigned looks up the GPUs at unassigned indices and adds them to e; if blocked is set, it adds the indices
// with that error instead. If a GPU that hangs has moved to such an index since it was queried, its lookup hangs too
// and costs one more goroutine, once.
func (s *Session) lookUpUnassigned(e *enumeration, unassigned []int, blocked error) error {
	unplaced := 0 // that many of the indices belong to GPUs that e has already
	for _, i := range e.gpus {
		if i.indexUnknown {
			unplaced++
		}
	}
	if blocked != nil {
		for _, index := range unassigned[min(unplaced, len(unassigned)):] {
			e.gpus = append(e.gpus, identity{index: index, err: blocked})
		}
		return nil
	}
	workers := s.freeLookupWorkers(len(unassigned))
	targets := make([]target, len(unassigned))
	for i, index := range unassigned {
		targets[i] = target{workers[i], index, gpu.Node}
	}
	handles := e.handles()
	found, errs := queryAll(s, targets, func(i int, c *caller) identity { return lookUp(c, s.lib, targets[i].index, handles) })
	for i, f := range found {
		f.index = targets[i].index
		f.err = cmp.Or(f.err, errs[i])
		switch {
		case isDriverLost(f.err):
			return f.err
		case f.err == nil:
			e.add(f)
		case unplaced > 0:
			unplaced--
		default:
			if isHung(f.err) {
				f.lookupWorker = workers[i]
			}
			f.id = "" // a UUID counts only with the PCI address
			e.gpus = append(e.gpus, f)
		}
	}
	return nil
}

// errSharedUUID means that two GPUs have one UUID, which identifies neither.
var errSharedUUID = errors.New("another GPU has the same UUID")

// add adds a GPU that was looked up. It may be one of those that did not answer, with its old handle or a new one. Of
// two GPUs with one UUID the first one has it.
func (e *enumeration) add(f identity) {
	at := slices.IndexFunc(e.gpus, func(i identity) bool { return i.id == f.id })
	switch {
	case at < 0:
		e.gpus = append(e.gpus, f)
	case f.pci != "" && e.gpus[at].err == nil && e.gpus[at].pci != f.pci:
		f.id, f.err = "", errSharedUUID
		e.gpus = append(e.gpus, f)
	case e.gpus[at].err == nil: // it has moved since it was queried
	case e.gpus[at].handle == f.handle:
		e.gpus[at].index, e.gpus[at].indexUnknown = f.index, false
	default:
		e.gpus[at] = f
	}
}

// lookUp identifies the GPU at an index by its UUID and, also if that fails, its PCI address. A known handle
// identifies the GPU without further calls.
func lookUp(c *caller, lib nvml.Interface, index int, handles map[nvml.Device]gpu.DeviceID) (found identity) {
	c.slot.answers = nil // they may be of another GPU
	found.handle = required(c, "nvmlDeviceGetHandleByIndex", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByIndex(index)
	})
	if c.err != nil {
		return found
	}
	if found.id = handles[found.handle]; found.id != "" {
		return found
	}
	found.id = readUUID(c, found.handle, "")
	if found.err, c.err = c.err, nil; found.err == nil {
		c.at = gpu.WholeGPU(found.id)
	}
	found.pci = readPCI(c, found.handle)
	return found
}

// readPCI reads the PCI address of a handle.
func readPCI(c *caller, h nvml.Device) (pci gpu.PCIAddress) {
	c.subject = h
	info := retained(c, "nvmlDeviceGetPciInfo", h.GetPciInfo)
	c.subject = nil
	if c.err == nil {
		pci, c.err = pciAddress(info)
	}
	return pci
}
