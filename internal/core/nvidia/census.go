package nvidia

import (
	"cmp"
	"errors"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core"
)

// identity is somebody at an index: a GPU, or one of which only that much is known.
type identity struct {
	index  int  // as far as is known: of one that is silent, the last
	adrift bool // it is silent, and somebody else answers at its index
	handle nvml.Device
	id     core.DeviceID // "" if it does not say
	pci    core.PCIAddress
	err    error // why it is silent
	doubt  bool  // it said who it is and then that it is lost: its handle may be of before a reset
	door   *lane // in which it hangs, if it has no name
}

// census is who is there: one finished pass over all of them.
type census struct {
	count int
	there []identity // in the order of their indices; those that are silent included
}

// passes are how often the GPUs are counted through for one reading, at most.
const passes = 3

// errUnlisted says that the driver does not list a GPU any more.
var errUnlisted = errors.New("not listed by the driver")

// identify finds out who is there, and who is not there any more. GPUs come and go meanwhile, so what differs from
// what is known counts once two passes agree. If they don't, settled is false: there is somebody who is in no pass,
// perhaps. Only an error of the driver as a whole is an error.
//
//	GPU 0 pulled:   handles 0 1 2 3      pass 1: 0 is gone, 1 is at 1 .. moved .. 2 at 1, 3 at 2
//	                indices 1 2 3        pass 2: 1 at 0, 2 at 1, 3 at 2;  pass 3: the same
func (s *Session) identify(count int) (gone []identity, settled bool, err error) {
	for n := 0; n < passes && !settled; n++ {
		if n > 0 {
			if count, err = call(&s.reader, "nvmlDeviceGetCount", core.Node, s.lib.DeviceGetCount); err != nil {
				return nil, false, err
			}
		}
		next, left, err := s.pass(count)
		if err != nil {
			return nil, false, err
		}
		settled = next.agrees(s.census)
		s.census, gone = next, append(gone, left...)
	}
	s.forget(s.census.there)
	return slices.DeleteFunc(gone, s.census.has), settled, nil
}

// agrees reports whether two passes found the same.
func (c census) agrees(d census) bool {
	return c.count == d.count && slices.EqualFunc(c.there, d.there, func(i, j identity) bool {
		return i.index == j.index && i.id == j.id && i.pci == j.pci && (i.err == nil) == (j.err == nil) &&
			(i.err == nil || failureOf(i.err) == failureOf(j.err))
	})
}

// has reports whether a GPU is there, or another in its slot.
func (c census) has(gone identity) bool {
	return slices.ContainsFunc(c.there, func(i identity) bool {
		return i.id == gone.id || i.pci != "" && i.pci == gone.pci
	})
}

// pass asks who is there. Known GPUs are asked by their handles, each in its lane, where they are now: no index can
// lead to a wrong one, and a GPU is gone only if the driver says so of its slot. What indices are left are somebody
// else's, who is asked through a door.
func (s *Session) pass(count int) (next census, gone []identity, err error) {
	met, silent, gone, err := s.meetAgain()
	if err != nil {
		return census{}, nil, err
	}
	moved := count != s.census.count || len(gone) > 0
	for _, m := range met {
		moved = moved || m.was != m.now.index
	}
	free, blind := strangers(count, moved, met, silent)
	next = census{count: count, there: append(met.now(), silent...)}
	if err := s.meet(&next, free, blind); err != nil {
		return census{}, nil, err
	}
	slices.SortStableFunc(next.there, compareIndices)
	return next, gone, nil
}

// meetAgain asks those that are known.
func (s *Session) meetAgain() (met moves, silent, gone []identity, err error) {
	var known []identity
	var targets []target
	for _, k := range s.census.there {
		switch {
		case k.id != "":
			known = append(known, k)
			targets = append(targets, target{s.lane(k.id), k.index, core.WholeGPU(k.id)})
		case k.door != nil:
			if k.err = k.door.blocked(); k.err != nil {
				silent = append(silent, k)
			}
		}
	}
	taken := s.census.handles()
	found, errs := visitAll(s, targets, func(i int, a *asker) identity { return known[i].again(a, s.lib, taken) })
	for i, k := range known {
		switch err := errs[i]; {
		case err == nil:
			met = append(met, move{k.index, found[i]})
		case isGone(err):
			return nil, nil, nil, err
		case errors.Is(err, errUnlisted):
			gone = append(gone, k)
		default:
			k.err, k.doubt = err, false
			silent = append(silent, k)
		}
	}
	slices.SortStableFunc(silent, compareIndices)
	return met, silent, gone, nil
}

// handles are those of the known GPUs.
func (c census) handles() map[nvml.Device]core.DeviceID {
	handles := map[nvml.Device]core.DeviceID{}
	for _, i := range c.there {
		if i.id != "" {
			handles[i.handle] = i.id
		}
	}
	return handles
}

func compareIndices(i, j identity) int { return cmp.Compare(i.index, j.index) }

// again asks a known GPU where it is. One that is lost, or of which the handle is of no use any more, is looked up
// in its slot, which names no other GPU; a handle that is another GPU's is not asked, as that one may hang.
func (i identity) again(a *asker, lib nvml.Interface, taken map[nvml.Device]core.DeviceID) identity {
	now := i
	if !i.doubt || !a.line.have[byPCI] {
		if now = i.tell(a); !isLost(a.err) && !isUnsupported(a.err) || !a.line.have[byPCI] {
			return now
		}
	}
	before := a.err
	a.err = nil
	h := required(a, byPCI, func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId(string(i.pci)) })
	other := taken[h]
	switch {
	case returned(a.err) == nvml.ERROR_NOT_FOUND, a.err == nil && other != "" && other != i.id:
		a.err = errUnlisted
	case a.err == nil:
		i.handle = h
		return i.tell(a)
	case isLost(a.err), isUnsupported(a.err):
		if a.err = before; before == nil {
			return i.tell(a)
		}
	}
	return now
}

// tell asks a handle whether it is still this GPU, and where it is: its slot and its index.
func (i identity) tell(a *asker) identity {
	id := required(a, "nvmlDeviceGetUUID", i.handle.GetUUID)
	if a.err == nil && core.DeviceID(id) != i.id {
		a.err = errUnlisted
	}
	i.pci = readPCI(a, i.handle)
	// One more than the index, so that zero is unknown.
	index := supported(a, "nvmlDeviceGetIndex", func() (int, nvml.Return) {
		index, ret := i.handle.GetIndex()
		return index + 1, ret
	})
	if index > 0 {
		i.index = index - 1
	}
	i.err, i.doubt, i.adrift = nil, false, false
	return i
}
