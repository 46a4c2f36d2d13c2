package core

import "slices"

const (
	// maxWaiting bounds the lines of the kernel log that wait for the first reading: more than an XID of each kind for
	// each of 16 GPUs.
	maxWaiting = 1024

	// maxUnlisted bounds the XIDs that are remembered of PCI addresses where no GPU is listed.
	maxUnlisted = 64
)

// UnlistedXID is an XID that the kernel logged of a PCI address where the driver lists no GPU.
type UnlistedXID struct {
	PCI  PCIAddress
	Code uint64
}

// kernelLog is how far a state has read the kernel log, and what it could not place. It is immutable.
//
//	same boot, known  : goes on where the history ends
//	same boot, unknown: from now on; an XID of long ago may have been dealt with
//	after a reboot    : everything of this boot is new
//
// The number and the effects of what was read before it are in the same record, so that a line that is read again after
// a crash had no effect that outlived it.
type kernelLog struct {
	next    uint64 // sequence number to go on with; 0 = unknown
	all     bool   // the history is of another boot
	ready   bool   // the machine was read since the agent started
	waiting []Observation

	unlisted []UnlistedXID // in the order in which they came
	refound  []Observation // those of a GPU that is excluded since, without its UUID, to count when it has one
	count    uint64        // XIDs of PCI addresses where no GPU is listed
}

func logOf(r Checkpoint, rebooted bool) kernelLog {
	if rebooted {
		return kernelLog{all: true}
	}
	return kernelLog{next: r.KernelLog}
}

// KernelLog is the sequence number from which on the kernel log is news. It is not known on the first start, and when
// the agent before did not read the log: from now on, then.
func (s State) KernelLog() (next uint64, known bool) {
	return s.log.next, s.log.all || s.log.next > 0
}

// UnlistedXIDs are XIDs in the kernel log of PCI addresses where no GPU is listed, each once and the first ones only,
// and how many there were since the agent started.
func (s State) UnlistedXIDs() (each []UnlistedXID, count uint64) {
	return slices.Clone(s.log.unlisted), s.log.count
}

// locateLogged is locate, and records how far the kernel log was read. An XID of the log waits until the machine
// was read, unless the GPU is known from an earlier life of the agent under the same boot.
func (s *State) locateLogged(o Observation) (Observation, bool) {
	if o.Kind == KernelLogRead && o.NextSequence == 0 {
		s.log.end()
		return o, false
	}
	located, ok := Locate(s.Snapshot, o)
	if !ok && !s.rebooted {
		located, ok = Locate(Snapshot{Devices: s.prior}, o)
	}
	fromLog := o.Kind == KernelLogRead || o.FromKernelLog
	if !fromLog {
		return located, ok
	}
	if !s.log.ready && (!ok || o.Kind == KernelLogRead && len(s.log.waiting) > 0) {
		s.log.await(o)
		return o, false
	}
	if len(s.log.waiting) == 0 { // else they would be skipped after a crash
		s.log.next = max(s.log.next, o.NextSequence)
		s.log.all = s.log.all && s.log.next == 0
	}
	if o.Kind != KernelLogRead && !ok {
		s.log.unplaced(o, s.Snapshot)
	}
	return located, ok && o.Kind != KernelLogRead
}

// end takes in that the log is not read: which of its lines were seen is then unknown.
func (l *kernelLog) end() {
	l.next, l.all, l.waiting = 0, false, slices.Clone(l.waiting)
	for i := range l.waiting {
		l.waiting[i].NextSequence = 0
	}
}

func (l *kernelLog) await(o Observation) {
	if len(l.waiting) < maxWaiting {
		l.waiting = append(slices.Clip(l.waiting), o)
	}
}

// unplaced notes an XID of a PCI address where no GPU is listed.
func (l *kernelLog) unplaced(o Observation, s Snapshot) {
	l.count++
	if x := (UnlistedXID{o.PCI, o.Code}); len(l.unlisted) < maxUnlisted && !slices.Contains(l.unlisted, x) {
		l.unlisted = append(slices.Clip(l.unlisted), x)
		if excludes(s, o.PCI) {
			l.refound = append(slices.Clip(l.refound), o)
		}
	}
}

// awaited is what waited for the reading that the state has just taken in.
func (s *State) awaited() []Observation {
	waited := s.log.waiting
	s.log.waiting, s.log.ready = nil, true
	var still []Observation
	for _, o := range s.log.refound {
		if _, listed := s.Snapshot.GPUAt(o.PCI); listed {
			waited = append(slices.Clip(waited), o)
			s.log.unlisted = slices.DeleteFunc(slices.Clone(s.log.unlisted), func(x UnlistedXID) bool {
				return x == UnlistedXID{o.PCI, o.Code}
			})
		} else if excludes(s.Snapshot, o.PCI) {
			still = append(still, o)
		}
	}
	s.log.refound = still
	return waited
}

// excludes reports whether a GPU of that PCI address was seen whose UUID is not known.
func excludes(s Snapshot, pci PCIAddress) bool {
	return slices.ContainsFunc(s.Excluded, func(e Exclusion) bool { return e.PCI == pci && e.At.GPU == "" })
}
