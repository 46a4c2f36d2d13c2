package main

import (
	"errors"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// past is what one life of the process knows for the next one, whether that is kept on disk, too, or not, or
// elsewhere: no new configuration heals a GPU. It is safe for concurrent use.
type past struct {
	mu      sync.Mutex
	record  *core.Checkpoint // nil = this is the first life
	latest  *store
	saved   bool     // some record of this process is on disk, in place of what was there before
	offered []string // resources, by any life
	grants  []kubeadapter.StoredAllocation
	handing *grants // the store of the latest life
}

// resources are those that earlier lives offered.
func (p *past) resources() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.offered
}

// offers notes what a life offered; what lives before it offered is among it.
func (p *past) offers(resources []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.offered = resources
}

// on returns the store of the next life, whose history is on disk, too, unless that is nil. Earlier ones keep
// nothing any more: one that hangs in a disk comes back late. boot reads the present boot of the machine.
func (p *past) on(disk monitor.Store, boot func() core.Boot) monitor.Store {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latest = &store{past: p, disk: disk, boot: boot}
	return p.latest
}

// store is the history of one life.
type store struct {
	past *past
	disk monitor.Store
	boot func() core.Boot
}

var (
	errNotLatest  = errors.New("another life of this process keeps the history")
	errNeverSaved = errors.New("it is from before this process, which could not save its own in its place")
)

// Load implements monitor.Store. The machine has not booted since an earlier life of this process, but its wall clock may
// have jumped. What is on disk from before this process is not replaced unread.
func (s *store) Load() (core.Checkpoint, string) {
	if r, saved := s.past.last(); r != nil {
		if !saved && s.disk != nil {
			s.disk.SetAside(errNeverSaved)
		}
		return r.Rebase(core.Boot{ID: r.BootID, Time: s.boot().Time}, time.Now()), r.BootID
	}
	if s.disk == nil {
		boot := s.boot()
		return core.Checkpoint{BootID: boot.ID, BootTime: boot.Time}, boot.ID
	}
	return s.disk.Load()
}

// SetAside implements monitor.Store.
func (s *store) SetAside(why error) {
	if s.disk != nil {
		s.disk.SetAside(why)
	}
}

// Save implements monitor.Store. The disk comes last, as it may hang. What only the process remembers is not saved: the
// next process does not know it.
func (s *store) Save(r core.Checkpoint) error {
	if !s.past.keep(s, r) {
		return errNotLatest
	}
	if s.disk == nil {
		return monitor.ErrNoStore
	}
	err := s.disk.Save(r)
	if err == nil {
		s.past.onDisk()
	}
	return err
}

func (p *past) last() (r *core.Checkpoint, saved bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record, p.saved
}

func (p *past) onDisk() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.saved = true
}

func (p *past) keep(from *store, r core.Checkpoint) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if from != p.latest {
		return false
	}
	p.record = &r
	return true
}

// grantsOn returns the store of what the next life hands out, which is on disk, too, unless that is nil. Earlier lives
// change nothing any more.
func (p *past) grantsOn(disk kubeadapter.AllocationStore) kubeadapter.AllocationStore {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.handing = &grants{past: p, disk: disk}
	return p.handing
}

// grants are the device IDs that one life handed out.
type grants struct {
	past *past
	disk kubeadapter.AllocationStore
}

// Load implements kubeadapter.AllocationStore.
func (g *grants) Load() []kubeadapter.StoredAllocation {
	g.past.mu.Lock()
	kept := g.past.grants
	g.past.mu.Unlock()
	if kept != nil || g.disk == nil {
		return kept
	}
	return g.disk.Load()
}

// Save implements kubeadapter.AllocationStore. The disk comes last, as it may hang.
func (g *grants) Save(kept []kubeadapter.StoredAllocation) {
	g.past.mu.Lock()
	latest := g.past.handing == g
	if latest {
		g.past.grants = kept
	}
	g.past.mu.Unlock()
	if latest && g.disk != nil {
		g.disk.Save(kept)
	}
}
