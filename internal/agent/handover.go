package agent

import (
	"errors"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Handover passes the health history from one run of this process to the next, whether or not it is also on disk: a new
// configuration clears no fault. The zero value is that of a new process. It is safe for concurrent use.
type Handover struct {
	mu     sync.Mutex
	latest *handoverStore
	record *core.Checkpoint // nil = no run has saved one
	saved  bool             // the disk has a record of this process, in place of what was there before
}

// handoverStore is the store of one run.
type handoverStore struct {
	handover *Handover
	disk     monitor.Store    // nil = none
	boot     func() core.Boot // reads the present boot of the node
}

var (
	errNotLatest  = errors.New("a later run of this process has the history")
	errNeverSaved = errors.New("the record is from before this process, which could not replace it")
)

// next returns the store of the next run, which also writes to disk unless that is nil. The stores of earlier runs save nothing
// from then on: a run that hangs in a disk write may return late.
func (h *Handover) next(disk monitor.Store, boot func() core.Boot) monitor.Store {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.latest = &handoverStore{handover: h, disk: disk, boot: boot}
	return h.latest
}

// Load implements monitor.Store. The node has not booted since an earlier run of this process, but its wall clock may have been
// set. A record on disk from before this process is not replaced before it was read.
func (s *handoverStore) Load() (core.Checkpoint, string) {
	if r, saved := s.handover.last(); r != nil {
		if !saved {
			s.SetAside(errNeverSaved)
		}
		return r.Rebase(core.Boot{ID: r.BootID, Time: s.boot().Time}, time.Now()), r.BootID
	}
	if s.disk == nil {
		boot := s.boot()
		return core.Checkpoint{BootID: boot.ID, BootTime: boot.Time}, boot.ID
	}
	return s.disk.Load()
}

// Missing implements monitor.Store.
func (s *handoverStore) Missing() bool { return s.disk != nil && s.disk.Missing() }

// SetAside implements monitor.Store.
func (s *handoverStore) SetAside(why error) {
	if s.disk != nil {
		s.disk.SetAside(why)
	}
}

// Save implements monitor.Store. It returns nil only if the disk has the record, because the next process knows no other. The
// disk is written last, as it may hang.
func (s *handoverStore) Save(c core.Checkpoint) error {
	if !s.handover.set(s, c) {
		return errNotLatest
	}
	if s.disk == nil {
		return monitor.ErrNoStore
	}
	err := s.disk.Save(c)
	if err == nil {
		s.handover.mu.Lock()
		s.handover.saved = true
		s.handover.mu.Unlock()
	}
	return err
}

func (h *Handover) last() (r *core.Checkpoint, saved bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.record, h.saved
}

func (h *Handover) set(from *handoverStore, c core.Checkpoint) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if from != h.latest {
		return false
	}
	h.record = &c
	return true
}
