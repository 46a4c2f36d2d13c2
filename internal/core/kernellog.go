package core

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

const (
	// maxPending bounds the lines of the kernel log that wait for the first snapshot: more than an XID of each kind
	// for each of 16 GPUs.
	maxPending = 1024

	// maxUnlisted bounds the list of XIDs at PCI addresses where the driver lists no GPU.
	maxUnlisted = 64
)

// UnlistedXID is an XID in the kernel log at a PCI address where the driver lists no GPU.
type UnlistedXID struct {
	PCI  gpu.PCIAddress
	Code uint64
}

// kernelLogState is the position up to which the kernel log was read, and the XIDs that belong to no listed GPU.
// It is immutable.
//
//	position known    continue at the position
//	position unknown  read everything of this boot: the first start, a reboot, a log that was not read before,
//	                  or another source of it. A line that was counted before is not counted again
//
// The position is in the same checkpoint as the effects of the lines before it, so that each line takes effect
// once, also after a crash.
type kernelLogState struct {
	nextSequence uint64 // next sequence number to read; 0 = unknown
	stopped      bool   // the log is not read (any more)
	machineRead  bool   // a snapshot was read since the agent started
	pending      []health.Observation

	unlisted      []UnlistedXID        // in order of arrival
	unidentified  []health.Observation // those at the address of a GPU whose UUID is not known yet
	unlistedCount uint64               // XIDs at PCI addresses where no GPU is listed, since the agent started
}

// KernelLog returns the sequence number from which on the kernel log is to be read; 0 = from its beginning. It reports
// false if the agent does not read the log.
func (s State) KernelLog() (next uint64, read bool) {
	return s.kernelLog.nextSequence, !s.kernelLog.stopped
}

// UnlistedXIDs returns the XIDs in the kernel log at PCI addresses where no GPU is listed, each once, at most 64,
// and the number of all of them since the agent started.
func (s State) UnlistedXIDs() (each []UnlistedXID, count uint64) {
	return slices.Clone(s.kernelLog.unlisted), s.kernelLog.unlistedCount
}

// locate is locateIn for observations of the kernel log too, and records how far the log was read. An XID of the log
// waits for the first snapshot, unless its GPU is known from a checkpoint of the same boot.
func (s *State) locate(o health.Observation) (health.Observation, bool) {
	if o.Kind == health.KernelLogRead && o.NextSequence == 0 {
		s.kernelLog.stop()
		return o, false
	}
	if o.Kind == health.KernelLogReplaced {
		s.kernelLog.nextSequence = 0
		return o, false
	}
	located, ok := locateIn(s.Snapshot, o)
	if !ok && !s.rebooted {
		located, ok = locateIn(gpu.Snapshot{Devices: s.priorDevices}, o)
	}
	fromLog := o.Kind == health.KernelLogRead || o.FromKernelLog
	if !fromLog {
		return located, ok
	}
	if !s.kernelLog.machineRead && (!ok || o.Kind == health.KernelLogRead && len(s.kernelLog.pending) > 0) {
		s.kernelLog.hold(o)
		return o, false
	}
	if len(s.kernelLog.pending) == 0 { // otherwise a crash would lose the pending lines
		s.kernelLog.nextSequence = max(s.kernelLog.nextSequence, o.NextSequence)
	}
	if o.Kind != health.KernelLogRead && !ok {
		s.kernelLog.recordUnlisted(o, s.Snapshot)
	}
	return located, ok && o.Kind != health.KernelLogRead
}

// stop records that the log is not read any more, and that the position is therefore unknown.
func (l *kernelLogState) stop() {
	l.nextSequence, l.stopped, l.pending = 0, true, slices.Clone(l.pending)
	for i := range l.pending {
		l.pending[i].NextSequence = 0
	}
}

// shift moves the times of the observations that wait by d.
func (l kernelLogState) shift(d time.Duration) kernelLogState {
	l.pending, l.unidentified = slices.Clone(l.pending), slices.Clone(l.unidentified)
	for _, waiting := range [][]health.Observation{l.pending, l.unidentified} {
		for i := range waiting {
			waiting[i].Reported = health.ShiftTime(waiting[i].Reported, d)
		}
	}
	return l
}

// hold keeps an observation for the first snapshot. If there are too many, it drops earlier ones of the same fault: a
// program that fails a thousand times hides no fault of a GPU.
func (l *kernelLogState) hold(o health.Observation) {
	if len(l.pending) >= maxPending {
		l.pending = slices.Clone(l.pending)
		if l.dropRepeats(); len(l.pending) >= maxPending {
			return
		}
	}
	l.pending = append(slices.Clip(l.pending), o)
}

// dropRepeats drops all observations that wait but the latest of each fault.
func (l *kernelLogState) dropRepeats() {
	type fault struct {
		kind     health.ObservationKind
		pci      gpu.PCIAddress
		code     uint64
		severity xid.Severity
	}
	of := func(o health.Observation) fault { return fault{o.Kind, o.PCI, o.Code, o.Severity()} }
	latest := make(map[fault]int, len(l.pending))
	for i, o := range l.pending {
		latest[of(o)] = i
	}
	i := -1
	l.pending = slices.DeleteFunc(l.pending, func(o health.Observation) bool { i++; return latest[of(o)] != i })
}

// recordUnlisted records an XID at a PCI address where no GPU is listed.
func (l *kernelLogState) recordUnlisted(o health.Observation, s gpu.Snapshot) {
	l.unlistedCount++
	if x := (UnlistedXID{o.PCI, o.Code}); len(l.unlisted) < maxUnlisted && !slices.Contains(l.unlisted, x) {
		l.unlisted = append(slices.Clip(l.unlisted), x)
		if excludesUnidentified(s, o.PCI) {
			l.unidentified = append(slices.Clip(l.unidentified), o)
		}
	}
}

// takePending returns the observations that waited for the snapshot that was just applied.
func (s *State) takePending() []health.Observation {
	waited := s.kernelLog.pending
	s.kernelLog.pending, s.kernelLog.machineRead = nil, true
	var still []health.Observation
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

// excludesUnidentified reports whether the snapshot has a GPU at that PCI address whose UUID is not known.
func excludesUnidentified(s gpu.Snapshot, pci gpu.PCIAddress) bool {
	return slices.ContainsFunc(s.Excluded, func(e gpu.Exclusion) bool { return e.PCI == pci && e.At.GPU == "" })
}
