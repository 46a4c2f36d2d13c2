package main

import (
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// past is what one life of the process knows for the next one, whether that is kept on disk, too, or not, or
// elsewhere: no new configuration heals a GPU. It is safe for concurrent use.
type past struct {
	mu      sync.Mutex
	record  *core.Record // nil = this is the first life
	latest  *store
	offered []string // resources, by any life
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

// Load implements monitor.Store. The machine has not booted since an earlier life of this process, but its wall clock may
// have jumped.
func (s *store) Load() (core.Record, string) {
	if r := s.past.last(); r != nil {
		return r.Rebase(core.Boot{ID: r.Boot, At: s.boot().At}, time.Now()), r.Boot
	}
	if s.disk == nil {
		boot := s.boot()
		return core.Record{Boot: boot.ID, Booted: boot.At}, boot.ID
	}
	return s.disk.Load()
}

// Save implements monitor.Store. The disk comes last, as it may hang.
func (s *store) Save(r core.Record) {
	if s.past.keep(s, r) && s.disk != nil {
		s.disk.Save(r)
	}
}

func (p *past) last() *core.Record {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record
}

func (p *past) keep(from *store, r core.Record) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if from != p.latest {
		return false
	}
	p.record = &r
	return true
}
