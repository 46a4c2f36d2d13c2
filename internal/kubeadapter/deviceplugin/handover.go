package deviceplugin

import "sync"

// Handover passes what the kubelet was given from the Plugins of one run of the agent to the next ones in this process, whether or not it is also on disk. The
// zero value is that of a new process. It is safe for concurrent use.
type Handover struct {
	mu          sync.Mutex
	resources   []string // of all
	allocations []StoredAllocation
	latest      *handoverStore
}

// offered returns the resources that earlier plugins offered. One without units is offered as an empty list: the kubelet counts
// the devices of a plugin that is gone for five more minutes.
func (h *Handover) offered() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.resources
}

func (h *Handover) setOffered(resources []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resources = resources
}

// handoverStore is the store of one run.
type handoverStore struct {
	handover *Handover
	disk     AllocationStore // nil = none
}

// next returns the store of the next run, which also writes to disk unless that is nil. The stores of earlier runs save
// nothing from then on.
func (h *Handover) next(disk AllocationStore) AllocationStore {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.latest = &handoverStore{handover: h, disk: disk}
	return h.latest
}

// Load implements AllocationStore.
func (s *handoverStore) Load() []StoredAllocation {
	s.handover.mu.Lock()
	allocations := s.handover.allocations
	s.handover.mu.Unlock()
	if allocations != nil || s.disk == nil {
		return allocations
	}
	return s.disk.Load()
}

// Missing implements AllocationStore.
func (s *handoverStore) Missing() bool { return s.disk != nil && s.disk.Missing() }

// Save implements AllocationStore. The disk is written last, as it may hang.
func (s *handoverStore) Save(allocations []StoredAllocation) {
	s.handover.mu.Lock()
	latest := s.handover.latest == s
	if latest {
		s.handover.allocations = allocations
	}
	s.handover.mu.Unlock()
	if latest && s.disk != nil {
		s.disk.Save(allocations)
	}
}
