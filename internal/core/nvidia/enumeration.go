package nvidia

import (
	"cmp"
	"errors"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// identity is a GPU as the enumeration found it, or an NVML index whose GPU could not be identified.
type identity struct {
	index        int  // NVML index; of a GPU that does not answer, the latest known
	oldIndex     int  // of a known GPU that answers: its index in the pass before
	indexUnknown bool // it does not answer, and its index has changed in a way that is not known
	handle       nvml.Device
	id           gpu.DeviceID // "" if unknown
	pci          gpu.PCIAddress
	err          error      // why it does not answer
	handleStale  bool       // it was identified and then lost: its handle may be from before a reset
	lookupWorker *gpuWorker // whose call about it has not returned, if id is unknown
}

// enumeration is one complete pass over all GPUs.
type enumeration struct {
	count int        // nvmlDeviceGetCount
	gpus  []identity // by index; includes those that do not answer
}

// maxPasses bounds how often one reading enumerates the GPUs.
const maxPasses = 3

// errNotListed means that the driver no longer lists a GPU.
var errNotListed = errors.New("not listed by the driver")

// errUnidentified means that a handle does not show any more which GPU it is of.
var errUnidentified = errors.New("the driver reports neither UUID nor PCI address of the handle")

// enumerate brings the session's enumeration up to date and returns the GPUs that are gone. GPUs can be added and
// removed meanwhile, so a difference counts when two passes agree. If no two do, stable is false: a GPU may be missing
// in all of them. Only an error of the whole driver is returned.
//
//	GPU 0 removed:  handles 0 1 2 3      pass 1: 0 is gone, 1 is at 1 .. removal .. 2 is at 1, 3 at 2
//	                indices 1 2 3        pass 2: 1 at 0, 2 at 1, 3 at 2;  pass 3: the same
func (s *Session) enumerate(count int) (gone []identity, stable bool, err error) {
	for n := 0; n < maxPasses && !stable; n++ {
		if n > 0 {
			count, err = s.readCount()
			if err != nil {
				return nil, false, err
			}
		}
		next, removed, err := s.enumerateOnce(count)
		if err != nil {
			return nil, false, err
		}
		stable = next.equal(s.enumeration)
		s.enumeration, gone = next, append(gone, removed...)
	}
	s.dropWorkers(s.enumeration.gpus)
	return slices.DeleteFunc(gone, s.enumeration.contains), stable, nil
}

// equal reports whether two passes found the same.
func (e enumeration) equal(other enumeration) bool {
	return e.count == other.count && slices.EqualFunc(e.gpus, other.gpus, func(i, j identity) bool {
		return i.index == j.index && i.id == j.id && i.pci == j.pci && (i.err == nil) == (j.err == nil) &&
			(i.err == nil || failureOf(i.err) == failureOf(j.err))
	})
}

// contains reports whether a GPU is present, or another one in its slot.
func (e enumeration) contains(g identity) bool {
	return slices.ContainsFunc(e.gpus, func(i identity) bool {
		return i.id == g.id || i.pci != "" && i.pci == g.pci
	})
}

// enumerateOnce makes one pass. A known GPU is queried by its handle, which can't lead to another GPU as an index can,
// and counts as gone only if the driver reports nothing at its PCI address. The indices that are then unassigned are
// looked up.
func (s *Session) enumerateOnce(count int) (next enumeration, gone []identity, err error) {
	found, unresponsive, gone, err := s.refreshKnown()
	if err != nil {
		return enumeration{}, nil, err
	}
	moved := count != s.enumeration.count || len(gone) > 0
	for _, f := range found {
		moved = moved || f.oldIndex != f.index
	}
	unassigned, blocked := unassignedIndices(count, moved, found, unresponsive)
	next = enumeration{count: count, gpus: slices.Concat(found, unresponsive)}
	if err := s.lookUpUnassigned(&next, unassigned, blocked); err != nil {
		return enumeration{}, nil, err
	}
	slices.SortStableFunc(next.gpus, compareIndices)
	return next, gone, nil
}

// refreshKnown queries the GPUs of the previous pass: those found, those that do not answer, and those gone.
func (s *Session) refreshKnown() (found, unresponsive, gone []identity, err error) {
	var known []identity
	var targets []target
	for _, k := range s.enumeration.gpus {
		switch {
		case k.id != "":
			known = append(known, k)
			targets = append(targets, target{s.worker(k.id), k.index, gpu.WholeGPU(k.id)})
		case k.lookupWorker != nil:
			if k.err = k.lookupWorker.hungError(); k.err != nil {
				unresponsive = append(unresponsive, k)
			}
		}
	}
	handles := s.enumeration.handles()
	results, errs := queryAll(s, targets, func(i int, c *caller) identity { return known[i].refresh(c, s.lib, handles) })
	for i, k := range known {
		switch err := errs[i]; {
		case err == nil:
			results[i].oldIndex = k.index
			found = append(found, results[i])
		case isDriverLost(err):
			return nil, nil, nil, err
		case errors.Is(err, errNotListed):
			gone = append(gone, k)
		default:
			k.err, k.handleStale = err, false
			unresponsive = append(unresponsive, k)
		}
	}
	slices.SortStableFunc(unresponsive, compareIndices)
	return found, unresponsive, gone, nil
}

// handles are those of the known GPUs.
func (e enumeration) handles() map[nvml.Device]gpu.DeviceID {
	handles := map[nvml.Device]gpu.DeviceID{}
	for _, i := range e.gpus {
		if i.id != "" {
			handles[i.handle] = i.id
		}
	}
	return handles
}

func compareIndices(i, j identity) int { return cmp.Compare(i.index, j.index) }

// refresh reads where a known GPU is now. If it is lost, or its handle is unusable, its handle is looked up by its
// PCI address, which identifies no other GPU. A handle that turns out to be another GPU's is not used, as that GPU may
// hang.
func (i identity) refresh(c *caller, lib nvml.Interface, handles map[nvml.Device]gpu.DeviceID) identity {
	now := i
	if !i.handleStale || !c.slot.library.has(handleByPCI) {
		now = i.readLocation(c)
		unusable := isLost(c.err) || isUnsupported(c.err) || errors.Is(c.err, errUnidentified)
		if !unusable || !c.slot.library.has(handleByPCI) {
			return now
		}
	}
	before := c.err
	c.err = nil
	h := required(c, handleByPCI, func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId(string(i.pci)) })
	other := handles[h]
	switch {
	case returnCode(c.err) == nvml.ERROR_NOT_FOUND, c.err == nil && other != "" && other != i.id:
		c.err = errNotListed
	case c.err == nil:
		i.handle = h
		return i.readLocation(c)
	case isLost(c.err), isUnsupported(c.err):
		if c.err = before; before == nil {
			return i.readLocation(c)
		}
	}
	return now
}

// readLocation verifies that a handle is still this GPU's, and reads its PCI address and index. A handle that answers
// neither what its UUID nor what its PCI address is may be invalid.
func (i identity) readLocation(c *caller) identity {
	c.fellBack = false
	id := readUUID(c, i.handle, i.id)
	if c.err == nil && id != i.id {
		c.err = errNotListed
	}
	noUUID := c.fellBack
	c.fellBack = false
	pci := readPCI(c, i.handle)
	if c.err == nil && noUUID && (c.fellBack || pci != i.pci) {
		c.err = errUnidentified
	}
	i.pci = pci
	// One more than the index, so that zero is unknown.
	index := supported(c, "nvmlDeviceGetIndex", func() (int, nvml.Return) {
		index, ret := i.handle.GetIndex()
		return index + 1, ret
	})
	if index > 0 {
		i.index = index - 1
	}
	i.err, i.handleStale, i.indexUnknown = nil, false, false
	return i
}
