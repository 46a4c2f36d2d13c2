package core

import "slices"

const (
	// maxPending bounds the lines of the kernel log that wait for the first reading: more than an XID of each kind for
	// each of 16 GPUs.
	maxPending = 1024

	// maxUnlisted bounds the XIDs that are remembered of PCI addresses where no GPU is listed.
	maxUnlisted = 64
)

// UnlistedXID is an XID that the kernel logged of a PCI address where the driver lists no GPU.
type UnlistedXID struct {
	PCI  PCIAddress
	Code uint64
}

// kernelLogState is how far a state has read the kernel log, and what it could not place. It is immutable.
//
//	same boot, known  : goes on where the history ends
//	same boot, unknown: from now on; an XID of long ago may have been dealt with
//	after a reboot    : everything of this boot is new
//
// The number and the effects of what was read before it are in the same record, so that a line that is read again after
// a crash had no effect that outlived it.
type kernelLogState struct {
	nextSequence uint64 // sequence number to go on with; 0 = unknown
	fromStart    bool   // the history is of another boot
	machineRead  bool   // the machine was read since the agent started
	pending      []Observation

	unlisted      []UnlistedXID // in the order in which they came
	unidentified  []Observation // those of a GPU that is excluded since, without its UUID, to count when it has one
	unlistedCount uint64        // XIDs of PCI addresses where no GPU is listed
}

func restoreKernelLog(r Checkpoint, rebooted bool) kernelLogState {
	if rebooted {
		return kernelLogState{fromStart: true}
	}
	return kernelLogState{nextSequence: r.KernelLog}
}

// KernelLog is the sequence number from which on the kernel log is news. It is not known on the first start, and when
// the agent before did not read the log: from now on, then.
func (s State) KernelLog() (next uint64, known bool) {
	return s.kernelLog.nextSequence, s.kernelLog.fromStart || s.kernelLog.nextSequence > 0
}

// UnlistedXIDs are XIDs in the kernel log of PCI addresses where no GPU is listed, each once and the first ones only,
// and how many there were since the agent started.
func (s State) UnlistedXIDs() (each []UnlistedXID, count uint64) {
	return slices.Clone(s.kernelLog.unlisted), s.kernelLog.unlistedCount
}

// locate is locate, and records how far the kernel log was read. An XID of the log waits until the machine
// was read, unless the GPU is known from an earlier life of the agent under the same boot.
func (s *State) locate(o Observation) (Observation, bool) {
	if o.Kind == KernelLogRead && o.NextSequence == 0 {
		s.kernelLog.stop()
		return o, false
	}
	located, ok := Locate(s.Snapshot, o)
	if !ok && !s.rebooted {
		located, ok = Locate(Snapshot{Devices: s.priorDevices}, o)
	}
	fromLog := o.Kind == KernelLogRead || o.FromKernelLog
	if !fromLog {
		return located, ok
	}
	if !s.kernelLog.machineRead && (!ok || o.Kind == KernelLogRead && len(s.kernelLog.pending) > 0) {
		s.kernelLog.hold(o)
		return o, false
	}
	if len(s.kernelLog.pending) == 0 { // else they would be skipped after a crash
		s.kernelLog.nextSequence = max(s.kernelLog.nextSequence, o.NextSequence)
		s.kernelLog.fromStart = s.kernelLog.fromStart && s.kernelLog.nextSequence == 0
	}
	if o.Kind != KernelLogRead && !ok {
		s.kernelLog.recordUnlisted(o, s.Snapshot)
	}
	return located, ok && o.Kind != KernelLogRead
}

// stop takes in that the log is not read: which of its lines were seen is then unknown.
func (l *kernelLogState) stop() {
	l.nextSequence, l.fromStart, l.pending = 0, false, slices.Clone(l.pending)
	for i := range l.pending {
		l.pending[i].NextSequence = 0
	}
}

func (l *kernelLogState) hold(o Observation) {
	if len(l.pending) < maxPending {
		l.pending = append(slices.Clip(l.pending), o)
	}
}

// recordUnlisted notes an XID of a PCI address where no GPU is listed.
func (l *kernelLogState) recordUnlisted(o Observation, s Snapshot) {
	l.unlistedCount++
	if x := (UnlistedXID{o.PCI, o.Code}); len(l.unlisted) < maxUnlisted && !slices.Contains(l.unlisted, x) {
		l.unlisted = append(slices.Clip(l.unlisted), x)
		if excludesUnidentified(s, o.PCI) {
			l.unidentified = append(slices.Clip(l.unidentified), o)
		}
	}
}

// takePending is what waited for the reading that the state has just taken in.
func (s *State) takePending() []Observation {
	waited := s.kernelLog.pending
	s.kernelLog.pending, s.kernelLog.machineRead = nil, true
	var still []Observation
	for _, o := range s.kernelLog.unidentified {
		if _, listed := s.Snapshot.GPUAt(o.PCI); listed {
			waited = append(slices.Clip(waited), o)
			s.kernelLog.unlisted = slices.DeleteFunc(slices.Clone(s.kernelLog.unlisted), func(x UnlistedXID) bool {
				return x == UnlistedXID{o.PCI, o.Code}
			})
		} else if excludesUnidentified(s.Snapshot, o.PCI) {
			still = append(still, o)
		}
	}
	s.kernelLog.unidentified = still
	return waited
}

// excludesUnidentified reports whether a GPU of that PCI address was seen whose UUID is not known.
func excludesUnidentified(s Snapshot, pci PCIAddress) bool {
	return slices.ContainsFunc(s.Excluded, func(e Exclusion) bool { return e.PCI == pci && e.At.GPU == "" })
}
